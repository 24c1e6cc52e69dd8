#include "gpt/room_options.h"
#include "runtime/checks/options.h"

Room checks_room = {
    .name = "checks",
    .add_options = [](CLI::App& app, Options& o) {
      CheckOptions& checks = o.of<CheckOptions>();
      add(app, "--check-sync", o.check_sync, any_count, "steps between comparisons of tensors that must be the same on several ranks; 0: none");
      app.add_flag("--check-ranks", checks.ranks, "time each rank's arithmetic, memory and links first; name slow ones, and "
                   "refuse less than 5 GB/s between the GPUs of two hosts");
      app.add_flag("--check-mesh", checks.mesh, "train three steps of a smaller job first, on this mesh and on one rank; "
                   "refuse to train if they differ");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.plan || o.generate, {"--check-mesh"}, "compares steps of training: leave it out");
    },
    .refuse_on_ranks = [](const Options& o) {
      if (o.mesh.ranks() == 1 && o.of<CheckOptions>().mesh) usage_error("--check-mesh compares several ranks with one, and this is one: leave it out");
    },
};
