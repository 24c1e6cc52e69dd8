// Schedules: what a rank does in a step, and in which order. A schedule is a list of actions, which one loop executes
// (train_gpt.cu). So far a rank has all layers, and a micro-batch's backward follows its forward.
#pragma once

#include <vector>

enum class Work { forward, backward };

struct Action {
  Work work;
  int micro_batch;  // its number among this rank's micro-batches of the step
  int slot = 0;     // where the model keeps the micro-batch's activations between forward and backward
};

// F0 B0 F1 B1 ...: one slot is enough.
inline std::vector<Action> one_at_a_time(int micro_batches) {
  std::vector<Action> actions;
  for (int i = 0; i < micro_batches; ++i) {
    actions.push_back({Work::forward, i});
    actions.push_back({Work::backward, i});
  }
  return actions;
}

// F0 F1 ..., for validation.
inline std::vector<Action> forwards(int micro_batches) {
  std::vector<Action> actions;
  for (int i = 0; i < micro_batches; ++i) actions.push_back({Work::forward, i});
  return actions;
}
