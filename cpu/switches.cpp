#include "cpu/switches.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cpu/device.h"

namespace cpu {
namespace {

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text ? text : "";
}

Schedule read_schedule() {
  const std::string value = variable("GPT_CPU_SCHEDULE");
  if (value.empty() || value == "forward") return {};
  if (value == "reverse") return {Order::reverse};
  const std::string seed = value.substr(std::min(value.size(), sizeof "random:" - 1));
  if (value.starts_with("random:") && !seed.empty() && seed.size() < 20 && seed.find_first_not_of("0123456789") == seed.npos)
    return {Order::random, std::stoull(seed)};
  fatal("GPT_CPU_SCHEDULE is '%s'; give forward, reverse or random:SEED", value.c_str());
}

// A number from `least` to `most`, or `otherwise` if the variable is not set.
size_t read_number(const char* name, size_t least, size_t most, size_t otherwise) {
  const std::string value = variable(name);
  if (value.empty()) return otherwise;
  const bool is_number = value.size() < 10 && value.find_first_not_of("0123456789") == std::string::npos;
  const size_t number = is_number ? std::stoul(value) : 0;
  if (is_number && number >= least && number <= most) return number;
  fatal("%s is '%s'; give a number from %zu to %zu", name, value.c_str(), least, most);
}

// Is the variable `second`? The other value is `first`, which is meant if it is not set.
bool read_choice(const char* name, const std::string& first, const std::string& second) {
  const std::string value = variable(name);
  if (value.empty() || value == first || value == second) return value == second;
  fatal("%s is '%s'; give %s or %s", name, value.c_str(), first.c_str(), second.c_str());
}

int read_failing_split() {
  const std::string value = variable("GPT_CPU_NCCL_FAULT");
  int number = 0;
  char rest;
  if (value.empty() || (std::sscanf(value.c_str(), "split:%d%c", &number, &rest) == 1 && number > 0)) return number;
  fatal("GPT_CPU_NCCL_FAULT is '%s'; give split:N, with N from 1", value.c_str());
}

}  // namespace

const Switches& switches() {
  static const Switches instance = {.schedule = read_schedule(),
                                    .longest_queue = read_number("GPT_CPU_QUEUE", 1, 1'000'000, SIZE_MAX),
                                    .loads_late = read_number("GPT_CPU_LAZY", 0, 1, 0) == 1,
                                    .devices = int(read_number("GPT_CPU_DEVICES", 0, 64, SIZE_MAX)),
                                    .sums_in_a_ring = read_choice("GPT_CPU_NCCL", "direct", "ring"),
                                    .hopper_sums = read_choice("GPT_CPU_SUMS", "float", "hopper"),
                                    .multiprocessors = int(read_number("GPT_CPU_MULTIPROCESSORS", 1, 1024, 0)),
                                    .failing_split = read_failing_split(),
                                    .log = variable("GPT_CPU_LOG"),
                                    .computes = read_number("GPT_CPU_DRY", 0, 1, 0) == 0};
  return instance;
}

}  // namespace cpu
