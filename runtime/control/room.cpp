#include "gpt/room_options.h"

Room control_room = {
    .name = "control",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--collective-timeout", o.collective_timeout, in_range(0., 1e6),
          "seconds after which a collective counts as hung; 0: never");
    },
};
