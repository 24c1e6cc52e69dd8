#include "gpt/room.h"

#include <nlohmann/json.hpp>

#include "gpt/option_rules.h"
#include "gpt/option_values.h"

namespace {

void add_stochastic_rounding_options(CLI::App& app, Options& o) {
  app.add_flag("--stochastic-rounding", o.stochastic_rounding, "bf16 weights without fp32 master copies");
  add(app, "--moments", o.moments, one_of({"fp32", "bf16"}), "fp32 or bf16 (rounded stochastically): AdamW's moments");
}

void refuse_stochastic_rounding_options(const Refusals& refuse, const Options& o) {
  refuse(o.dtype != "bf16", {"--stochastic-rounding"}, "rounds bf16 weights: it needs --dtype bf16");
}

void add_stochastic_rounding_arithmetic(nlohmann::json& arithmetic, const Options& o) {
  arithmetic.update({{"stochastic_rounding", o.stochastic_rounding}, {"moments", o.moments}});
}

}  // namespace

extern const Room stochastic_rounding_room;
const Room stochastic_rounding_room = {.name = "stochastic_rounding", .add_options = add_stochastic_rounding_options, .refuse_together = refuse_stochastic_rounding_options, .add_arithmetic = add_stochastic_rounding_arithmetic};
