// The ranks that save and load checkpoints together. Their hosts need not share a disk: a path may be a different
// folder on each host, and then the folder of rank 0 is the one that counts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <string>
#include <vector>

#include "gpt/base/error.h"
#include "gpt/ranks.h"

// Its collectives wait as long as slow disks need.
struct RankGroup {
  Ranks& ranks;
  int tp = 1;  // neighbouring ranks that gather blocks of tensors together (gpt/blocks.h)
  size_t chunk_bytes = chunk_bytes_for(ranks.size());  // the most bytes of a file that are sent at once

  // Bytes of gathered chunks in a job of `ranks` ranks: rank 0 holds a chunk of each.
  static size_t chunk_bytes_for(int ranks) { return (size_t(64) << 20) / size_t(std::max(4, ranks)); }

  int rank() const { return ranks.rank(); }
  int size() const { return ranks.size(); }
  bool is_first() const { return rank() == 0; }
  const std::string& host(int rank) const { return ranks.host(rank); }
  // As those of Ranks: texts by rank.
  auto all_gather(const std::string& mine) const { return ranks.all_gather(mine, Ranks::for_slow_disks); }
  auto gather(const std::string& mine) const { return ranks.gather(mine, Ranks::for_slow_disks); }
};

// Collective: returns the problem of the lowest rank that has one, on all ranks; empty if no rank has one.
std::string first_problem(const RankGroup& ranks, const std::string& mine);

// Collective: each rank does its work. Returns the error of a rank that failed; empty: no rank failed.
template <class Work>
std::string attempt_together(const RankGroup& ranks, Work work) {
  return first_problem(ranks, attempt(work));
}

// Collective: which ranks share `folder`? Some ranks create a file in it. Returns the lowest rank whose file this rank
// sees in its own folder; -1: none.
int whose_folder(const RankGroup& ranks, const std::filesystem::path& folder, bool leaves_file);
