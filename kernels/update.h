// What an update is told, and what it reports: plain numbers, for the host and for the kernels of kernels/norm.cuh and
// kernels/adamw.cuh.
#pragma once

#include <cmath>

// What there is of each parameter, by the letter that stands for it in checkpoints.
enum class State : char { weight = 'w', gradient = 'g', first_moment = 'm', second_moment = 'v' };

// What the optimizer, AdamW, keeps of each parameter: named here, and nowhere else. The store shards it, the memory plan
// counts it, and checkpoints save it as "m.NAME" and "v.NAME".
constexpr State optimizer_states[] = {State::first_moment, State::second_moment};

struct AdamW {
  float learning_rate, beta1, beta2, epsilon, weight_decay;
};

// Gradients of a step beyond these are not applied.
struct StepLimits {
  float loss = INFINITY, norm = INFINITY;
};

struct LossScale {
  static constexpr float least = 1, most = 1 << 24;
  float value = 1;
  int window = 0;      // steps without overflow after which it is doubled; 0: it stays
  int good_steps = 0;  // of them, so far
};

// What a step's gradients came to.
struct GradientSummary {
  static constexpr float left_out = -1;
  float norm = 0, factor = 0;
  LossScale scale;  // of the next step
};
