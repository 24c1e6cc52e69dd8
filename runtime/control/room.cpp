#include "gpt/room.h"

#include "gpt/option_values.h"

namespace {

void add_control_options(CLI::App& app, Options& o) {
  add(app, "--collective-timeout", o.collective_timeout, in_range(0., 1e6),
      "seconds after which a collective counts as hung; 0: never");
}

}  // namespace

extern const Room control_room;
const Room control_room = {.name = "control", .add_options = add_control_options};
