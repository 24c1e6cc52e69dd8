#include "gpt/room_options.h"
#include "runtime/traces/options.h"

Room traces_room = {
    .name = "traces",
    .add_options = [](CLI::App& app, Options& o) {
      TraceFiles& files = o.of<TraceFiles>();
      app.add_option("--trace", files.timeline, "write a timeline of kernels and collectives, for ui.perfetto.dev; grows step by step")
          ->type_name("FILE");
      app.add_option("--trace-tensors", files.tensors, "write sums and checksums of all kernels' outputs, for dev/compare.py")
          ->type_name("FILE");
    },
    .refuse_together = [](const Refusals&, const Options& o) {
      const TraceFiles& files = o.of<TraceFiles>();
      if (!files.timeline.empty() && files.timeline == files.tensors)
        usage_error("--trace and --trace-tensors both write ", excerpt(files.timeline), ": give each a file of its own");
    },
};
