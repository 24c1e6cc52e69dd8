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
    .shape_problem = [](const StepOptions& o) -> std::string {
      const int tp = o.mesh.tp, cp = o.mesh.cp, heads = o.shape.heads;
      if (heads % tp != 0)
        return concat("--tp ", tp, " does not divide the model's ", heads, " heads: choose ", divisors_text(heads));
      if (o.generate || o.rows() % tp == 0) return "";
      return concat("--tp ", tp, " does not divide the ", o.rows(), " rows of a micro-batch, --micro-batch ", o.micro_batch, " of --seq-len ",
                    o.seq_len, cp > 1 ? " over --cp " + std::to_string(cp) : "", cure_of_seq_len(o, "--tp", tp * o.parts_of_a_sample()));
    },
};
