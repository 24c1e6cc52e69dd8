#include "gpt/room.h"

#include "gpt/option_rules.h"
#include "gpt/option_values.h"

namespace {

void add_tensor_parallel_options(CLI::App& app, Options& o) {
  add(app, "--tp", o.mesh.tp, in_range(1, 1024),
      "ranks that split each layer between them; the others train on other samples");
  add(app, "--tp-pieces", o.tp_pieces, in_range(1, 64),
      "in which --tp sends rows: one travels while another is computed");
}

void refuse_tensor_parallel_options(const Refusals& refuse, const Options& o) {
  refuse(o.mesh.tp == 1, {"--tp-pieces"}, "needs --tp: with one rank for a layer no row is sent");
}

}  // namespace

extern const Room tensor_parallel_room;
const Room tensor_parallel_room = {.name = "tensor_parallel", .add_options = add_tensor_parallel_options, .refuse_together = refuse_tensor_parallel_options};
