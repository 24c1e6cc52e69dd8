// The ranks that save and load checkpoints together. Their hosts need not share their disks: a path may be another folder
// on each of them, and then rank 0's counts.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "processes/error.h"

class Control;

struct RankGroup {
  // Everybody's text, by rank; returns when all ranks have called it.
  using Gather = std::function<std::vector<std::string>(const std::string&)>;

  int rank = 0, size = 1;
  std::vector<std::string> hosts = {""};  // by rank
  Gather all_gather = [](const std::string& mine) { return std::vector<std::string>{mine}; };
  Gather gather = all_gather;               // for rank 0; the others get empty texts
  size_t chunk_bytes = size_t(16) << 20;    // of a file, what travels at a time

  bool is_first() const { return rank == 0; }
  int neighbours() const;  // ranks of this host, this one included
};

// The group of all ranks; `control` outlives it.
RankGroup rank_group(Control& control);

// Collective: the first rank's problem, on all ranks; empty if none has one.
std::string first_problem(const RankGroup& ranks, const std::string& mine);

// Collective: each rank does its work. Why one of them could not; empty: all have done it.
template <class Work>
std::string attempt_together(const RankGroup& ranks, Work work) {
  return first_problem(ranks, attempt(work));
}

// Collective. Some ranks leave a file in their `folder`; the first whose file this rank sees in its own, or -1: those
// two ranks share the folder.
int whose_folder(const RankGroup& ranks, const std::filesystem::path& folder, bool leaves_file);
