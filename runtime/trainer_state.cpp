#include "runtime/trainer_state.h"

#include <cstdio>

#include <nlohmann/json.hpp>

#include "processes/error.h"
#include "runtime/arithmetic.h"
#include "runtime/checkpoint.h"

namespace {

LossScale restored(LossScale scale, const nlohmann::json& stored, const std::string& file) {
  const auto number = [&](const char* name, double otherwise, double most) {
    const nlohmann::json value = stored.is_object() ? stored.value(name, nlohmann::json(otherwise)) : stored;
    if (!stored.is_object() || !value.is_number() || !(value >= 0 && value <= most))
      fail(file, ": its \"loss_scale\" is ", excerpt(stored.dump()), ", not what this program writes: resume from another checkpoint");
    return value.get<double>();
  };
  scale.value = float(number("value", scale.value, LossScale::most));
  scale.good_steps = int(number("good_steps", 0, 1e9));
  return scale;
}

// The number of samples that were taken: a global batch per step, and those that rollbacks left out. The step must be the
// one that the folder's name gives, or a folder that was renamed would be trained on as if it had come further.
size_t samples_of(const nlohmann::json& trainer, size_t step, const Options& options, const std::filesystem::path& folder) {
  if (trainer.at("step") != step)
    fail(folder, ": holds step ", trainer.at("step").dump(), " by its trainer.json: give the folder the name that it had");
  const nlohmann::json samples = trainer.value("samples", nlohmann::json());
  if (!samples.is_number_unsigned() || samples < step * size_t(options.global_batch))
    fail(folder, ": its trainer.json says that ", excerpt(samples.dump()), " samples were taken, in ", step, " steps of ",
         options.global_batch, ": resume from another checkpoint");
  return samples;
}

// The number of steps of the run. --train-minutes determines it only once, at the first start, because the learning
// rate depends on it.
size_t steps_of(const nlohmann::json& trainer, const Options& options, const std::filesystem::path& folder) {
  const nlohmann::json steps = trainer.value("steps", nlohmann::json());
  const bool known = steps.is_number_unsigned();
  if (options.train_minutes > 0 && (!known || trainer.value("train_minutes", nlohmann::json()) != options.train_minutes))
    usage_error("--resume: --train-minutes ", options.train_minutes, " is not what the run in ", folder.string(),
                " was started with; give --steps to train longer");
  return known ? steps.get<size_t>() : 0;
}

// Prints a message if the validation data differ. That is no error, because validation changes no update.
void report_other_validation(const nlohmann::json& trainer, const DataIdentity& val, const std::filesystem::path& folder) {
  const nlohmann::json before = trainer.value("val_data", nlohmann::json("none"));
  if (before == "none" || val.tokens == 0 || before == val.text()) return;
  std::printf("--val holds other data than the run in %s was validated on: what follows is another val_loss\n",
              folder.c_str());
}

// Says that training longer than planned raises the learning rate, which had fallen for the planned end.
void report_higher_rate(size_t planned, size_t step, const Schedule& schedule) {
  Schedule before = schedule;
  before.steps = planned;
  if (planned > 0 && learning_rate(schedule, step) > learning_rate(before, step))
    std::printf("--steps %zu instead of %zu raises the learning rate at step %zu from %g to %g (%s); --init starts a schedule "
                "of its own\n",
                schedule.steps, planned, step + 1, learning_rate(before, step), learning_rate(schedule, step),
                schedule.kind.c_str());
}

}  // namespace

std::string trainer_text(const TrainerState& state, const Guard& guard, const Options& options, const RunData& data) {
  const nlohmann::json trainer = {
      {"samples", state.samples},
      {"steps", state.steps},
      {"train_minutes", options.train_minutes},
      {"arithmetic", arithmetic(options, data.train)},
      {"val_data", data.val.text()},
      {"guard", guard.state()},
      {"loss_scale", {{"value", state.loss_scale.value}, {"good_steps", state.loss_scale.good_steps}}},
      {"algorithms", state.algorithms}};
  return trainer.dump();
}

TrainerState load_trainer_state(const std::filesystem::path& folder, size_t step, const LossScale& loss_scale, Guard& guard,
                                const Options& options, const RunData& data) {
  const nlohmann::json trainer = load_trainer(folder);
  const std::string file = folder / "trainer.json";
  check_same_arithmetic(trainer.value("arithmetic", nlohmann::json::object()), arithmetic(options, data.train), folder);
  report_other_validation(trainer, data.val, folder);
  if (trainer.contains("guard")) guard.restore(trainer["guard"], file);
  TrainerState state;
  state.samples = samples_of(trainer, step, options, folder);
  state.steps = steps_of(trainer, options, folder);
  if (options.steps_given) report_higher_rate(state.steps, step, options.schedule);
  state.loss_scale = restored(loss_scale, trainer.value("loss_scale", nlohmann::json::object()), file);
  const nlohmann::json algorithms = trainer.value("algorithms", nlohmann::json::object());
  for (const auto& [product, choice] : algorithms.items())
    if (choice.is_string()) state.algorithms[product] = choice;
  return state;
}
