// The checkpoint that all ranks start from, be the disks of their hosts shared or not. What rank 0 sees counts. Ranks
// that don't see it get a copy while they load it: rank 0 reads the files and sends them, the first of the ranks that
// share a folder writes them there. A copy's name, step_copy_for_rank_1.partial, is never taken for a checkpoint's.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "runtime/checkpoint.h"
#include "runtime/rank_group.h"
#include "runtime/run_folder.h"

// Collective: what to start from, if anything, whole down to the last byte. Fails on all ranks if another rank sees a
// newer checkpoint than rank 0.
std::optional<Checkpoint> choose_shared_checkpoint(const std::filesystem::path& out, const RunStart& start,
                                                   const RankGroup& ranks);

// Collective: what is wrong with a checkpoint folder; empty: nothing. The ranks that see rank 0's share the work.
std::string damage_anywhere(const std::filesystem::path& folder, const RankGroup& ranks);

// Where this rank can read rank 0's checkpoints.
class CheckpointCopies {
 public:
  // Copies are made in `out`; empty: where the system wants temporary files.
  CheckpointCopies(RankGroup ranks, const std::filesystem::path& out)
      : ranks_(std::move(ranks)), place_(out.empty() ? std::filesystem::temp_directory_path() : out) {}

  // Collective: `folder` itself, or a copy of it, which stays until the release.
  std::filesystem::path folder_of(const std::filesystem::path& folder);

  // Collective, when all that is needed has been read.
  void release();

 private:
  void copy(const std::filesystem::path& folder);

  RankGroup ranks_;
  std::filesystem::path place_;
  std::filesystem::path original_, readable_;  // of the checkpoint that is being read; empty: none
  bool copied_ = false;                        // for some rank
  bool writes_ = false;                        // this rank writes a copy
};
