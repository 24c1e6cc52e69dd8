// The checkpoint that all ranks start from, whether their hosts share a disk or not. Rank 0's folder decides. Ranks
// that don't see that folder get a copy while they load: rank 0 reads the files and sends them, and the first of the
// ranks that share a folder writes them there. The name of a copy, step_copy_for_rank_1.partial, is never taken for a
// checkpoint.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "gpt/checkpoint.h"
#include "runtime/checkpoints/rank_group.h"
#include "runtime/checkpoints/run_folder.h"

// Collective: chooses the checkpoint to start from, if there is one, and checks every byte of it. Fails on all ranks if
// another rank sees a newer checkpoint than rank 0.
std::optional<Checkpoint> choose_shared_checkpoint(const std::filesystem::path& out, const StartOptions& start,
                                                   const RankGroup& ranks);

// Collective. Names the damage in a checkpoint folder; empty: none. The ranks that see rank 0's folder share the work.
std::string damage_anywhere(const std::filesystem::path& folder, const RankGroup& ranks);

// Makes rank 0's checkpoints readable on every rank.
class CheckpointCopies {
 public:
  // Copies are written in `out`; if that is empty, in the system's folder for temporary files.
  CheckpointCopies(RankGroup ranks, const std::filesystem::path& out)
      : ranks_(std::move(ranks)), place_(out.empty() ? std::filesystem::temp_directory_path() : out) {}

  // Collective: returns `folder` itself, or a copy of it, which exists until release().
  std::filesystem::path folder_of(const std::filesystem::path& folder);

  // Collective: removes the copies. To be called when everything has been read.
  void release();

 private:
  RankGroup ranks_;
  std::filesystem::path place_;
  std::filesystem::path original_, readable_;  // the checkpoint being read, on rank 0 and on this rank; empty: none
  bool copied_ = false;                        // some rank has a copy
  bool writes_ = false;                        // this rank writes one
};
