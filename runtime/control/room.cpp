#include "gpt/room_options.h"
#include "runtime/control/options.h"
#include "runtime/control/start.h"

Room control_room = {
    .name = "control",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--collective-timeout", o.of<ControlOptions>().collective_timeout, in_range(0., 1e6),
          "seconds after which a collective counts as hung; 0: never");
    },
    .connect = [](const Launch& launch) -> std::unique_ptr<Ranks> { return start_control(launch); },
};
