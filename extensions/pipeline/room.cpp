#include "gpt/room.h"

#include "extensions/pipeline/pipeline.h"
#include "gpt/option_rules.h"
#include "gpt/option_values.h"

namespace {

void add_pipeline_options(CLI::App& app, Options& o) {
  add(app, "--pp", o.mesh.pp, in_range(1, ModelShape::most_layers),
      "pipeline stages, each of which has some of the layers, on ranks of its own");
  add(app, "--pp-schedule", o.pp_schedule, one_of(pipeline_schedules),
      "order of the stages' work: gpipe, 1f1b, interleaved or zb (zero bubble)");
  add(app, "--pp-chunks", o.pp_chunks, in_range(2, ModelShape::most_layers),
      "of layers, which each stage has in the interleaved schedule")->default_str("2");
}

void refuse_pipeline_options(const Refusals& refuse, const Options& o) {
  refuse(o.mesh.pp == 1, {"--pp-schedule", "--pp-chunks"}, "needs --pp: with one stage there is no pipeline");
  refuse(o.pp_schedule != "interleaved", {"--pp-chunks"},
         "needs --pp-schedule interleaved: with " + o.pp_schedule + " a stage has one chunk");
}

void complete_pipeline_options(const Refusals& options, Options& o) {
  if (o.pp_schedule == "interleaved" && !options.given("--pp-chunks")) o.pp_chunks = 2;
}

}  // namespace

extern const Room pipeline_room;
const Room pipeline_room = {.name = "pipeline", .add_options = add_pipeline_options, .refuse_together = refuse_pipeline_options, .complete = complete_pipeline_options};
