// How a checkpoint's files are cut.
#pragma once

struct CheckpointFiles {
  double shard_size = 5;  // GB of a file at most (or one tensor)
};
