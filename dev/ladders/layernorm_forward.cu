// The ladder of LayerNorm's forward pass (Ba, Kiros, Hinton, arXiv:1607.06450), over C channels of each row:
//
//   mean, var of x's row;  rstd = 1/√(var + ε);  out = (x − mean)·rstd·weight + bias
//
// Least bytes: x read once, out written once: 2 elements per channel (weight and bias are shared by all rows, and stay
// in cache). About 8 FLOPs per element, so only memory matters, and with it which thread reads which element: memory is
// read in sectors of 32 bytes, and the 32 threads of a warp ask for theirs together.
#include "dev/ladders/layernorm.cuh"

namespace {

using namespace ladder;

template <class T>
struct LayerNormForward {
  static constexpr const char* name = "layernorm_forward";
  static std::vector<Shape> checked_shapes() {
    return {rows_of_channels(5, 64), rows_of_channels(3, 77), rows_of_channels(33, 768)};
  }
  static Shape counted_shape() { return rows_of_channels(64, 768); }
  static Shape timed_shape() { return rows_of_channels(65536, 768); }
  static std::vector<Rung<LayerNormForward>> rungs();

  explicit LayerNormForward(const Shape& shape)
      : rows(at_most(most_warps, shape, "rows")), channels(shape["channels"]), x(size_t(rows) * channels, 2, 3),
        weight(channels, 0.3, 1), bias(channels, 0.5), out(size_t(rows) * channels), mean(rows), rstd(rows) {}

  void reset() { out.poison(), mean.poison(), rstd.poison(); }
  double elements() const { return double(rows) * channels; }
  double bytes() const { return layernorm_forward_counts(elements(), sizeof(T), 2).bytes; }
  double flops() const { return layernorm_forward_counts(elements(), sizeof(T), 2).flops; }

  std::vector<Output> outputs() const {
    return layernorm_outputs(*this, layernorm_reference(x.numbers(), weight.numbers(), bias.numbers()));
  }

  int rows, channels;
  RandomBuffer<T> x, weight, bias;
  Buffer<T> out;
  Buffer<float> mean, rstd;
};

// ---- 1: one thread per row
//
// The formula, line by line. The threads of a warp read elements of 32 rows: 32 sectors for 64 bytes of bf16, and
// fifteen sixteenths of each sector are not used. This happens three times for x and once for out: 128 bytes per
// element instead of 4. weight and bias have one address for all threads, so each is one sector for 32 elements.

template <class T>
void thread_per_row(LayerNormForward<T>& o, cudaStream_t stream) {
  norm_thread_per_row(o, o.x.data(), stream);
}

// ---- 2: one block per row
//
// 256 threads are side by side along one row: the 64 bytes that a warp asks for are two sectors, and all of them are
// used. 12 bytes per element are left, of which caches serve 8: x the second and third time, weight and bias. The
// price: sums are spread over 256 threads, and to add them up a block needs two barriers per row.

template <class T>
__global__ void block_per_row_kernel(T* out, float* means, float* rstds, const T* x, const T* weight, const T* bias,
                                     int channels) {
  __shared__ float scratch[2][32];
  const int row = blockIdx.x;
  x += size_t(row) * channels;
  out += size_t(row) * channels;
  float sum = 0, squares = 0;
  for (int c = threadIdx.x; c < channels; c += blockDim.x) sum += to_float(x[c]);
  const float mean = block_reduce_sum(sum, scratch[0]) / channels;
  for (int c = threadIdx.x; c < channels; c += blockDim.x) {
    const float deviation = to_float(x[c]) - mean;
    squares += deviation * deviation;
  }
  const float rstd = 1.0f / sqrtf(block_reduce_sum(squares, scratch[1]) / channels + layernorm_epsilon);
  for (int c = threadIdx.x; c < channels; c += blockDim.x)
    out[c] = from_float<T>((to_float(x[c]) - mean) * rstd * to_float(weight[c]) + to_float(bias[c]));
  if (threadIdx.x == 0) {
    means[row] = mean;
    rstds[row] = rstd;
  }
}

template <class T>
void block_per_row(LayerNormForward<T>& o, cudaStream_t stream) {
  block_per_row_kernel<T><<<o.rows, 256, 0, stream>>>(o.out.data(), o.mean.data(), o.rstd.data(), o.x.data(),
                                                      o.weight.data(), o.bias.data(), o.channels);
}

// ---- 3: one warp per row
//
// In rung 2 a warp loaded nothing while it waited for seven others. A warp that has a row for itself adds up its sums
// by ten shuffles, an eighth as many per element, without barriers and without shared memory: warps never wait for each
// other.

template <class T>
void warp_per_row(LayerNormForward<T>& o, cudaStream_t stream) {
  norm_warp_per_row(o, o.x.data(), stream);
}

// ---- 4: packs of 16 bytes, kept in registers: the kernel of the model
//
// A load of 2 bytes costs a warp as many instructions as one of 16, and the number of loads that can be on the way is
// the same. With packs of eight elements, an eighth of the loads and stores moves the same bytes, and each thread has
// eight times as many bytes on the way. All packs of the row are loaded before the first is used, and stay in registers
// for the passes that follow. An H100 (3.35 TB/s, latency 600 ns) needs 2 MB on the way: 15 KB per SM, or 7.4
// bytes for each of 2,048 threads.

template <class T>
void packs(LayerNormForward<T>& o, cudaStream_t stream) {
  const T* no_branch = nullptr;
  residual_layernorm_forward<T>(o.out, nullptr, o.mean, o.rstd, o.x, no_branch, o.weight, o.bias, o.rows, o.channels,
                                stream);
}

template <class T>
std::vector<Rung<LayerNormForward<T>>> LayerNormForward<T>::rungs() {
  return {
      {"thread_per_row", "neighbours in a warp read rows apart: a sector for each element", thread_per_row<T>},
      {"block_per_row", "256 threads side by side along the row: full sectors; two block reductions", block_per_row<T>},
      {"warp_per_row", "shuffles alone: no barrier, no shared memory, no thread idle at the row's end",
       warp_per_row<T>},
      {"packs", "kernels/layernorm.cuh: 16 bytes per load; the row stays in registers", packs<T>},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<LayerNormForward>(count, arguments); }
