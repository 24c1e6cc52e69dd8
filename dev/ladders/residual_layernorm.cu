// The ladder of the residual addition with the LayerNorm after it (kernels/layernorm.cuh has the maths):
//
//   sum = residual + branch, rounded to T;  out = (sum − mean)·rstd·weight + bias, over C channels
//
// It teaches fusion: two operations that both wait for memory, and the second reads the numbers that the first has just
// written. Least bytes: residual and branch read once, sum and out written once: 4 elements per channel. As separate
// operations they move 3 and 2. About 9 FLOPs per element.
#include "dev/ladders/layernorm.cuh"

namespace {

using namespace ladder;

template <class T>
struct ResidualLayerNorm {
  static constexpr const char* name = "residual_layernorm";
  static std::vector<Shape> checked_shapes() {
    return {rows_of_channels(5, 64), rows_of_channels(3, 77), rows_of_channels(9, 768)};
  }
  static Shape counted_shape() { return rows_of_channels(64, 768); }
  static Shape timed_shape() { return rows_of_channels(65536, 768); }
  static std::vector<Rung<ResidualLayerNorm>> rungs();

  explicit ResidualLayerNorm(const Shape& shape)
      : rows(at_most(most_warps, shape, "rows")), channels(shape["channels"]), residual(count(), 2, 3),
        branch(count(), 1, 0, 2), weight(channels, 0.3, 1), bias(channels, 0.5), sum(count()), out(count()), mean(rows),
        rstd(rows) {}

  void reset() { sum.poison(), out.poison(), mean.poison(), rstd.poison(); }
  size_t count() const { return size_t(rows) * channels; }
  double elements() const { return double(count()); }
  double bytes() const { return 4 * elements() * sizeof(T); }
  double flops() const { return 9 * elements(); }

  std::vector<Output> outputs() const {
    const std::vector<double> a = residual.numbers(), b = branch.numbers();
    std::vector<double> sums(a.size());
    for (size_t i = 0; i < a.size(); ++i) sums[i] = to_float(from_float<T>(float(a[i] + b[i])));
    std::vector<Output> outputs = layernorm_outputs(*this, layernorm_reference(sums, weight.numbers(), bias.numbers()));
    // One rounding of the same number: both must be equal.
    outputs.insert(outputs.begin(), {"sum", sum.numbers(), sums, 1, 0});
    return outputs;
  }

  int rows, channels;
  RandomBuffer<T> residual, branch, weight, bias;
  Buffer<T> sum, out;
  Buffer<float> mean, rstd;
};

// ---- 1: two kernels, one thread per element and one thread per row
//
// Each operation by itself. The addition is as good as possible without packs. In the norm neighbouring threads of a
// warp read elements that are rows apart, a sector of 32 bytes for each element, three times: for the mean, the
// variance and the output.

template <class T>
__global__ void add_kernel(T* sum, const T* residual, const T* branch, size_t count) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) sum[i] = from_float<T>(to_float(residual[i]) + to_float(branch[i]));
}

template <class T>
void add(ResidualLayerNorm<T>& o, cudaStream_t stream) {
  add_kernel<T>
      <<<blocks_for(o.count(), 256), 256, 0, stream>>>(o.sum.data(), o.residual.data(), o.branch.data(), o.count());
}

template <class T>
void thread_per_row(ResidualLayerNorm<T>& o, cudaStream_t stream) {
  add(o, stream);
  norm_thread_per_row(o, o.sum.data(), stream);
}

// ---- 2: two kernels, one warp per row
//
// 32 threads side by side along the row make the sectors full: a sixteenth as many in bf16. Between the two kernels the
// whole sum is written to memory and read again: 3 + 2 elements per channel, 5/4 of the least.

template <class T>
void two_kernels(ResidualLayerNorm<T>& o, cudaStream_t stream) {
  add(o, stream);
  norm_warp_per_row(o, o.sum.data(), stream);
}

// ---- 3: one kernel
//
// The thread that needs the sum for the mean computes it. So the first of the three times that the norm reads the row
// is no longer needed, and this was the only one that came from memory: the other two find in a cache the sums that the
// warp has just written. There is one launch instead of two, and no barrier: each thread reads only its own writes.

template <class T>
void fused(ResidualLayerNorm<T>& o, cudaStream_t stream) {
  residual_layernorm_forward_kernel<T, 1, 0><<<ceil_div(o.rows, 4), 128, 0, stream>>>(
      o.out.data(), o.sum.data(), o.mean.data(), o.rstd.data(), o.residual.data(), o.branch.data(), o.weight.data(),
      o.bias.data(), o.rows, o.channels, Unseen());
}

// ---- 4: packs of 16 bytes
//
// The same bytes in an eighth of the loads and stores (bf16), and of the loop around them. A warp now has so many bytes
// on the way that a few warps are enough to keep the memory busy.

template <class T>
void packs(ResidualLayerNorm<T>& o, cudaStream_t stream) {
  with_pack<T>(o.channels, [&](auto width) {
    residual_layernorm_forward_kernel<T, decltype(width)::value, 0><<<ceil_div(o.rows, 4), 128, 0, stream>>>(
        o.out.data(), o.sum.data(), o.mean.data(), o.rstd.data(), o.residual.data(), o.branch.data(), o.weight.data(),
        o.bias.data(), o.rows, o.channels, Unseen());
  });
}

// ---- 5: the row in registers: the kernel of the model
//
// A lane keeps its packs of the row: three of them at 768 channels. It loads all before it uses the first, so it waits for
// memory once instead of once for each, and the two later passes load nothing but weight and bias.

template <class T>
void kept_row(ResidualLayerNorm<T>& o, cudaStream_t stream) {
  residual_layernorm_forward<T>(o.out, o.sum, o.mean, o.rstd, o.residual, o.branch, o.weight, o.bias, o.rows,
                                o.channels, stream);
}

template <class T>
std::vector<Rung<ResidualLayerNorm<T>>> ResidualLayerNorm<T>::rungs() {
  return {
      {"thread_per_row", "two kernels; the norm's threads read rows apart: a sector per element", thread_per_row<T>},
      {"two_kernels", "one warp per row: full sectors; the sum goes to memory and comes back", two_kernels<T>},
      {"fused", "one kernel: the sum is in a register when the mean needs it", fused<T>},
      {"packs", "16 bytes per load, an eighth of the instructions", packs<T>},
      {"kept_row", "kernels/layernorm.cuh: the row stays in registers, and is loaded at once", kept_row<T>},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<ResidualLayerNorm>(count, arguments); }
