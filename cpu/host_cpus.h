// How many processors the control groups of this process (containers, Slurm jobs) leave it. They give time: "docker run --cpus=2"
// lets all threads together compute for 200 ms in each 100 ms, on whichever of the host's processors. More workers than that
// would be stopped in the middle of a block, while the others wait for them.
//
// root: the root of the file system; tests give another one.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <filesystem>
#include <fstream>

#include "cpu/host_memory.h"

// At least 1; INT_MAX: no group has a limit.
inline int group_cpus(const std::filesystem::path& root = "/") {
  double least = INT_MAX;
  each_control_group("cpu", root, [&](const std::filesystem::path& group, bool version_2) {
    std::ifstream limit(group / (version_2 ? "cpu.max" : "cpu.cfs_quota_us"));  // "200000 100000" or "max 100000"; 200000 or -1
    double quota = 0, period = 0;
    if (!(limit >> quota)) return;
    if (version_2) limit >> period;
    else period = double(number_in(group / "cpu.cfs_period_us", 0));
    if (quota > 0 && period > 0) least = std::min(least, std::ceil(quota / period));
  });
  return std::max(1, int(least));
}
