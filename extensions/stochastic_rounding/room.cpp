#include "gpt/room_options.h"

Room stochastic_rounding_room = {
    .name = "stochastic_rounding",
    .add_options = [](CLI::App& app, Options& o) {
      app.add_flag("--stochastic-rounding", o.stochastic_rounding, "train bf16 weights without fp32 master copies");
      add(app, "--moments", o.moments, one_of({"fp32", "bf16"}), "type of AdamW's moments: fp32, or bf16 (rounded stochastically)");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.dtype != "bf16", {"--stochastic-rounding"}, "rounds bf16 weights: it needs --dtype bf16");
    },
    .add_arithmetic = [](nlohmann::json& arithmetic, const Options& o) {
      arithmetic.update({{"stochastic_rounding", o.stochastic_rounding}, {"moments", o.moments}});
    },
};
