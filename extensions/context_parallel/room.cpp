#include "extensions/context_parallel/sequence_split.h"
#include "gpt/room_options.h"

Room context_parallel_room = {
    .name = "context_parallel",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--cp", o.mesh.cp, in_range(1, 1024),
          "ranks that split each sample between them, so that none holds all its tokens");
      add(app, "--cp-method", o.cp_method, one_of({"ring", "ulysses"}),
          "ring: keys and values travel from rank to rank; ulysses: a rank has all tokens of some heads");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.mesh.cp == 1, {"--cp-method"}, "needs --cp: with one rank for a sample no token is elsewhere");
    },
    .hand_down = [](RoomOptions& model, const StepOptions& o) {
      model.of<ContextOptions>() = {o.cp_method == "ring" ? ContextMethod::ring : ContextMethod::ulysses};
    },
    .shape_problem = [](const StepOptions& o) -> std::string {
      const int tp = o.mesh.tp, cp = o.mesh.cp, heads = o.shape.heads, parts = o.parts_of_a_sample();
      if (o.cp_method == "ulysses" && heads % tp == 0 && heads / tp % cp != 0)
        return concat("--cp-method ulysses: --cp ", cp, " does not divide the ", heads / tp, " heads", tp > 1 ? " of a --tp rank" : "",
                      ": choose ", heads > tp ? divisors_text(heads / tp, 2) + ", or " : "", "--cp-method ring");
      if (o.seq_len % parts == 0) return "";
      return concat("--cp ", cp, " cuts samples into ", parts, " equal parts, and ", parts, " does not divide --seq-len ", o.seq_len,
                    cure_of_seq_len(o, "--cp", parts));
    },
    .positions = [](const RoomOptions& model, int seq_len, int ranks, int rank) {
      return positions_of(model.of<ContextOptions>().method, seq_len, ranks, rank);
    },
};
