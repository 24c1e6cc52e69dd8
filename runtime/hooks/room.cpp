#include "gpt/room_options.h"
#include "runtime/hooks/options.h"

Room hooks_room = {
    .name = "hooks",
    .add_options = [](CLI::App& app, Options& o) {
      HookOptions& hooks = o.of<HookOptions>();
      app.add_option("--after-checkpoint", hooks.after_checkpoint, "command for each finished checkpoint, such as an "
                     "upload: it gets GPT_CHECKPOINT, GPT_STEP and GPT_OUT, and is repeated until it succeeds")->type_name("CMD");
      app.add_option("--stop-when", hooks.stop_when, "command that runs every 5 s: when it succeeds, the run is saved and ends "
                     "with exit code 75")->type_name("CMD");
      app.add_option("--on-end", hooks.on_end, "command for the end, however it comes: it gets GPT_REASON (done, stopped, "
                     "time, error, killed), GPT_EXIT_CODE and GPT_UPLOADED, too")->type_name("CMD");
      add(app, "--hook-timeout", hooks.timeout, in_range(0., 1e6),
          "seconds that the end waits for the last upload, and for --on-end; 0: 3600 after a finished run, else 90");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      const HookOptions& hooks = o.of<HookOptions>();
      refuse(hooks.after_checkpoint.empty() && hooks.on_end.empty(), {"--hook-timeout"}, "needs --after-checkpoint or --on-end");
      refuse(o.out.empty(), {"--after-checkpoint", "--stop-when", "--on-end"}, "needs a run folder, and --out '' names none");
      refuse(o.generate, {"--after-checkpoint", "--stop-when", "--on-end"}, "beside --generate: hooks are for training");
    },
    .is_private = true,
};
