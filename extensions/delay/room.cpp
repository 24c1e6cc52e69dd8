#include "extensions/delay/options.h"
#include "gpt/room_options.h"

Room delay_room = {
    .name = "delay",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--delay", o.delay, in_range(0, 1), "steps by which gradients are applied late; 1: their sum over ranks overlaps "
          "a whole step; it changes the loss curve, and needs memory for a second array of gradients");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.dtype == "fp16" && o.delay > 0, {"--delay"}, "beside --dtype fp16, whose loss scale may change before gradients are "
             "applied: choose --dtype bf16, or leave --delay out");
    },
    .hand_down = [](RoomOptions& model, const StepOptions& o) { model.of<DelayOptions>() = {o.delay > 0}; },
    .batch_problem = [](const StepOptions& o) {
      return !o.delay || o.zero < 2 ? "" : concat("--delay 1 with --zero ", o.zero, ": gradients are cut and sent in each micro-step, "
          "and can't wait for a step; choose --zero 0 or 1, or leave --delay out");
    },
    .add_arithmetic = [](nlohmann::json& arithmetic, const Options& o) {
      arithmetic.update({{"delay", o.delay ? "1 step" : "off"}});
    },
};
