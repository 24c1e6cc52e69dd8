// Environment variables of the CPU device: an order of execution (cpu/device.h), and ways to be as strict as a GPU
// (cpu/README.md lists the mistakes that each switch finds). All are read at the first CUDA call; an unknown value ends
// the program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace cpu {

enum class Order { forward, reverse, random };

struct Schedule {
  Order order = Order::forward;
  uint64_t seed = 0;
};

struct Switches {
  Schedule schedule;                     // GPT_CPU_SCHEDULE=forward|reverse|random:SEED
  size_t longest_queue = SIZE_MAX;       // GPT_CPU_QUEUE=N: a launch waits while its stream has N operations pending
  bool loads_late = false;               // GPT_CPU_LAZY=1: a kernel's first launch waits until the device is idle
  int devices = -1;                      // GPT_CPU_DEVICES=N: the processes of a host have N devices; 0: and no driver; -1: each its own
  bool sums_in_a_ring = false;           // GPT_CPU_NCCL=direct|ring: ring is as strict as NCCL (cpu/nccl.h)
  bool hopper_sums = false;              // GPT_CPU_SUMS=float|hopper: of products in eight bits (cpu/tensor_core_sums.h)
  int multiprocessors = 0;               // GPT_CPU_MULTIPROCESSORS=N: of a device; 0: one for each worker
  int failing_split = 0;                 // GPT_CPU_NCCL_FAULT=split:N: the N-th ncclCommSplit of rank 1 fails; 0: none
  std::string log;                       // GPT_CPU_LOG=FILE: the host's calls to the device (cpu/log.h); empty: no log
  bool computes = true;                  // GPT_CPU_DRY=1: kernels and products do nothing
};

const Switches& switches();

inline const Schedule& schedule() { return switches().schedule; }

// splitmix64 (Steele, Lea, Flood 2014): small, and every seed is a good one.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  int below(int n) { return int((next() >> 32) * uint64_t(n) >> 32); }

 private:
  uint64_t state_;
};

}  // namespace cpu
