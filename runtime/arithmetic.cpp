#include "runtime/arithmetic.h"

#include <nlohmann/json.hpp>

nlohmann::json arithmetic(const Options& o, size_t train_tokens) {
  const Schedule& s = o.schedule;
  nlohmann::json options = {
      {"dtype", o.dtype}, {"stochastic_rounding", o.stochastic_rounding}, {"attention", o.attention},
      {"seq_len", o.seq_len}, {"global_batch", o.global_batch}, {"reduce_dtype", o.reduce_dtype}, {"schedule", s.kind}, {"lr", s.lr},
      {"min_lr", s.min_lr}, {"warmup", s.warmup}, {"cooldown", s.cooldown}, {"weight_decay", o.weight_decay},
      {"beta1", o.beta1}, {"beta2", o.beta2}, {"eps", o.epsilon}, {"grad_clip", o.grad_clip}, {"shuffle", o.shuffle},
      {"on_spike", o.guard.on_spike}, {"spike_z", o.guard.z}, {"spike_window", o.guard.window}, {"seed", o.seed},
      {"train_tokens", train_tokens}};
  if (o.dtype == "fp16") options.update({{"loss_scale", o.loss_scale}, {"loss_scale_window", o.loss_scale_window}});
  return options;
}

void check_same_arithmetic(const nlohmann::json& stored, const nlohmann::json& wanted, const std::string& folder) {
  for (const auto& [key, value] : wanted.items())
    if (!stored.contains(key) || stored[key] != value)
      usage_error("--resume: ", key, " is ", value.dump(), " and was ",
                  stored.contains(key) ? stored[key].dump() : "not recorded", " in ", folder,
                  "; resume with the same options (only --steps may change)");
}
