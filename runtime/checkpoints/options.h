// Options: which checkpoints are kept, and the size of their files.
#pragma once

#include <cstddef>

struct CheckpointFiles {
  double shard_size = 5;   // GB of a file at most (or one tensor)
  size_t keep_every = 0;   // steps between those that stay; 0: none does
  bool keep_best = false;  // one after each lowest val_loss so far
  size_t patience = 0;     // validations in a row without a lower one that end the run; 0: none do
};
