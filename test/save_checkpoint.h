// Saves a checkpoint at once, for tests.
#pragma once

#include "gpt/base/error.h"
#include "runtime/checkpoints/checkpoint_writer.h"

// Writes a checkpoint and waits for it. Fails with the reason.
inline void save_checkpoint(const std::filesystem::path& out, size_t step, const CheckpointContent& content,
                            size_t shard_bytes = size_t(5'000'000'000)) {
  Ranks alone;
  CheckpointWriter writer(out, shard_bytes, {alone});
  std::string problem = writer.begin(step, content);
  if (problem.empty()) problem = writer.complete();
  if (!problem.empty()) fail(problem);
}
