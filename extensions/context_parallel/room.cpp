#include "gpt/room.h"

#include "gpt/option_rules.h"
#include "gpt/option_values.h"

namespace {

void add_context_parallel_options(CLI::App& app, Options& o) {
  add(app, "--cp", o.mesh.cp, in_range(1, 1024),
      "ranks that split each sample between them, so that none holds all its tokens");
  add(app, "--cp-method", o.cp_method, one_of({"ring", "ulysses"}),
      "ring: keys travel from rank to rank; ulysses: a rank has all tokens of some heads");
}

void refuse_context_parallel_options(const Refusals& refuse, const Options& o) {
  refuse(o.mesh.cp == 1, {"--cp-method"}, "needs --cp: with one rank for a sample no token is elsewhere");
}

}  // namespace

extern const Room context_parallel_room;
const Room context_parallel_room = {.name = "context_parallel", .add_options = add_context_parallel_options, .refuse_together = refuse_context_parallel_options};
