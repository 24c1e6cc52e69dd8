// What a rank does in a step: a list of actions, which one loop makes in order (run_step, gpt/batches.cuh). A rank that has
// all layers computes each micro-batch forward and then backward. Where the layers are dealt out to several stages, a room
// says which are this stage's and in which order it works.
#pragma once

#include <string>
#include <vector>

#include "gpt/shapes.h"

enum class Work { forward, backward, input, weight };  // input and weight: the two halves of backward
enum class Message { none, activation, gradient };     // an activation goes to the next stage, a gradient back

inline const char* name_of(Work work) {
  static constexpr const char* names[] = {"forward", "backward", "input", "weight"};
  return names[size_t(work)];
}

struct Action {
  Work work;
  int micro_batch;  // its number among this rank's micro-batches of the step
  int chunk = 0;    // which of this stage's chunks
  int slot = 0;     // where the model keeps the activations, from forward to the last half of backward
  // next_receives: the next action's receive, if it is posted together with this action
  Message receives = Message::none, sends = Message::none, next_receives = Message::none;
  Work next_work = Work::forward;         // the next action, whose first weights are gathered during this one
  int next_chunk = -1;                    // -1: there is none
  bool operator==(const Action&) const = default;
};
using Actions = std::vector<Action>;

// The layers are cut into chunks, one after the other. Chunk c of this stage is chunk c·stages + number of the model. So after
// the last stage comes stage 0 again, with its next chunk.
struct Stage {
  int stages = 1, number = 0, chunks = 1;

  bool has_all() const { return stages * chunks == 1; }
  int in_model(int chunk) const { return chunk * stages + number; }
  bool is_first(int chunk) const { return in_model(chunk) == 0; }
  bool is_last(int chunk) const { return in_model(chunk) == stages * chunks - 1; }
};

// How a room deals the work out to several stages (Room::staging). Not asked if one stage has all layers.
struct Staging {
  Actions (*step)(const std::string& schedule, const Stage& stage, int micro_batches);
  Actions (*forwards)(const Stage& stage, int micro_batches);
  std::vector<Layers> (*layers)(const ModelShape& shape, const Stage& stage);
};

// The actions of a step.
Actions actions_of_step(const std::string& schedule, const Stage& stage, int micro_batches);
// The actions of validation, for any number of micro-batches. Nothing is kept: slot 0 does for all.
Actions forwards(const Stage& stage, int micro_batches);
// The number of slots that actions need.
int slots_of(const Actions& actions);
// The layers of a stage's chunks.
std::vector<Layers> layers_of(const ModelShape& shape, const Stage& stage);
