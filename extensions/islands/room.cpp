#include "extensions/islands/islands.h"
#include "gpt/room_options.h"

Room islands_room = {
    .name = "islands",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--islands", o.mesh.islands, in_range(1, 1024),
          "groups of ranks with slow links between them, each of which makes --local-steps updates by itself "
          "(--tp, --cp and --pp split one island)");
      add(app, "--local-steps", o.outer.local_steps, in_range(1, 1'000'000),
          "updates between two outer steps, which average the islands' weights")->default_str("");
      add(app, "--outer-lr", o.outer.lr, in_range(0.0, 10.0), "learning rate of outer steps; 1: the mean of the islands' weights, if there is no momentum");
      add(app, "--outer-momentum", o.outer.momentum, in_range(0.0, 0.999), "Nesterov's momentum of outer steps");
      add(app, "--outer-dtype", o.outer.dtype, one_of({"fp32", "int8", "int4"}),
          "type of messages between islands: weights in fp32, or changes as codes of 8 or 4 bits");
      add(app, "--outer-delay", o.outer.delay, in_range(0, 1'000'000), "updates that islands make while the messages of an outer step "
          "travel, less than --local-steps; none where the run validates, saves or samples, or ends");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      const bool is_outer = o.outer.is_on();
      refuse(!is_outer, {"--islands"}, "needs --local-steps: after how many updates the islands meet");
      refuse(!is_outer, {"--outer-lr", "--outer-momentum", "--outer-dtype", "--outer-delay"}, "is for --local-steps: add that, or leave it out");
      refuse(is_outer, {"--shares", "--calibrate", "--check-mesh", "--stochastic-rounding", "--delay", "--compress", "--compress-weights"}, "beside --local-steps is not there yet: leave one of them out");
      refuse(is_outer && o.outer.delay >= o.outer.local_steps, {"--outer-delay"},
             concat("beside --local-steps ", o.outer.local_steps, ": an outer step has to end before the next one begins; choose ", o.outer.local_steps - 1, " or less"));
      refuse(o.outer.delay > 0, {"--sample-seconds"}, "beside --outer-delay: outer steps wait for samples, and a clock would change what is learned; choose --sample-every");
      refuse(is_outer && o.dtype == "fp16", {"--dtype"}, "beside --local-steps is not there yet, as each island would have a loss scale of its own: choose bf16");
      refuse(is_outer && o.dtype != "fp32" && o.offloads("optimizer"), {"--offload"}, "beside --local-steps is not there yet, as masters would be in the host's memory: choose activations only");
    },
    .complete = [](Options& o) { o.sms.beside_islands = o.outer.delay > 0; },
    .hand_down = [](RoomOptions& model, const StepOptions& o) { model.of<OuterOptions>() = o.outer; },
    .add_arithmetic = [](nlohmann::json& arithmetic, const Options& o) {
      arithmetic.update({{"outer", text_of(o.outer)},
          {"outer_waits", !o.outer.delay ? "off" : concat("val ", o.val.empty() ? 0 : o.val_every, ", checkpoint ", o.checkpoint_every, ", sample ", o.sample_every, ", check-sync ", o.check_sync)}});
    },
};
