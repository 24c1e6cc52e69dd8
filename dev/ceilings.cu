// Measures what this device can do at best, for `train_gpt --profile --ceilings FILE` and dev/roofline.py:
//
//   make build/gpu/ceilings && build/gpu/ceilings > ceilings.json
//
//   copy      512 MiB to another place in device memory, more than 4 times the L2 cache of any GPU so far; bytes read
//             and bytes written count
//   products  (n,n)·(n,n) in each dtype, as kernels/matmul.cuh computes the model's; n is doubled from 1024 on until
//             one product takes a millisecond. FLOPs 2·n³
//
// Stated is the median of ten rounds of a tenth of a second, after one that lets the clocks settle. All numbers are
// random: with zeros a processor draws less power, and keeps a higher clock.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "kernels/convert.cuh"
#include "kernels/matmul.cuh"
#include "kernels/random.cuh"

namespace {

constexpr int rounds = 10, largest_side = 16384;
constexpr double round_seconds = 0.1;
constexpr size_t copy_bytes = size_t(512) << 20;

class DeviceArray {
 public:
  explicit DeviceArray(size_t bytes) { CUDA_CHECK(cudaMalloc(&data_, bytes)); }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  template <class T>
  T* as() const { return static_cast<T*>(data_); }

 private:
  void* data_ = nullptr;
};

// Of one call of `work` among `count` in a row.
template <class Work>
double seconds(size_t count, cudaStream_t stream, Work work) {
  cudaEvent_t start, end;
  CUDA_CHECK(cudaEventCreate(&start));
  CUDA_CHECK(cudaEventCreate(&end));
  CUDA_CHECK(cudaEventRecord(start, stream));
  for (size_t i = 0; i < count; ++i) work();
  CUDA_CHECK(cudaEventRecord(end, stream));
  CUDA_CHECK(cudaEventSynchronize(end));
  float milliseconds = 0;
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, end));
  CUDA_CHECK(cudaEventDestroy(start));
  CUDA_CHECK(cudaEventDestroy(end));
  return milliseconds / 1e3 / double(count);
}

// The median round, after one that is not counted.
template <class Work>
double steady_seconds(cudaStream_t stream, Work work) {
  const double once = seconds(1, stream, work);
  const size_t count = size_t(std::clamp(round_seconds / once, 1.0, 1e6));
  std::vector<double> times;
  for (int round = 0; round <= rounds; ++round) times.push_back(seconds(count, stream, work));
  times.erase(times.begin());
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[rounds / 2];
}

// Bytes a second, read and written.
double copy_rate(cudaStream_t stream) {
  DeviceArray from(copy_bytes), to(copy_bytes);
  fill_normal(from.as<float>(), 0, copy_bytes / sizeof(float), 3, 1.0f, stream);
  const auto copy = [&] {
    CUDA_CHECK(cudaMemcpyAsync(to.as<char>(), from.as<char>(), copy_bytes, cudaMemcpyDeviceToDevice, stream));
  };
  copy();
  return 2 * double(copy_bytes) / steady_seconds(stream, copy);
}

// out (count) of standard normal numbers; another `key`, others.
template <class T>
void fill_random(T* out, size_t count, uint64_t key, cudaStream_t stream) {
  DeviceArray wide(count * sizeof(float));
  fill_normal(wide.as<float>(), 0, count, key, 1.0f, stream);
  narrow(out, wide.as<float>(), count, stream);
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

struct ProductRate {
  int side;
  double flops;  // a second
};

template <class T>
ProductRate product_rate(cudaStream_t stream) {
  for (int n = 1024;; n *= 2) {
    const size_t count = size_t(n) * n;
    DeviceArray a(count * sizeof(T)), b(count * sizeof(T)), d(count * sizeof(T));
    fill_random(a.as<T>(), count, 1, stream);
    fill_random(b.as<T>(), count, 2, stream);
    const auto product = [&] { linear_forward<T>(d.as<T>(), a.as<T>(), b.as<T>(), nullptr, n, n, n, stream); };
    product();  // chooses an algorithm
    if (n < largest_side && seconds(3, stream, product) < 1e-3) continue;
    return {n, 2.0 * n * n * n / steady_seconds(stream, product)};
  }
}

// One line of JSON (runtime/ceilings.h reads it).
void measure() {
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const double copy = copy_rate(stream);
  const ProductRate fp32 = product_rate<float>(stream), bf16 = product_rate<__nv_bfloat16>(stream),
                    fp16 = product_rate<__half>(stream);
  std::printf(R"({"device": "%s", "copy_bytes_per_s": %.4g, )"
              R"("flops_per_s": {"fp32": %.4g, "bf16": %.4g, "fp16": %.4g}, )"
              R"("copied_bytes": %zu, "sides": {"fp32": %d, "bf16": %d, "fp16": %d}})" "\n",
              properties.name, copy, fp32.flops, bf16.flops, fp16.flops, copy_bytes, fp32.side, bf16.side, fp16.side);
  CUDA_CHECK(cudaStreamDestroy(stream));
}

}  // namespace

int main() {
  try {
    measure();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ceilings: %s\n", error.what());
    return 1;
  }
}
