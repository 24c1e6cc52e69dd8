#include "gpt/room_options.h"
#include "runtime/budget/options.h"

Room budget_room = {
    .name = "budget",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--train-minutes", o.train_minutes, in_range(0.001, 1e7),
          "instead of --steps: minutes to train; the number of steps follows from a few that are measured first");
      add(app, "--max-hours", o.of<TimeLimit>().hours, in_range(0., 1e6),
          "hours after which the program finishes the step, saves and ends with exit code 75; 0: no limit");
    },
    .refuse_together = [](const Refusals& refuse, const Options&) {
      refuse(refuse.given("--steps"), {"--train-minutes"}, "beside --steps: both say how long to train; give one of them");
    },
    .complete = [](Options& o) {
      if (o.train_minutes > 0) o.schedule.steps = Options::most_steps;  // until some have been timed (runtime/budget/hook.cuh)
    },
};
