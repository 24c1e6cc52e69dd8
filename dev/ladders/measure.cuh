// The time of a rung on a GPU, compared with the peak rates of the card.
//
// A round launches once on each of several sets of operands, which together are four times as large as the L2 cache: no
// rung finds its inputs there. Between rounds all sets are made again, because some operations change their operands.
// The result is the median of 21 rounds, after three that are not counted, and the spread from the 10th to the 90th
// percentile.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "dev/ceilings.cuh"
#include "dev/ladders/options.h"
#include "dev/ladders/table.h"
#include "dev/random_buffer.cuh"
#include "kernels/device/event.cuh"

namespace ladder {

#if defined(__CUDACC__)
constexpr bool is_gpu = true;  // so times are measured
#else
constexpr bool is_gpu = false;
#endif

inline std::string device_name() {
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  return properties.name;
}

// Sets of operands of one shape: enough to exceed every cache, or as many as there is memory for.
template <class Operation>
class SetsOfOperands {
 public:
  explicit SetsOfOperands(const Shape& shape) : wanted_bytes_(4.0 * l2_bytes()) {
    const size_t free_before = free_bytes();
    add(shape);
    const double bytes_of_one = double(std::max(free_before - free_bytes(), size_t(1)));
    while (!exceed_caches() && sets_.size() < 256 && double(free_bytes()) > 2 * bytes_of_one) add(shape);
  }

  Operation& one() { return *sets_.front(); }
  size_t count() const { return sets_.size(); }
  bool exceed_caches() const { return double(count()) * sets_.front()->bytes() >= wanted_bytes_; }

  void reset() {
    for (auto& set : sets_) set->reset();
  }
  void launch_on_each(void (*launch)(Operation&, cudaStream_t), cudaStream_t stream) {
    for (auto& set : sets_) launch(*set, stream);
  }

 private:
  void add(const Shape& shape) { sets_.push_back(std::make_unique<Operation>(shape)); }

  static double l2_bytes() {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    return properties.l2CacheSize;
  }
  static size_t free_bytes() {
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return free;
  }

  double wanted_bytes_;
  std::vector<std::unique_ptr<Operation>> sets_;
};

struct Times {
  double median, low, high;  // seconds per launch
};

template <class Operation>
Times measure(void (*launch)(Operation&, cudaStream_t), SetsOfOperands<Operation>& sets, cudaStream_t stream) {
  constexpr int rounds = 21, warm_up = 3;
  std::vector<double> times;
  for (int round = -warm_up; round < rounds; ++round) {
    sets.reset();
    const double seconds = ceilings::seconds(1, stream, [&] { sets.launch_on_each(launch, stream); });
    if (round >= 0) times.push_back(seconds / double(sets.count()));
  }
  std::sort(times.begin(), times.end());
  return {times[rounds / 2], times[rounds / 10], times[rounds - 1 - rounds / 10]};
}

// The least work of one launch.
struct Work {
  double bytes, flops, best_seconds;
};

// The ceiling max(bytes / copy bandwidth, FLOPs / rate of products in T). Both are measured on this card when they are
// first needed. The rate matters for operations with more than a few FLOPs per byte.
template <class T>
Work work_at_best(double bytes, double flops, cudaStream_t stream) {
  static const double copy = ceilings::copy_rate(stream);
  double seconds = bytes / copy;
  if (flops > 20 * bytes) {
    static const double product = ceilings::product_rate<T>(stream).flops;
    seconds = std::max(seconds, flops / product);
  }
  return {bytes, flops, seconds};
}

inline std::vector<std::string> time_columns() {
  return {"rung", "µs", "low", "high", "GB/s", "TFLOP/s", "% of ceiling", "× the first", "× the library", "idea"};
}

// `library`: its time; 0: there is none.
inline std::vector<std::string> time_row(const std::string& name, const std::string& idea, const Times& t, double first,
                                         double library, const Work& work) {
  return {name,
          digits(t.median * 1e6, 4),
          digits(t.low * 1e6, 4),
          digits(t.high * 1e6, 4),
          digits(work.bytes / t.median / 1e9, 4),
          digits(work.flops / t.median / 1e12, 3),
          digits(100 * work.best_seconds / t.median, 3),
          digits(first / t.median, 3),
          library > 0 ? digits(library / t.median, 3) : "–",
          idea};
}

}  // namespace ladder
