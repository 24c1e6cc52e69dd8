// The ladder of GELU's forward pass, in the tanh form of GPT-2 (Hendrycks, Gimpel, arXiv:1606.08415), over n elements:
//
//   gelu(x) = x/2 · (1 + tanh u),   u = √(2/π) · (x + 0.044715 x³)
//
// Least bytes: x read once, out written once: 2 elements. About 10 FLOPs, if tanh counted as one. From the first rung
// on every address is read once, and neighbouring threads read neighbouring addresses, so no bytes can be saved. The
// remaining tasks: to have enough bytes on the way, and to finish an element before the next one arrives.
#include "dev/ladders/harness.cuh"
#include "dev/ladders/operation.cuh"
#include "kernels/gelu.cuh"
#include "test/gelu_reference.h"

namespace {

using namespace ladder;

template <class T>
struct Gelu {
  static constexpr const char* name = "gelu";
  static std::vector<Shape> checked_shapes() {
    std::vector<Shape> shapes = {{{"rows", 1}, {"columns", 51}}, {{"rows", 7}, {"columns", 208}}};
    if (large_shapes) shapes.push_back({{"rows", 9}, {"columns", 1024}});
    return shapes;
  }
  static Shape counted_shape() { return {{"rows", 64}, {"columns", 3072}}; }
  static Shape timed_shape() { return {{"rows", 65536}, {"columns", 3072}}; }
  static std::vector<Rung<Gelu>> rungs();

  explicit Gelu(const Shape& shape)
      : rows(shape["rows"]), columns(shape["columns"]), x(count(), 3), out(count()) {}

  void reset() { out.poison(); }
  size_t count() const { return size_t(rows) * columns; }
  double elements() const { return double(count()); }
  double bytes() const { return gelu_forward_counts(elements(), sizeof(T)).bytes; }
  double flops() const { return gelu_forward_counts(elements(), sizeof(T)).flops; }

  std::vector<Output> outputs() const {
    std::vector<double> expected = x.numbers();
    for (double& value : expected) value = gelu(value);
    // tanh is off by up to 4 units in the last place of 1. It is multiplied by x/2, which counts up to 2.5: from |x| =
    // 5 on tanh is exactly ±1. The sigmoid's errors are smaller (test/test_gelu.cu).
    return {{"out", out.numbers(), expected, 1, 1e-6 + rounding<T>}};
  }

  int rows, columns;
  RandomBuffer<T> x;
  Buffer<T> out;
};

// ---- 1: one thread per element
//
// Little's law (bytes on the way = bandwidth · latency): for 3.35 TB/s at a latency of 0.6 µs an H100 needs 2 MB on the
// way, 15 KB per SM. The 2,048 threads of an SM, each waiting for 2 bytes, have asked for 4 KB. And index, bounds,
// addresses, constants, load and store, the same for every element, are 24 of the thread's 48 instructions (nvcc 13.0's
// for sm_90a, as `cuobjdump -sass build/gpu/ladder_gelu` lists them; all numbers of instructions are in bf16, up to the
// last EXIT).

__device__ inline float gelu_by_tanh(float x) {
  return 0.5f * x * (1.0f + tanhf(gelu_scale * (x + gelu_cubic * x * x * x)));
}

template <class T>
__global__ void thread_per_element_kernel(T* out, const T* x, size_t count) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) out[i] = from_float<T>(gelu_by_tanh(to_float(x[i])));
}

template <class T>
void thread_per_element(Gelu<T>& o, cudaStream_t stream) {
  thread_per_element_kernel<T><<<blocks_for(o.count(), 256), 256, 0, stream>>>(o.out.data(), o.x.data(), o.count());
}

// ---- 2: packs of 16 bytes
//
// Too few bytes were on the way. Now a thread asks for 16 bytes at once, 8 elements of bf16: 32 KB per SM, and an
// eighth of the loads, stores and index arithmetic. The sectors were full before, and still are. 27 instructions per
// element are left, 218 for 8 elements: 24 for each element alone, and an eighth of the 24 that the 8 elements share.

template <class T, int N>
__global__ void packs_kernel(T* out, const T* input, size_t count) {
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float x[N];
  load(input + i, x);
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = gelu_by_tanh(x[k]);
  store(out + i, x);
}

template <class T>
void packs(Gelu<T>& o, cudaStream_t stream) {
  with_pack<T>(o.columns, [&](auto width) {
    constexpr int N = decltype(width)::value;
    packs_kernel<T, N><<<blocks_for(o.count(), 256 * N), 256, 0, stream>>>(o.out.data(), o.x.data(), o.count());
  });
}

// ---- 3: the sigmoid instead of tanh: the kernel of the model
//
// An H100's memory delivers 0.84·10¹² bf16 elements per second and takes back as many; its SMs execute some 30·10¹²
// instructions of threads per second. That is 35 instructions per element; with 27 needed, little time is left for
// waiting. (1 + tanh u)/2 is the sigmoid of 2u: an exponential and a reciprocal of the special function unit, without
// separate cases for small u and for its sign. 14 instructions are left, 112 for 8 elements.

template <class T>
void sigmoid(Gelu<T>& o, cudaStream_t stream) {
  gelu_forward<T>(o.out, o.x, o.rows, o.columns, stream);
}

template <class T>
std::vector<Rung<Gelu<T>>> Gelu<T>::rungs() {
  return {
      {"thread_per_element", "full sectors, but 2 bytes per thread on the way at a time", thread_per_element<T>},
      {"packs", "16 bytes per thread: an eighth of the loads and stores, eight times as much on the way", packs<T>},
      {"sigmoid", "kernels/gelu.cuh: x·sigmoid(2u), half of the arithmetic of tanh", sigmoid<T>},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<Gelu>(count, arguments); }
