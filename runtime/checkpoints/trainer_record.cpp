#include "runtime/checkpoints/trainer_record.h"

#include <cstdio>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/json_fields.h"
#include "gpt/checkpoint.h"

namespace {

// scale: the default, used if the checkpoint stores none.
LossScale loss_scale_of(JsonFields& trainer, LossScale scale) {
  if (!trainer.has("loss_scale")) return scale;
  JsonFields stored = trainer.object("loss_scale");
  const auto number = [&](const char* key, size_t most) {
    return stored.get<double>(key, "a number from 0 to " + std::to_string(most),
                              [&](const auto& found) { return found.is_number() && found >= 0 && found <= most; });
  };
  if (stored.has("value")) scale.value = float(number("value", size_t(LossScale::most)));
  scale.good_steps = stored.has("good_steps") ? int(number("good_steps", 1'000'000'000)) : 0;
  return scale;
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

// Prints a message for each set that was there and has other samples now. That is no error, because validation changes no
// update. before: texts by key, or one text (by earlier versions, which had one set and did not store the number of
// batches)
void report_other_validation(const nlohmann::json& before, const RunData& data, const std::filesystem::path& folder) {
  for (const auto& [key, now] : data.val) {
    const nlohmann::json was = before.is_object() ? before.value(key, nlohmann::json()) : key == "val_loss" ? before : nullptr;
    if (!was.is_string() || was == "none" || now.starts_with(was.get<std::string>())) continue;
    std::printf("--val holds other data than the run in %s was validated on, or --val-batches is another: what follows is another %s\n",
                folder.c_str(), key.c_str());
  }
}

// The best validation so far; none if it was measured on other samples.
BestValidation best_of(JsonFields& trainer, const RunData& data) {
  if (!trainer.has("best") || !data.val.contains("val_loss")) return {};
  JsonFields before = trainer.object("val_data"), best = trainer.object("best");
  if (!before.has("val_loss") || before.value("val_loss") != data.val.at("val_loss")) return {};
  BestValidation stored = {INFINITY, best.size("step"), best.size("since")};
  if (stored.step > 0 && best.has("val_loss") && best.value("val_loss").is_null()) return {};  // JSON has no infinity: one was best in earlier versions
  if (stored.step > 0) stored.loss = best.get<double>("val_loss", "a number", [](const auto& found) { return found.is_number(); });
  return stored;
}

// Says that training longer than planned raises the learning rate, which had fallen for the planned end.
void report_higher_rate(size_t planned, size_t step, const LearningRateSchedule& schedule) {
  LearningRateSchedule before = schedule;
  before.steps = planned;
  if (planned > 0 && learning_rate(schedule, step) > learning_rate(before, step))
    std::printf("--steps %zu instead of %zu raises the learning rate at step %zu from %g to %g (%s); --init starts a schedule "
                "of its own\n",
                schedule.steps, planned, step + 1, learning_rate(before, step), learning_rate(schedule, step),
                schedule.kind.c_str());
}

}  // namespace

std::string trainer_text(const TrainerRecord& state, const Guard& guard, const Options& options, const RunData& data) {
  nlohmann::json trainer = {
      {"samples", state.samples},
      {"steps", state.steps},
      {"train_minutes", options.train_minutes},
      {"arithmetic", arithmetic(options, data.train)},
      {"val_data", data.val},
      {"shares", options.shares},
      {"best", {{"val_loss", state.best.loss}, {"step", state.best.step}, {"since", state.best.since}}},
      {"guard", guard.state()},
      {"loss_scale", {{"value", state.loss_scale.value}, {"good_steps", state.loss_scale.good_steps}}},
      {"algorithms", state.algorithms}};
  if (state.waiting) trainer["waiting"] = *state.waiting;
  for (const std::string& other : state.other_guards) trainer["other_guards"].push_back(nlohmann::json::parse(other));
  return trainer.dump();
}

TrainerRecord load_trainer_record(const std::filesystem::path& folder, size_t step, const LossScale& loss_scale, Guard& guard,
                                  const Options& options, const RunData& data, int island) {
  const nlohmann::json trainer = load_trainer(folder);
  JsonFields fields(folder / "trainer.json", trainer, ": resume from another checkpoint");
  nlohmann::json wanted = arithmetic(options, data.train);
  if (!options.attention_given) wanted.erase("attention");  // it is the run's, where that is there
  check_same_arithmetic(trainer.value("arithmetic", nlohmann::json::object()), wanted, folder);
  report_other_validation(trainer.value("val_data", nlohmann::json()), data, folder);
  // Otherwise a renamed folder would continue as if it were at another step.
  if (trainer["step"] != step)
    fail(folder, ": holds step ", trainer["step"].dump(), " by its trainer.json: give the folder the name that it had");
  TrainerRecord state;
  std::vector<nlohmann::json> others;
  if (fields.has("other_guards"))
    others = fields.list<nlohmann::json>("other_guards", "objects", [](const auto& found) { return found.is_object(); });
  for (const nlohmann::json& other : others) state.other_guards.push_back(other.dump());
  const size_t settled = step - (step > 0 && fields.has("waiting"));  // steps whose gradients do not wait
  if (const int own = island % state.islands(); own > 0)
    guard.restore({folder / "trainer.json", others[size_t(own - 1)], ": resume from another checkpoint", "other_guards."}, settled);
  else if (fields.has("guard"))
    guard.restore(fields.object("guard"), settled);
  state.samples = fields.size("samples", step * size_t(options.global_batch));  // rollbacks leave some more out
  state.steps = steps_of(trainer, options, folder);
  if (options.steps_given) report_higher_rate(state.steps, step, options.schedule);
  state.loss_scale = loss_scale_of(fields, loss_scale);
  state.best = best_of(fields, data);
  if (fields.has("shares"))
    state.shares = fields.list<int>("shares", "whole numbers from 1 to 16777216", [](const auto& found) { return found.is_number_unsigned() && found >= 1 && found <= most_samples; });
  if (fields.has("waiting"))  // JSON has no NaN: it is stored as null
    state.waiting = fields.value("waiting").is_null() ? NAN : fields.get<float>("waiting", "a number", [](const auto& found) { return found.is_number(); });
  const nlohmann::json algorithms = trainer.value("algorithms", nlohmann::json::object());
  for (const auto& [product, choice] : algorithms.items())
    if (choice.is_string()) state.algorithms[product] = choice;
  return state;
}

std::string stored_attention(const std::filesystem::path& folder) {
  const nlohmann::json all = load_trainer(folder).value("arithmetic", nlohmann::json());
  const nlohmann::json stored = all.is_object() ? all.value("attention", nlohmann::json()) : nlohmann::json();
  return stored == "hopper" || stored == "cudnn" || stored == "own" ? stored : "auto";  // a checkpoint of an earlier version does not say
}

// ---- the arithmetic

nlohmann::json arithmetic(const Options& o, const DataIdentity& train) {
  const LearningRateSchedule& s = o.schedule;
  nlohmann::json options = {
      {"dtype", o.dtype}, {"attention", o.attention}, {"seq_len", o.seq_len}, {"global_batch", o.global_batch}, {"reduce_dtype", o.reduce_dtype},
      {"schedule", s.kind}, {"lr", s.lr}, {"min_lr", s.min_lr}, {"warmup", s.warmup}, {"cooldown", s.cooldown},
      {"weight_decay", o.weight_decay}, {"beta1", o.beta1}, {"beta2", o.beta2}, {"eps", o.epsilon}, {"grad_clip", o.grad_clip},
      {"shuffle", o.shuffle}, {"seed", o.seed}, {"train_tokens", train.tokens}, {"train_tokens_checksum", train.checksum}};
  if (o.dtype == "fp16") options.update({{"loss_scale", o.loss_scale}, {"loss_scale_window", o.loss_scale_window}});
  for (const Room* room : rooms())
    if (room->add_arithmetic) room->add_arithmetic(options, o);
  return options;
}

void check_same_arithmetic(const nlohmann::json& stored, const nlohmann::json& wanted, const std::string& folder) {
  for (const auto& [key, value] : wanted.items()) {
    const bool known = stored.contains(key);
    if (!known && (key == "train_tokens_checksum" || value == "off" || (key == "moments" && value == "fp32"))) continue;  // checkpoints of earlier versions don't have it
    if (known && stored[key] == value) continue;
    const std::string is_and_was = key + " is " + value.dump() + " and was " + (known ? stored[key].dump() : "not recorded");
    if (key.starts_with("train_"))
      usage_error("--resume: --train holds other data than ", folder, " was trained on (", is_and_was,
                  "): give the same files under the same names; on other data, or more, a new run trains with --init ",
                  folder);
    if (known && key == "global_batch")  // whoever gave none takes other ranks for the cause, which may change
      usage_error("--resume: ", is_and_was, " samples a step in ", folder, ": give --global-batch ", stored[key].dump(),
                  ", which does not follow --micro-batch and the number of ranks");
    usage_error("--resume: ", is_and_was, " in ", folder, "; resume with the same options: what may change is --steps, "
                "the number of ranks, --micro-batch, --islands, --tp, --cp, --pp, --zero, --recompute, --offload, --logit-chunks, when the run logs or gives up, "
                "and without --outer-delay when it validates, saves, samples or checks");
  }
  for (const auto& [key, value] : stored.items())
    if (!wanted.contains(key) && key != "attention" && value != "off")
      usage_error("--resume: ", key, " was ", value.dump(), " in ", folder, ", and this build has no room that knows what that is: "
                  "resume with a build that has it");
}
