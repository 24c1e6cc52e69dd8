#include "gpt/room_options.h"

Room tensor_parallel_room = {
    .name = "tensor_parallel",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--tp", o.mesh.tp, in_range(1, 1024),
          "ranks that split each layer between them; the others train on other samples");
      add(app, "--tp-pieces", o.tp_pieces, in_range(1, 64),
          "in which --tp sends rows: one travels while another is computed");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.mesh.tp == 1, {"--tp-pieces"}, "needs --tp: with one rank for a layer no row is sent");
    },
};
