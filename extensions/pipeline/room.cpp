#include <algorithm>

#include "extensions/pipeline/pipeline.h"
#include "gpt/room_options.h"

static const Staging pipeline_staging = {make_schedule, validation_schedule, layers_of_stage};
Room pipeline_room = {
    .name = "pipeline",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--pp", o.mesh.pp, in_range(1, ModelShape::most_layers),
          "pipeline stages, each of which has some of the layers, on ranks of its own");
      add(app, "--pp-schedule", o.pp_schedule, one_of(pipeline_schedules),
          "order of the stages' work: gpipe, 1f1b, interleaved or zb (zero bubble)");
      add(app, "--pp-chunks", o.pp_chunks, in_range(2, ModelShape::most_layers),
          "chunks of layers per stage in the interleaved schedule")->default_str("2");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.mesh.pp == 1, {"--pp-schedule", "--pp-chunks"}, "needs --pp: with one stage there is no pipeline");
      refuse(o.pp_schedule != "interleaved", {"--pp-chunks"},
             "needs --pp-schedule interleaved: with " + o.pp_schedule + " a stage has one chunk");
    },
    .complete = [](Options& o) {
      if (o.pp_schedule == "interleaved") o.pp_chunks = std::max(o.pp_chunks, 2);  // 1: not given
    },
    .batch_problem = [](const StepOptions& o) -> std::string {
      const int pp = o.mesh.pp;
      if (o.pp_schedule == "interleaved" && o.micro_batches() % pp != 0 && !o.generate)
        return concat("--pp-schedule interleaved: --global-batch ", o.global_batch, " gives each rank ", o.micro_batches(),
                      " micro-batches, no multiple of --pp ", pp, ": choose --global-batch ",
                      (o.micro_batches() / pp + 1) * pp * o.micro_batch * o.mesh.batches(), ", or another schedule");
      if (o.pp_schedule == "zb" && o.zero >= 2)
        return concat("--pp-schedule zb with --zero ", o.zero, ": the gradients of a layer come at two times, and --zero 2 "
                      "and 3 send them away at one; choose --zero 0 or 1, or another schedule");
      if (o.pp_schedule == "zb" && o.recompute != "none")
        return concat("--pp-schedule zb with --recompute ", o.recompute, ": the gradients of weights, which come last, "
                      "need all activations; leave --recompute out, or choose another schedule");
      return "";
    },
    .shape_problem = [](const StepOptions& o) -> std::string {
      const int pp = o.mesh.pp, chunks = o.pp_chunks;
      if (o.shape.layers >= pp * chunks) return "";
      return concat("--pp ", pp, chunks > 1 ? " with --pp-chunks " + std::to_string(chunks) : "", " needs ", pp * chunks,
                    " layers or more, and the model has ", o.shape.layers, ": lower ", chunks > 1 ? "one of them" : "it");
    },
    .staging = &pipeline_staging,
};
