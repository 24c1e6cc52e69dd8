// How much memory the host can still give: limited by its free memory, by the control groups (containers, Slurm jobs)
// that this process is in, and by the process's own limits. malloc would return more, but the operating system kills a
// process that uses more.
//
// A GPU build uses this file, too (kernels/device/memory.cuh): it is plain host code. It lies in the lowest layer
// because the CPU device needs it as well.
//
// root: the root of the file system; tests give another one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include <sys/resource.h>

// Calls look(folder, is it version 2) with each control group that this process is in and that has this controller, and with
// the groups around it.
template <class Look>
void each_control_group(const std::string& controller, const std::filesystem::path& root, Look look) {
  std::ifstream groups(root / "proc/self/cgroup");  // lines such as "0::/job/step", "9:memory:/job/step", "4:cpu,cpuacct:/"
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool version_2 = controllers == ",,";
    if (!version_2 && controllers.find("," + controller + ",") == std::string::npos) continue;
    const std::filesystem::path top = root / (version_2 ? "sys/fs/cgroup" : "sys/fs/cgroup/" + controller);
    std::filesystem::path group = line.substr(std::min(second + 2, line.size()));
    for (; !group.empty(); group = group.parent_path()) look(top / group, version_2);
    look(top, version_2);
  }
}

// The number behind a key, such as "MemAvailable:" in /proc/meminfo.
inline size_t number_after(const std::filesystem::path& path, const std::string& key, size_t otherwise) {
  std::ifstream file(path);
  size_t number;
  for (std::string word, rest; file >> word; std::getline(file, rest))
    if (word == key && file >> number) return number;
  return otherwise;
}

// The number in a file, or `otherwise` if it holds none: a limit of "max" is no limit.
inline size_t number_in(const std::filesystem::path& path, size_t otherwise) {
  std::ifstream file(path);
  size_t number;
  return file >> number ? number : otherwise;
}

// The bytes left in a control group, version 1 or 2. For a group that this container doesn't see, no limit can be read.
inline size_t group_memory_left(const std::filesystem::path& group, bool version_2) {
  const size_t limit = number_in(group / (version_2 ? "memory.max" : "memory.limit_in_bytes"), SIZE_MAX);
  const size_t used = number_in(group / (version_2 ? "memory.current" : "memory.usage_in_bytes"), 0);
  // Cached pages of files that were not read lately do not count as used: the operating system frees them first.
  const size_t cache = number_after(group / "memory.stat", version_2 ? "inactive_file" : "total_inactive_file", 0);
  return limit - std::min(limit, used - std::min(used, cache));
}

// The bytes left for all processes of this host, or of this container, together.
inline size_t host_memory_left(const std::filesystem::path& root = "/") {
  size_t left = number_after(root / "proc/meminfo", "MemAvailable:", SIZE_MAX / 1024) * 1024;
  each_control_group("memory", root, [&](const std::filesystem::path& group, bool version_2) {
    left = std::min(left, group_memory_left(group, version_2));
  });
  return left;
}

// The bytes left for this process alone (ulimit -v, ulimit -d).
inline size_t process_memory_left(const std::filesystem::path& root = "/") {
  const struct {
    decltype(RLIMIT_AS) resource;
    const char* used;
  } limits[] = {{RLIMIT_AS, "VmSize:"}, {RLIMIT_DATA, "VmData:"}};
  size_t left = SIZE_MAX;
  for (const auto& [resource, used] : limits) {
    rlimit limit;
    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) continue;
    const size_t most = limit.rlim_cur;
    left = std::min(left, most - std::min(most, 1024 * number_after(root / "proc/self/status", used, 0)));
  }
  return left;
}
