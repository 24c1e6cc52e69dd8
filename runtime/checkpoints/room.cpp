#include "gpt/room_options.h"
#include "runtime/checkpoints/options.h"

Room checkpoints_room = {
    .name = "checkpoints",
    .add_options = [](CLI::App& app, Options& o) {
      CheckpointFiles& files = o.of<CheckpointFiles>();
      add(app, "--shard-size", files.shard_size, in_range(1e-6, 1e6),
          "largest size of a checkpoint's file, GB (a larger tensor has a file of its own)");
      add(app, "--keep-every", files.keep_every, any_count, "keep also the checkpoints of every N-th step; 0: none");
      app.add_flag("--keep-best", files.keep_best, "save whenever val_loss reaches a new minimum; OUT/best links to that "
                   "checkpoint, --keep does not remove it");
      add(app, "--patience", files.patience, any_count,
          "end the run after this number of validations without a lower val_loss; implies --keep-best; 0: never");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.val.empty(), {"--keep-best"}, "needs --val FILES");
      refuse(o.of<CheckpointFiles>().patience > 0 && (o.val.empty() || !o.val_every), {"--patience"}, "needs --val FILES and --val-every N");
      refuse(o.out.empty(), {"--keep-best"}, "needs a run folder, and --out '' names none");
    },
    .complete = [](Options& o) {
      CheckpointFiles& files = o.of<CheckpointFiles>();
      files.keep_best |= files.patience > 0 && !o.out.empty();
    },
};
