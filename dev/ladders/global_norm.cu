// The ladder of the global norm of n gradients, that is, of the sum under the root: all elements are added up to one
// number.
//
//   total = Σ g²
//
// Least bytes: each gradient read once, 4 bytes (they are floats whatever the model's type). 2 FLOPs. The elements
// themselves take hardly any time; the difficulty is to bring all of them together in one place. And the result should
// be the same number every time: floats added in another order give another sum, and so another clip factor for all
// weights, in every step.
#include "dev/ladders/harness.cuh"
#include "dev/ladders/operation.cuh"
#include "kernels/norm.cuh"

namespace {

using namespace ladder;

constexpr int norm_block = 256;  // threads

template <class T>
struct GlobalNorm {
  static constexpr const char* name = "global_norm";
  static std::vector<Shape> checked_shapes() {
    std::vector<Shape> shapes = {{{"elements", 1}}, {{"elements", 1003}}};
    if (large_shapes) shapes.push_back({{"elements", 77777}});
    return shapes;
  }
  static Shape counted_shape() { return {{"elements", 1 << 20}}; }
  static Shape timed_shape() { return {{"elements", 1 << 27}}; }
  static std::vector<Rung<GlobalNorm>> rungs();

  explicit GlobalNorm(const Shape& shape)
      : count(shape["elements"]), gradients(count), partials(partial_sums<float>(count)), total(1) {}

  void reset() { partials.poison(), total.poison(); }
  double elements() const { return double(count); }
  double bytes() const { return square_sums_counts(elements()).bytes; }
  double flops() const { return square_sums_counts(elements()).flops; }

  std::vector<Output> outputs() const {
    double sum = 0;
    for (double g : gradients.numbers()) sum += g * g;
    // A square is rounded when it is computed, and then at each addition of floats on its way: up to 24 in a thread (8
    // packs, 16 elements of a pack) and 5 + 8 in a block.
    return {{"total", total.get(), {sum}, 0, 38 * rounding<float>}};
  }

  size_t count;
  RandomBuffer<float> gradients;
  Buffer<float> partials;  // of the last rung
  Buffer<double> total;
};

// The rungs that add to the total by atomics need it to be zero before.
template <class T>
void clear_total(GlobalNorm<T>& o, cudaStream_t stream) {
  CUDA_CHECK(cudaMemsetAsync(o.total, 0, sizeof(double), stream));
}

// ---- 1: an atomic for each element
//
// This is like a mutex for the threads of a CPU. Reads are perfect, and yet the memory is idle: additions to one
// address are done one after another, in the one part of the L2 cache that holds it, at best one per clock. 134 million
// of them take 80 ms; reading the elements takes 0.16. (A total in float would not even be right: from 2²⁴ on, adding 1
// to it changes nothing.)

__global__ void atomic_per_element_kernel(double* total, const float* gradients, size_t count) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) atomicAdd(total, double(gradients[i] * gradients[i]));
}

template <class T>
void atomic_per_element(GlobalNorm<T>& o, cudaStream_t stream) {
  clear_total(o, stream);
  atomic_per_element_kernel<<<blocks_for(o.count, norm_block), norm_block, 0, stream>>>(
      o.total.data(), o.gradients.data(), o.count);
}

// ---- 2: an atomic for each block
//
// In rung 1 all additions went to one address. Now a block first adds up its own 256 elements, by shuffles within the
// warps and then through shared memory: a 256th of the atomics, 524,288, which take less time than the loads. But a
// warp now executes 27 instructions and waits at a barrier to add up the squares of one instruction, and each of its
// threads has only 4 bytes on the way.

__global__ void atomic_per_block_kernel(double* total, const float* gradients, size_t count) {
  __shared__ float scratch[32];
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const float sum = block_reduce_sum(i < count ? gradients[i] * gradients[i] : 0.0f, scratch);
  if (threadIdx.x == 0) atomicAdd(total, double(sum));
}

template <class T>
void atomic_per_block(GlobalNorm<T>& o, cudaStream_t stream) {
  clear_total(o, stream);
  atomic_per_block_kernel<<<blocks_for(o.count, norm_block), norm_block, 0, stream>>>(
      o.total.data(), o.gradients.data(), o.count);
}

// ---- 3: many elements per thread
//
// In rung 2 the sum over the block took longer than adding within a thread. Now a thread adds eight packs of 16 bytes
// before the block adds up its threads: a 32nd of the shuffles, barriers and atomics. As all its loads come before the
// first addition, a thread has 128 bytes on the way instead of 4.

constexpr int elements_of_thread = sum_packs * pack_width<float>;

__global__ void packs_kernel(double* total, const float* gradients, size_t count) {
  constexpr int N = pack_width<float>;
  __shared__ float scratch[32];
  const size_t whole = count / N * N, first = size_t(blockIdx.x) * norm_block * elements_of_thread + threadIdx.x * N;
  PackWords<float, N> packs[sum_packs] = {};
#pragma unroll
  for (int p = 0; p < sum_packs; ++p)
    if (first + p * norm_block * N < whole) packs[p] = load_pack<N>(gradients + first + p * norm_block * N);
  const size_t last = whole + threadIdx.x;  // elements behind the last whole pack
  float sum = blockIdx.x == 0 && last < count ? gradients[last] * gradients[last] : 0.0f, x[N];
#pragma unroll
  for (int p = 0; p < sum_packs; ++p) {
    float of_pack = 0;
    unpack(packs[p], x);
#pragma unroll
    for (int k = 0; k < N; ++k) of_pack += x[k] * x[k];
    sum += of_pack;
  }
  sum = block_reduce_sum(sum, scratch);
  if (threadIdx.x == 0) atomicAdd(total, double(sum));
}

template <class T>
void packs(GlobalNorm<T>& o, cudaStream_t stream) {
  clear_total(o, stream);
  packs_kernel<<<blocks_for(o.count, norm_block * elements_of_thread), norm_block, 0, stream>>>(
      o.total.data(), o.gradients.data(), o.count);
}

// ---- 4: two levels: the kernel of the model
//
// Rung 3 is fast, but blocks reach the atomic in another order each time, so the last bits of the sum change. Here each
// block's partial sum has its own address, and a second launch, of one block, adds these up. There are at most 4,096 of
// them, so it takes as long as a launch takes.

template <class T>
void two_levels(GlobalNorm<T>& o, cudaStream_t stream) {
  square_sums(o.partials, o.gradients, o.count, stream);
  add_up(o.total, o.partials, o.partials.size(), stream);
}

template <class T>
std::vector<Rung<GlobalNorm<T>>> GlobalNorm<T>::rungs() {
  return {
      {"atomic_per_element", "all additions to one address, one after another", atomic_per_element<T>},
      {"atomic_per_block", "256 elements meet in a block first: a 256th of the atomics", atomic_per_block<T>},
      {"packs", "eight packs of 16 bytes per thread, before threads add up together", packs<T>},
      {"two_levels", "kernels/norm.cuh: each partial sum has its own address: the same bits every time", two_levels<T>},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<GlobalNorm>(count, arguments); }
