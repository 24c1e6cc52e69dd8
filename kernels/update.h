// The parameters and results of an update: plain numbers, for the host and for the kernels of kernels/norm.cuh and
// kernels/adamw.cuh.
#pragma once

#include <cmath>

// The values that exist for each parameter; checkpoints name them by these letters. error: the residual, which
// compressed messages have left out of the gradients so far; factor: the start of the next low-rank message;
// outer_momentum: of islands.
enum class State : char { weight = 'w', gradient = 'g', first_moment = 'm', second_moment = 'v', error = 'e', factor = 'q', outer_momentum = 'o' };

// The values that the optimizer, AdamW, keeps for each parameter. This is the only list of them: the store shards them,
// the memory plan counts them, and checkpoints save them as "m.NAME" and "v.NAME".
constexpr State optimizer_states[] = {State::first_moment, State::second_moment};

struct AdamW {
  float learning_rate, beta1, beta2, epsilon, weight_decay;
};

// If loss or norm of a step is larger than this, the update is not applied.
struct StepLimits {
  float loss = INFINITY, norm = INFINITY;
};

struct LossScale {
  static constexpr float least = 1, most = 1 << 24;
  float value = 1;
  int window = 0;      // steps without overflow after which it is doubled; 0: it never changes
  int good_steps = 0;  // steps without overflow since its last change
};

// The norm of a step's gradients, and the factor that they are multiplied by. factor = left_out (−1): the update is not
// applied. Every other factor is 0 or more.
struct GradientSummary {
  static constexpr float left_out = -1;
  float norm = 0, factor = 0;
  LossScale scale;  // for the next step
  float loss = 0;   // of the batch of these gradients

  bool applied() const { return factor >= 0; }
};
