#include "gpt/room_options.h"
#include "runtime/guard/options.h"

Room guard_room = {
    .name = "guard",
    .add_options = [](CLI::App& app, Options& o) {
      GuardOptions& g = o.of<GuardOptions>();
      add(app, "--on-spike", g.on_spike, one_of({"log", "skip", "rollback"}),
          "reaction to a loss or norm far above the last ones: log it and train on, skip the update, or roll back");
      add(app, "--spike-z", g.z, in_range(0.1, 1e6), "standard deviations above the mean that make a spike");
      add(app, "--spike-window", g.window, in_range(size_t(2), size_t(1) << 20), "number of last steps for that mean and deviation");
      add(app, "--max-rollbacks", g.most_rollbacks, any_count, "rollbacks after which another spike ends the run");
      add(app, "--max-skips", g.most_in_a_row, positive_count, "number of updates left out in a row that ends the run");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      if (o.of<GuardOptions>().on_spike != "rollback") return;
      refuse(o.outer.is_on(), {"--on-spike"}, "beside --local-steps: a spike is one island's, and the others would lose good steps; choose skip");
      refuse(o.out.empty() || !o.checkpoint_every, {"--on-spike"}, "goes back to a checkpoint: give --out and --checkpoint-every");
    },
    .add_arithmetic = [](nlohmann::json& arithmetic, const Options& o) {
      const GuardOptions& g = o.of<GuardOptions>();
      arithmetic.update({{"on_spike", g.on_spike}, {"spike_z", g.z}, {"spike_window", g.window}});
    },
};
