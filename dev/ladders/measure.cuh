// How long a rung takes on a GPU, and how that compares with what the card can do at best.
//
// A round is as many launches, one after another, as take two milliseconds; each launch has another set of operands, of
// which there are so many that together they exceed the L2 cache four times: no rung finds its inputs there. Stated is the
// median of 21 rounds, and the spread from the 10th to the 90th percentile.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "dev/ceilings.cuh"
#include "dev/ladders/options.h"
#include "dev/ladders/table.h"
#include "kernels/event.cuh"

namespace ladder {

#if defined(__CUDACC__)
constexpr bool is_gpu = true;  // times mean something
#else
constexpr bool is_gpu = false;
#endif

// Operands whose values are random and whose bytes are not in any cache: values repeat after a million.
template <class T>
struct RandomBuffer : Buffer<T> {
  RandomBuffer(size_t count, double scale = 1, double mean = 0, unsigned seed = 1) : Buffer<T>(count) {
    const std::vector<T> values = random_values<T>(std::min(count, size_t(1) << 20), scale, mean, seed);
    for (size_t first = 0; first < count; first += values.size())
      CUDA_CHECK(cudaMemcpy(this->data() + first, values.data(), std::min(values.size(), count - first) * sizeof(T),
                            cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
  }
};

// Sets of operands that launches take in turn.
template <class Operation>
class RotatingSets {
 public:
  explicit RotatingSets(const Shape& shape) {
    sets_.push_back(std::make_unique<Operation>(shape));
    const double wanted = 4.0 * l2_bytes() / one().bytes();
    while (double(sets_.size()) < std::min(wanted, 64.0)) sets_.push_back(std::make_unique<Operation>(shape));
    for (auto& set : sets_) set->reset();
  }

  Operation& one() { return *sets_.front(); }
  Operation& next() { return *sets_[next_++ % sets_.size()]; }
  size_t count() const { return sets_.size(); }

 private:
  static double l2_bytes() {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    return properties.l2CacheSize;
  }

  std::vector<std::unique_ptr<Operation>> sets_;
  size_t next_ = 0;
};

struct Times {
  double median, low, high;  // seconds a launch
};

// `launch` launches once. At least `sets` launches make a round, so that all operands have been in use between two of one.
template <class Launch>
Times measure(Launch launch, size_t sets, cudaStream_t stream) {
  constexpr int rounds = 21;
  constexpr double round_seconds = 2e-3;
  ceilings::seconds(sets, stream, launch);
  CUDA_CHECK(cudaGetLastError());  // a launch that the device refuses takes no time
  const double once = ceilings::seconds(sets, stream, launch);
  const size_t count = std::max(sets, size_t(round_seconds / once));
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) times.push_back(ceilings::seconds(count, stream, launch));
  std::sort(times.begin(), times.end());
  return {times[rounds / 2], times[rounds / 10], times[rounds - 1 - rounds / 10]};
}

// What one launch must do at least.
struct Work {
  double bytes, flops, best_seconds;
};

// The ceiling max(bytes / copy bandwidth, FLOPs / rate of products in T), both measured on this card when they are first
// needed; the rate matters where an operation does more than a few FLOPs with each byte.
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
  return {"rung", "µs", "spread", "GB/s", "TFLOP/s", "% of ceiling", "× the first", "× the library", "idea"};
}

// `library`: its time; 0: there is none.
inline std::vector<std::string> time_row(const std::string& name, const std::string& idea, const Times& t, double first,
                                         double library, const Work& work) {
  return {name,
          digits(t.median * 1e6, 4),
          digits(t.low * 1e6, 4) + "–" + digits(t.high * 1e6, 4),
          digits(work.bytes / t.median / 1e9, 4),
          digits(work.flops / t.median / 1e12, 3),
          digits(100 * work.best_seconds / t.median, 3),
          digits(first / t.median, 3),
          library > 0 ? digits(library / t.median, 3) : "–",
          idea};
}

}  // namespace ladder
