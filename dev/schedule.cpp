// Plays a pipeline schedule in the simulator (dev/pipeline_simulator.h) and prints when each stage does what, as
// JSON. dev/schedule.py draws it.
//
//   make build/host/schedule && build/host/schedule --schedule 1f1b --stages 4 --micro-batches 8
//
// The times are given for a whole stage; each chunk takes its part of them. Exit code: 0, 1 if the schedule is wrong, 2
// for bad input.
#include <charconv>
#include <cstdio>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "dev/pipeline_simulator.h"

namespace {

struct Asked {
  std::string schedule = "1f1b";
  int stages = 4, chunks = 1, micro_batches = 8;
  double forward = 1, backward = 2, weight = 1, message = 0;
};

// CLI11's own ranges accept NaN.
std::string problem_with_time(const std::string& text) {
  double time = -1;
  const char* end = text.data() + text.size();
  const bool fits = std::from_chars(text.data(), end, time).ptr == end && time >= 0 && time <= 1e6;
  return fits ? "" : excerpt(text) + " is no time from 0 to 1000000";
}

void add_options(CLI::App& app, Asked& asked) {
  std::vector<std::string> schedules;
  for (const auto& [name, _] : pipeline_schedules) schedules.push_back(name);
  const auto add = [&](const char* option, auto& value, const char* meaning) {
    return app.add_option(option, value, meaning)->capture_default_str();
  };
  add("--schedule", asked.schedule, "which")->check(CLI::IsMember(schedules));
  add("--stages", asked.stages, "stages of the pipeline")->check(CLI::Range(1, 32));
  add("--chunks", asked.chunks, "chunks of layers of each stage")->check(CLI::Range(1, 16));
  add("--micro-batches", asked.micro_batches, "micro-batches of a step")->check(CLI::Range(1, 256));
  add("--forward", asked.forward, "how long a stage's forward takes")->check(problem_with_time);
  add("--backward", asked.backward, "how long its backward takes")->check(problem_with_time);
  add("--weight", asked.weight, "how much of that the gradients of weights take")->check(problem_with_time);
  add("--message", asked.message, "how long a message takes")->check(problem_with_time);
}

nlohmann::ordered_json play(const Asked& asked) {
  std::vector<Actions> lists;
  for (int number = 0; number < asked.stages; ++number) {
    const Stage stage = {asked.stages, number, asked.chunks};
    lists.push_back(make_schedule(asked.schedule, stage, asked.micro_batches));
    const std::string mistake = mistake_in(lists.back(), stage, asked.micro_batches);
    if (!mistake.empty()) fail(asked.schedule, ": stage ", number, ": ", mistake);
  }
  const double v = asked.chunks;
  const ChunkCosts chunk = {asked.forward / v, (asked.backward - asked.weight) / v, asked.weight / v};
  const PipelineCosts costs = {std::vector<ChunkCosts>(size_t(asked.stages * asked.chunks), chunk), asked.message};
  const PlayedStep step = play(lists, asked.chunks, costs);
  if (!step.problem.empty()) fail(asked.schedule, ": ", step.problem);

  nlohmann::ordered_json json = {{"schedule", asked.schedule}, {"chunks", asked.chunks},
                                 {"micro_batches", asked.micro_batches}, {"forward", asked.forward},
                                 {"backward", asked.backward}, {"weight", asked.weight}, {"message", asked.message},
                                 {"end", step.end}, {"stages", nlohmann::ordered_json::array()}};
  for (size_t stage = 0; stage < lists.size(); ++stage) {
    nlohmann::ordered_json actions = nlohmann::ordered_json::array();
    for (size_t i = 0; i < lists[stage].size(); ++i) {
      const Action& action = lists[stage][i];
      const PlayedStep::Span& span = step.spans[stage][i];
      actions.push_back({{"work", name_of(action.work)},
                         {"micro_batch", action.micro_batch},
                         {"chunk", action.chunk},
                         {"begin", span.begin},
                         {"end", span.end}});
    }
    json["stages"].push_back({{"idle", step.idle[stage]}, {"slots", slots_of(lists[stage])}, {"actions", actions}});
  }
  return json;
}

int end_with(int code, const std::string& problem) {
  std::fprintf(stderr, "error: %s\n", one_line(problem).c_str());
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  Asked asked;
  CLI::App app("Plays a pipeline schedule, and prints when each stage does what, as JSON.");
  add_options(app, asked);
  try {
    app.parse(argc, argv);
    if (asked.weight > asked.backward)
      throw CLI::ValidationError("--weight", "it is a part of --backward, and cannot take longer");
    const Stage first = {asked.stages, 0, asked.chunks};
    const std::string refusal = attempt([&] { make_schedule(asked.schedule, first, asked.micro_batches); });
    if (!refusal.empty()) throw CLI::ValidationError("--schedule", refusal);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    return end_with(2, error.what());
  }
  const std::string problem = attempt([&] { std::printf("%s\n", play(asked).dump().c_str()); });
  return problem.empty() ? 0 : end_with(1, problem);
}
