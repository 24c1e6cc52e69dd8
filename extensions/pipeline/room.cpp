#include <algorithm>

#include "extensions/pipeline/pipeline.h"
#include "gpt/room_options.h"

Room pipeline_room = {
    .name = "pipeline",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--pp", o.mesh.pp, in_range(1, ModelShape::most_layers),
          "pipeline stages, each of which has some of the layers, on ranks of its own");
      add(app, "--pp-schedule", o.pp_schedule, one_of(pipeline_schedules),
          "order of the stages' work: gpipe, 1f1b, interleaved or zb (zero bubble)");
      add(app, "--pp-chunks", o.pp_chunks, in_range(2, ModelShape::most_layers),
          "of layers, which each stage has in the interleaved schedule")->default_str("2");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.mesh.pp == 1, {"--pp-schedule", "--pp-chunks"}, "needs --pp: with one stage there is no pipeline");
      refuse(o.pp_schedule != "interleaved", {"--pp-chunks"},
             "needs --pp-schedule interleaved: with " + o.pp_schedule + " a stage has one chunk");
    },
    .complete = [](Options& o) {
      if (o.pp_schedule == "interleaved") o.pp_chunks = std::max(o.pp_chunks, 2);  // 1: not given
    },
};
