// GPT_CPU_SCHEDULE: the order in which threads, blocks and independent streams run. See cpu/device.h.
#pragma once

#include <cstdint>

namespace cpu {

enum class Order { forward, reverse, random };

struct Schedule {
  Order order = Order::forward;
  uint64_t seed = 0;
};

const Schedule& schedule();  // read from the environment once; an unknown value ends the program

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
