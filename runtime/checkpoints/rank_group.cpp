#include "runtime/checkpoints/rank_group.h"

#include <system_error>

#include "gpt/base/files.h"
#include "gpt/base/text.h"

std::string first_problem(const RankGroup& ranks, const std::string& mine) {
  for (const std::string& problem : ranks.all_gather(mine))
    if (!problem.empty()) return problem;
  return "";
}

int whose_folder(const RankGroup& ranks, const std::filesystem::path& folder, bool leaves_file) {
  // A name that no file has or ever had, because a network file system may remember for a while that a name did not
  // exist.
  const std::string mine = leaves_file ? ".probe_" + random_digits() : "";
  const std::string problem = attempt_together(ranks, [&] { if (leaves_file) write_file(folder / mine, ""); });
  const std::vector<std::string> names = ranks.all_gather(mine);
  std::error_code ignored;
  int first = -1;
  for (int rank = ranks.size() - 1; rank >= 0; --rank)
    if (!names[size_t(rank)].empty() && std::filesystem::exists(folder / names[size_t(rank)], ignored)) first = rank;
  ranks.all_gather("");  // wait until all ranks have looked
  if (leaves_file) std::filesystem::remove(folder / mine, ignored);
  if (!problem.empty()) fail(problem);
  return first;
}
