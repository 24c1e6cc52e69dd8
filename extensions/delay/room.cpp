#include "gpt/room.h"

#include <nlohmann/json.hpp>

#include "gpt/option_rules.h"
#include "gpt/option_values.h"

namespace {

void add_delay_options(CLI::App& app, Options& o) {
  add(app, "--delay", o.delay, in_range(0, 1), "steps after which gradients are applied; 1: a whole step hides their "
      "sums over ranks, and the curve is another one; takes a second array of gradients");
}

void refuse_delay_options(const Refusals& refuse, const Options& o) {
  refuse(o.dtype == "fp16" && o.delay > 0, {"--delay"}, "beside --dtype fp16, whose loss scale may change before gradients are "
         "applied: choose --dtype bf16, or leave --delay out");
}

void add_delay_arithmetic(nlohmann::json& arithmetic, const Options& o) {
  arithmetic.update({{"delay", o.delay ? "1 step" : "off"}});
}

}  // namespace

extern const Room delay_room;
const Room delay_room = {.name = "delay", .add_options = add_delay_options, .refuse_together = refuse_delay_options, .add_arithmetic = add_delay_arithmetic};
