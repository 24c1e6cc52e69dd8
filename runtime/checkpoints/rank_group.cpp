#include "runtime/checkpoints/rank_group.h"

#include <algorithm>
#include <random>
#include <sstream>
#include <system_error>

#include "parallel/processes/control.h"
#include "runtime/input/files.h"

namespace {

// A name that no file has or ever had, because a network file system may remember for a while that a name did not
// exist.
std::string unused_name() {
  std::random_device random("/dev/urandom");
  std::ostringstream name;
  name << ".probe_" << std::hex << random() << random() << random() << random();
  return name.str();
}

}  // namespace

int RankGroup::neighbours() const { return int(std::count(hosts.begin(), hosts.end(), hosts[size_t(rank)])); }

RankGroup rank_group(Control& control, int tp) {
  constexpr double patience = 10;  // disks may be slow
  RankGroup group;
  group.rank = control.rank();
  group.size = control.size();
  group.tp = tp;
  group.hosts.clear();
  group.chunk_bytes = RankGroup::chunk_bytes_for(control.size());
  for (int rank = 0; rank < control.size(); ++rank) group.hosts.push_back(control.host(rank));
  group.all_gather = [&control](const std::string& mine) { return control.all_gather(mine, patience); };
  group.gather = [&control](const std::string& mine) { return control.gather(mine, patience); };
  return group;
}

std::string first_problem(const RankGroup& ranks, const std::string& mine) {
  for (const std::string& problem : ranks.all_gather(mine))
    if (!problem.empty()) return problem;
  return "";
}

int whose_folder(const RankGroup& ranks, const std::filesystem::path& folder, bool leaves_file) {
  const std::string mine = leaves_file ? unused_name() : "";
  const std::string problem = attempt_together(ranks, [&] { if (leaves_file) write_file(folder / mine, ""); });
  const std::vector<std::string> names = ranks.all_gather(mine);
  std::error_code ignored;
  int first = -1;
  for (int rank = ranks.size - 1; rank >= 0; --rank)
    if (!names[size_t(rank)].empty() && std::filesystem::exists(folder / names[size_t(rank)], ignored)) first = rank;
  ranks.all_gather("");  // wait until all ranks have looked
  if (leaves_file) std::filesystem::remove(folder / mine, ignored);
  if (!problem.empty()) fail(problem);
  return first;
}
