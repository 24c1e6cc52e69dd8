#include "runtime/training/arithmetic.h"

#include <nlohmann/json.hpp>

nlohmann::json arithmetic(const Options& o, const DataIdentity& train) {
  const LearningRateSchedule& s = o.schedule;
  nlohmann::json options = {
      {"dtype", o.dtype}, {"stochastic_rounding", o.stochastic_rounding}, {"attention", o.attention},
      {"seq_len", o.seq_len}, {"global_batch", o.global_batch}, {"reduce_dtype", o.reduce_dtype}, {"schedule", s.kind}, {"lr", s.lr},
      {"min_lr", s.min_lr}, {"warmup", s.warmup}, {"cooldown", s.cooldown}, {"weight_decay", o.weight_decay},
      {"beta1", o.beta1}, {"beta2", o.beta2}, {"eps", o.epsilon}, {"grad_clip", o.grad_clip}, {"shuffle", o.shuffle},
      {"on_spike", o.guard.on_spike}, {"spike_z", o.guard.z}, {"spike_window", o.guard.window}, {"seed", o.seed},
      {"train_tokens", train.tokens}, {"train_tokens_checksum", train.checksum}};
  if (o.dtype == "fp16") options.update({{"loss_scale", o.loss_scale}, {"loss_scale_window", o.loss_scale_window}});
  return options;
}

void check_same_arithmetic(const nlohmann::json& stored, const nlohmann::json& wanted, const std::string& folder) {
  for (const auto& [key, value] : wanted.items()) {
    const bool known = stored.contains(key);
    if (!known && key == "train_tokens_checksum") continue;  // checkpoints of earlier versions don't have it
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
                "the number of ranks, --micro-batch, --tp, --cp, --pp, --zero, --recompute, --logit-chunks, and when the run validates, "
                "saves, logs, samples or gives up");
  }
}
