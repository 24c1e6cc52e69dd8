#include "gpt/room_options.h"

Room context_parallel_room = {
    .name = "context_parallel",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--cp", o.mesh.cp, in_range(1, 1024),
          "ranks that split each sample between them, so that none holds all its tokens");
      add(app, "--cp-method", o.cp_method, one_of({"ring", "ulysses"}),
          "ring: keys travel from rank to rank; ulysses: a rank has all tokens of some heads");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.mesh.cp == 1, {"--cp-method"}, "needs --cp: with one rank for a sample no token is elsewhere");
    },
};
