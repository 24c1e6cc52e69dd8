// The learning rate as a function of the step (from 0). After a linear warmup, with p the fraction of the
// remaining steps that is done before this one, from 0 on; after the last step it would be 1:
//   cosine     min_lr + (lr - min_lr) (1 + cos(pi p)) / 2   (Loshchilov and Hutter 2017, without restarts)
//   constant   lr
//   wsd        lr, then over the last `cooldown` steps lr (1 - sqrt(q)), q the fraction of the cooldown that is done
//              (warmup, stable, decay with the "1-sqrt" cooldown of Haegele et al. 2024): its first step still has lr
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "gpt/base/error.h"

struct LearningRateSchedule {
  std::string kind = "cosine";  // cosine, constant or wsd
  double lr = 3e-4;
  double min_lr = 0;  // an absolute rate, which a step of cosine after the last would have
  size_t steps = 0;
  size_t warmup = 0;    // steps
  size_t cooldown = 0;  // steps, for wsd
};

inline void validate(const LearningRateSchedule& schedule) {
  const auto& [kind, lr, min_lr, steps, warmup, cooldown] = schedule;
  if (kind != "cosine" && kind != "constant" && kind != "wsd")
    fail("--schedule ", excerpt(kind), " is unknown: give cosine, constant or wsd");
  if (!std::isfinite(lr) || lr < 0) fail("--lr ", lr, " is no learning rate: give a number from 0");
  if (min_lr > 0 && kind != "cosine") fail("--min-lr ", min_lr, " belongs to --schedule cosine, not ", kind, ": leave it out");
  if (!(min_lr >= 0 && min_lr <= lr)) fail("--min-lr ", min_lr, " does not lie between 0 and --lr ", lr, ": lower it, or raise --lr");
  if (warmup > steps) fail("--warmup ", warmup, " is longer than --steps ", steps, ": lower it, or train longer");
  if (cooldown > 0 && kind != "wsd") fail("--cooldown ", cooldown, " belongs to --schedule wsd, not ", kind, ": leave it out");
  if (cooldown < 2 && kind == "wsd")
    fail("--schedule wsd needs --cooldown N, from 2 on: the last steps, in which the rate falls, and of which the first still has --lr");
  if (cooldown > steps - warmup)
    fail("--warmup ", warmup, " and --cooldown ", cooldown, " together are longer than --steps ", steps, ": lower one, or train longer");
}

// How many steps of `step_s` seconds fit in `seconds`, with a validation of `validation_s` seconds after every `every`
// steps (0: none) and after the last. At least one.
inline size_t steps_within(double seconds, double step_s, double validation_s, size_t every) {
  const double each = step_s + (every ? validation_s / double(every) : 0);
  return size_t(std::max(1.0, (seconds - validation_s) / each));
}

inline double learning_rate(const LearningRateSchedule& schedule, size_t step) {
  const auto& [kind, lr, min_lr, steps, warmup, cooldown] = schedule;
  if (step < warmup) return lr * double(step + 1) / double(warmup);
  if (kind == "cosine") {
    double p = step < steps ? double(step - warmup) / double(steps - warmup) : 1.0;
    return min_lr + (lr - min_lr) * 0.5 * (1.0 + std::cos(std::numbers::pi * p));
  }
  if (kind == "wsd" && step + cooldown > steps) {
    double q = std::min(1.0, double(step + cooldown - steps) / double(cooldown));
    return lr * (1.0 - std::sqrt(q));
  }
  return lr;
}
