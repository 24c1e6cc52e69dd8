// The ladder of softmax and cross-entropy over a padded vocabulary, with the gradient in place of the logits:
//
//   loss[row] = log Σ_v exp(z_v) − z_target;   dz_v = (softmax(z)_v − [v = target]) · weight for v < V, else 0
//
// Least bytes: each logit read once, its gradient written once: 2 elements. About 6 FLOPs. But a gradient needs the sum
// of the whole row, and no exponential may overflow, so the row's maximum must be known first: a row of 100 KB is read
// three times. The rows of all blocks that fill a GPU are larger than its L2 cache, so each time they are read from
// memory.
#include <cfloat>

#include "dev/ladders/harness.cuh"
#include "dev/ladders/operation.cuh"
#include "kernels/cross_entropy.cuh"

namespace {

using namespace ladder;

template <class T>
struct SoftmaxCrossEntropy {
  static constexpr const char* name = "softmax_cross_entropy";
  static std::vector<Shape> checked_shapes() {
    std::vector<Shape> shapes = {{{"rows", 3}, {"vocabulary", 51}, {"padded", 128}},
                                 {{"rows", 1}, {"vocabulary", 1499}, {"padded", 1536}}};
    if (large_shapes) shapes.push_back({{"rows", 2}, {"vocabulary", 10007}, {"padded", 10112}});
    return shapes;
  }
  static Shape counted_shape() { return {{"rows", 32}, {"vocabulary", 50257}, {"padded", 50304}}; }
  static Shape timed_shape() { return {{"rows", 8192}, {"vocabulary", 50257}, {"padded", 50304}}; }
  static std::vector<Rung<SoftmaxCrossEntropy>> rungs();

  explicit SoftmaxCrossEntropy(const Shape& shape)
      : rows(shape["rows"]), vocabulary(shape["vocabulary"]), padded(at_least("vocabulary", shape, "padded")),
        weight(1.0f / rows), original(size_t(rows) * padded, 3), logits(original.size()), losses(rows),
        targets(last_tokens()), loss_scale(std::vector<float>{1}) {}

  void reset() {
    losses.poison();
    CUDA_CHECK(cudaMemcpy(logits, original, logits.size() * sizeof(T), cudaMemcpyDeviceToDevice));
    CUDA_CHECK(cudaStreamSynchronize(nullptr));
  }
  double elements() const { return double(rows) * padded; }
  double bytes() const { return cross_entropy_counts(elements(), sizeof(T)).bytes; }
  double flops() const { return cross_entropy_counts(elements(), sizeof(T)).flops; }
  std::vector<Output> outputs() const;

  int rows, vocabulary, padded;
  float weight;  // of a token's loss
  RandomBuffer<T> original;
  Buffer<T> logits;  // gradients afterwards
  Buffer<float> losses;
  Buffer<int> targets;
  Buffer<float> loss_scale;  // which only the last rung knows

 private:
  // A target for each row: the last token of the vocabulary, the one before it, and so on.
  std::vector<int> last_tokens() const {
    std::vector<int> tokens(rows);
    for (int row = 0; row < rows; ++row) tokens[row] = vocabulary - 1 - row % vocabulary;
    return tokens;
  }
};

template <class T>
std::vector<Output> SoftmaxCrossEntropy<T>::outputs() const {
  const std::vector<double> in = original.numbers();
  const std::vector<int> tokens = targets.get();
  std::vector<double> gradients = logits.numbers(), expected(in.size()), expected_losses(rows);
  std::vector<double> at_targets(rows), expected_at_targets(rows);
  for (int r = 0; r < rows; ++r) {
    const double* z = &in[size_t(r) * padded];
    double* gradient = &expected[size_t(r) * padded];
    const int target = tokens[r];
    double sum = 0;
    for (int v = 0; v < vocabulary; ++v) sum += std::exp(z[v]);
    for (int v = 0; v < vocabulary; ++v) gradient[v] = std::exp(z[v]) / sum * weight;
    expected_losses[r] = std::log(sum) - z[target];
    expected_at_targets[r] = std::exchange(gradient[target], 0) - weight;
    at_targets[r] = std::exchange(gradients[size_t(r) * padded + target], 0);
  }
  // A sum of V positive terms rounds V times, which usually comes to √V roundings. Arguments of exp, down to −30, round
  // by 30 times as much as 1 does, exp itself and the products by less than 10 times. The error of a probability is
  // relative to the probability, however small it is; at the target, where 1 is subtracted, it is relative to 1.
  const double sums = (std::sqrt(vocabulary) + 40) * rounding<float>;
  return {{"loss", losses.numbers(), expected_losses, 1, sums},
          {"gradient", gradients, expected, 1e-30, 2 * sums + rounding<T>},
          {"gradient at the target", at_targets, expected_at_targets, weight, 2 * sums + rounding<T>}};
}

// ---- 1: one thread per row
//
// The row is read three times, as one would write it down. Neighbouring threads of a warp have neighbouring rows, so
// each element costs a sector of 32 bytes, of which 2 are used: 128 bytes per element for three loads and a store, 32
// times the least (fewer where the L1 cache helps). And 8,192 rows are 8,192 threads, where a GPU could run 270,000.

template <class T>
__global__ void thread_per_row_kernel(T* logits, float* losses, const int* targets, int rows, int vocabulary,
                                      int padded, float weight) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  T* z = logits + size_t(row) * padded;
  float maximum = -INFINITY, sum = 0;
  for (int v = 0; v < vocabulary; ++v) maximum = fmaxf(maximum, to_float(z[v]));
  for (int v = 0; v < vocabulary; ++v) sum += expf(to_float(z[v]) - maximum);
  const int target = targets[row];
  losses[row] = logf(sum) + (maximum - to_float(z[target]));
  for (int v = 0; v < padded; ++v) {
    const float probability = v < vocabulary ? expf(to_float(z[v]) - maximum) / sum : 0.0f;
    z[v] = from_float<T>((probability - (v == target ? 1.0f : 0.0f)) * weight);
  }
}

template <class T>
void thread_per_row(SoftmaxCrossEntropy<T>& o, cudaStream_t stream) {
  thread_per_row_kernel<T><<<ceil_div(o.rows, 32), 32, 0, stream>>>(o.logits.data(), o.losses.data(), o.targets.data(),
                                                                   o.rows, o.vocabulary, o.padded, o.weight);
}

// ---- 2: one block per row
//
// In rung 1 a sixteenth of each sector was used. Here neighbouring threads read neighbouring elements: 3·2 bytes in and
// 2 out, 8 per element, twice the least. The price is a maximum and a sum over the block, with a barrier each, once per
// 50,304 elements.

constexpr int block = 512;  // threads; four such blocks fill an SM

// The loss, by the thread that has the target's logit, and the thread's gradients: the last time that a row is read, in
// every rung with one block per row. A thread writes only where it has read.
template <class T>
__device__ void write_gradients(T* z, float* loss, int target, int vocabulary, int padded, float weight, float maximum,
                                float sum) {
  for (int v = threadIdx.x; v < padded; v += blockDim.x) {
    const float logit = to_float(z[v]);
    if (v == target) *loss = logf(sum) + (maximum - logit);
    const float probability = v < vocabulary ? expf(logit - maximum) / sum : 0.0f;
    z[v] = from_float<T>((probability - (v == target ? 1.0f : 0.0f)) * weight);
  }
}

template <class T>
__global__ void block_per_row_kernel(T* logits, float* losses, const int* targets, int vocabulary, int padded,
                                     float weight) {
  __shared__ float max_scratch[32], sum_scratch[32];
  const int row = blockIdx.x;
  T* z = logits + size_t(row) * padded;
  float thread_max = -INFINITY, thread_sum = 0;
  for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) thread_max = fmaxf(thread_max, to_float(z[v]));
  const float maximum = block_reduce_max(thread_max, max_scratch);
  for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) thread_sum += expf(to_float(z[v]) - maximum);
  const float sum = block_reduce_sum(thread_sum, sum_scratch);
  write_gradients(z, losses + row, targets[row], vocabulary, padded, weight, maximum, sum);
}

template <class T>
void block_per_row(SoftmaxCrossEntropy<T>& o, cudaStream_t stream) {
  block_per_row_kernel<T><<<o.rows, block, 0, stream>>>(o.logits.data(), o.losses.data(), o.targets.data(),
                                                        o.vocabulary, o.padded, o.weight);
}

// ---- 3: online softmax
//
// Until now the row was read once for the maximum and once for the sum. Once is enough if the sum is scaled whenever
// the maximum rises (Milakov, Gimelshein, arXiv:1805.02867), which happens about log n times in the n numbers that a
// thread sees. 2·2 bytes in and 2 out are 6 per element, 1.5 times the least.

// Σ exp(x − maximum) over the elements so far. It starts below every number, yet finite: −∞ − −∞ is no number.
struct OnlineSum {
  float maximum = -FLT_MAX, sum = 0;

  __device__ void raise(float new_maximum) {
    if (new_maximum <= maximum) return;
    sum *= expf(maximum - new_maximum);
    maximum = new_maximum;
  }
};

template <class T>
__global__ void online_kernel(T* logits, float* losses, const int* targets, int vocabulary, int padded, float weight) {
  __shared__ float max_scratch[32], sum_scratch[32];
  const int row = blockIdx.x;
  T* z = logits + size_t(row) * padded;
  OnlineSum seen;
  for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) {
    const float logit = to_float(z[v]);
    seen.raise(logit);
    seen.sum += expf(logit - seen.maximum);
  }
  const float maximum = block_reduce_max(seen.maximum, max_scratch);
  seen.raise(maximum);
  const float sum = block_reduce_sum(seen.sum, sum_scratch);
  write_gradients(z, losses + row, targets[row], vocabulary, padded, weight, maximum, sum);
}

template <class T>
void online(SoftmaxCrossEntropy<T>& o, cudaStream_t stream) {
  online_kernel<T><<<o.rows, block, 0, stream>>>(o.logits.data(), o.losses.data(), o.targets.data(), o.vocabulary,
                                                 o.padded, o.weight);
}

// ---- 4: packs of 16 bytes
//
// The sectors are full, but a warp asks for only two at a time, and each element costs two loads, a store, their
// addresses, and a branch where the maximum may rise. With 8 elements per thread at once, all of these become an
// eighth, and eight times as many bytes are on the way. The bytes moved are the same.

template <class T, int N>
__device__ void load_logits(float (&x)[N], const T* z, int column, int vocabulary) {
  load(z + column, x);
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = column + k < vocabulary ? x[k] : -INFINITY;
}

template <class T, int N>
__device__ OnlineSum sum_packs(const T* z, int vocabulary) {
  OnlineSum seen;
  for (int column = threadIdx.x * N; column < vocabulary; column += blockDim.x * N) {
    float x[N], highest = -INFINITY;
    load_logits(x, z, column, vocabulary);
#pragma unroll
    for (int k = 0; k < N; ++k) highest = fmaxf(highest, x[k]);
    seen.raise(highest);
#pragma unroll
    for (int k = 0; k < N; ++k) seen.sum += expf(x[k] - seen.maximum);
  }
  return seen;
}

template <class T, int N>
__global__ void packs_kernel(T* logits, float* losses, const int* targets, int vocabulary, int padded, float weight) {
  __shared__ float max_scratch[32], sum_scratch[32];
  const int row = blockIdx.x, target = targets[row];
  T* z = logits + size_t(row) * padded;
  OnlineSum seen = sum_packs<T, N>(z, vocabulary);
  const float maximum = block_reduce_max(seen.maximum, max_scratch);
  seen.raise(maximum);
  const float sum = block_reduce_sum(seen.sum, sum_scratch), scale = weight / sum;
  for (int column = threadIdx.x * N; column < padded; column += blockDim.x * N) {
    float x[N];
    load_logits(x, z, column, vocabulary);
    if (column <= target && target < column + N) losses[row] = logf(sum) + (maximum - to_float(z[target]));
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = expf(x[k] - maximum) * scale - (column + k == target ? weight : 0.0f);
    store(z + column, x);
  }
}

template <class T>
void packs(SoftmaxCrossEntropy<T>& o, cudaStream_t stream) {
  packs_kernel<T, pack_width<T>><<<o.rows, block, 0, stream>>>(o.logits.data(), o.losses.data(), o.targets.data(),
                                                               o.vocabulary, o.padded, o.weight);
}

// ---- 5: the row in shared memory: the kernel of the model
//
// One of the two reads can be saved. A row of 16-bit logits, 98 KB, fits into shared memory, twice on an SM of Hopper:
// the first read leaves it there. 2 bytes in and 2 out remain, the least. No barrier is needed: a thread reads only the
// packs that it has stored. (A row of floats, 201 KB, is not kept: it is read twice, as in rung 4.) Then the issue of
// instructions takes as long as the bytes, so there are as few as can be: powers of two instead of e, and the work for the
// target and the padding is done after the loops (dev/machine_code.md counts them).

template <class T>
void kept_row(SoftmaxCrossEntropy<T>& o, cudaStream_t stream) {
  launch_cross_entropy<T, true>(o.logits, o.losses, o.targets, o.rows, o.vocabulary, o.padded, o.weight, o.loss_scale,
                                stream);
}

template <class T>
bool rows_of_packs(const SoftmaxCrossEntropy<T>& o) {
  return o.padded % pack_width<T> == 0;
}

template <class T>
std::vector<Rung<SoftmaxCrossEntropy<T>>> SoftmaxCrossEntropy<T>::rungs() {
  return {
      {"thread_per_row", "maximum, sum, gradient: three reads of the row, a sector per element", thread_per_row<T>},
      {"block_per_row", "neighbours read neighbours: full sectors, two reductions of a block", block_per_row<T>},
      {"online", "maximum and sum in one pass: the sum is scaled when the maximum rises", online<T>},
      {"packs", "16 bytes per load: an eighth of the instructions", packs<T>, rows_of_packs<T>},
      {"kept_row", "kernels/cross_entropy.cuh: the row in shared memory: it is read from memory once", kept_row<T>,
       rows_of_packs<T>},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<SoftmaxCrossEntropy>(count, arguments); }
