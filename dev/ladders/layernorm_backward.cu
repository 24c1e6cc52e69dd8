// The ladder of LayerNorm's backward pass (kernels/layernorm.cuh has the maths), over rows of C channels:
//
//   n = (x − mean)·rstd,  g = dout·weight
//   dx += rstd·(g − mean_C(g) − n·mean_C(g·n));  dweight = Σ_rows dout·n;  dbias = Σ_rows dout
//
// Sums go in both directions: dx needs two sums along each row before any of the row can be written; dweight and dbias
// need two sums down each column. Least bytes: dout, x and dx read once, dx written once: 4 elements per channel. About
// 20 FLOPs per element, so memory decides: which threads read which elements, how often, and where the columns are
// added up.
#include "dev/ladders/layernorm.cuh"

namespace {

using namespace ladder;

template <class T>
struct LayerNormBackward {
  static constexpr const char* name = "layernorm_backward";
  static std::vector<Shape> checked_shapes() {
    return {rows_of_channels(5, 64), rows_of_channels(35, 77), rows_of_channels(3, 768)};
  }
  static Shape counted_shape() { return rows_of_channels(64, 768); }
  static Shape timed_shape() { return rows_of_channels(65536, 768); }
  static std::vector<Rung<LayerNormBackward>> rungs();

  explicit LayerNormBackward(const Shape& shape)
      : rows(at_most(most_warps, shape, "rows")), channels(shape["channels"]), dout(count(), 1, 0, 2), x(count(), 2, 3),
        weight(channels, 0.3, 1), dx_before(count(), 1, 0, 4), dx(count()), mean(rows, 0.1, 3), rstd(rows, 0.05, 0.5),
        dweight(channels), dbias(channels), workspace(layernorm_workspace(rows, channels)) {}

  void reset() {
    CUDA_CHECK(cudaMemcpy(dx.data(), dx_before.data(), count() * sizeof(T), cudaMemcpyDeviceToDevice));
    dweight.poison(), dbias.poison(), workspace.poison();
  }
  size_t count() const { return size_t(rows) * channels; }
  double elements() const { return double(count()); }
  double bytes() const { return layernorm_backward_counts(elements(), sizeof(T)).bytes; }
  double flops() const { return layernorm_backward_counts(elements(), sizeof(T)).flops; }

  std::vector<Output> outputs() const {
    const std::vector<double> d = dout.numbers(), in = x.numbers(), w = weight.numbers();
    const std::vector<double> means = mean.numbers(), rstds = rstd.numbers();
    std::vector<double> dx_right = dx_before.numbers(), dweight_right(channels), dbias_right(channels), n(channels);
    for (int r = 0; r < rows; ++r) {
      const size_t first = size_t(r) * channels;
      double mean_g = 0, mean_gn = 0;
      for (int c = 0; c < channels; ++c) {
        n[c] = (in[first + c] - means[r]) * rstds[r];
        mean_g += d[first + c] * w[c] / channels;
        mean_gn += d[first + c] * w[c] * n[c] / channels;
        dweight_right[c] += d[first + c] * n[c];
        dbias_right[c] += d[first + c];
      }
      for (int c = 0; c < channels; ++c)
        dx_right[first + c] += rstds[r] * (d[first + c] * w[c] - mean_g - n[c] * mean_gn);
    }
    // Terms of size 1 cancel to √rows or √C, with a rounding of float for each addition; usually these come to 30
    // roundings. The statistics are inputs here, so only these sums and the last rounding to T are inexact.
    const double sums = 30 * rounding<float>, size = std::sqrt(double(rows));
    return {{"dx", dx.numbers(), dx_right, 1, rounding<T> + sums},
            {"dweight", dweight.numbers(), dweight_right, size, sums},
            {"dbias", dbias.numbers(), dbias_right, size, sums}};
  }

  int rows, channels;
  RandomBuffer<T> dout, x, weight, dx_before;
  Buffer<T> dx;
  RandomBuffer<float> mean, rstd;
  Buffer<float> dweight, dbias, workspace;
};

// dweight and dbias start at zero where they are added to atomically.
template <class T>
void clear_sums(LayerNormBackward<T>& o, cudaStream_t stream) {
  CUDA_CHECK(cudaMemsetAsync(o.dweight.data(), 0, o.channels * sizeof(float), stream));
  CUDA_CHECK(cudaMemsetAsync(o.dbias.data(), 0, o.channels * sizeof(float), stream));
}

// ---- 1: one thread per row
//
// The formulas as they are written. Neighbouring threads of a warp read elements that are rows apart: a sector of 32
// bytes for each 2 bytes asked for, five times per element (dout and x twice, dx once), and once more to write. All
// rows add to the same 2·C floats, two atomics per element, whose order depends on timing: the last bits change from
// run to run.

template <class T>
__global__ void thread_per_row_kernel(T* dx, float* dweight, float* dbias, const T* dout, const T* x, const T* weight,
                                      const float* means, const float* rstds, int rows, int channels) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const size_t first = size_t(row) * channels;
  const float mean = means[row], rstd = rstds[row];
  float sum_g = 0, sum_gn = 0;
  for (int c = 0; c < channels; ++c) {
    const float g = to_float(dout[first + c]) * to_float(weight[c]);
    sum_g += g;
    sum_gn += g * (to_float(x[first + c]) - mean) * rstd;
  }
  for (int c = 0; c < channels; ++c) {
    const float d = to_float(dout[first + c]), n = (to_float(x[first + c]) - mean) * rstd;
    const float change = rstd * (d * to_float(weight[c]) - sum_g / channels - n * sum_gn / channels);
    dx[first + c] = from_float<T>(to_float(dx[first + c]) + change);
    atomicAdd(&dweight[c], d * n);
    atomicAdd(&dbias[c], d);
  }
}

template <class T>
void thread_per_row(LayerNormBackward<T>& o, cudaStream_t stream) {
  clear_sums(o, stream);
  thread_per_row_kernel<T><<<ceil_div(o.rows, 128), 128, 0, stream>>>(
      o.dx.data(), o.dweight.data(), o.dbias.data(), o.dout.data(), o.x.data(), o.weight.data(), o.mean.data(),
      o.rstd.data(), o.rows, o.channels);
}

// ---- 2: one warp per row
//
// The same, with 32 threads side by side along the row: sectors are full, so there are a sixteenth as many in bf16, and
// ten shuffles per row add up its two sums. The atomics remain, two per element, 8 bytes besides the 12 that are read
// and written. Memory is not the limit yet: all rows wait for the same 2·C addresses.

template <class T>
__global__ void warp_per_row_kernel(T* dx, float* dweight, float* dbias, const T* dout, const T* x, const T* weight,
                                    const float* means, const float* rstds, int rows, int channels) {
  const int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  const size_t first = size_t(row) * channels;
  const float mean = means[row], rstd = rstds[row];
  float sums[2] = {};
  for (int c = lane; c < channels; c += 32) {
    const float g = to_float(dout[first + c]) * to_float(weight[c]);
    sums[0] += g;
    sums[1] += g * (to_float(x[first + c]) - mean) * rstd;
  }
  warp_reduce_sums(sums);
  for (int c = lane; c < channels; c += 32) {
    const float d = to_float(dout[first + c]), n = (to_float(x[first + c]) - mean) * rstd;
    const float change = rstd * (d * to_float(weight[c]) - sums[0] / channels - n * sums[1] / channels);
    dx[first + c] = from_float<T>(to_float(dx[first + c]) + change);
    atomicAdd(&dweight[c], d * n);
    atomicAdd(&dbias[c], d);
  }
}

template <class T>
void warp_per_row(LayerNormBackward<T>& o, cudaStream_t stream) {
  clear_sums(o, stream);
  warp_per_row_kernel<T><<<ceil_div(o.rows, 4), 128, 0, stream>>>(
      o.dx.data(), o.dweight.data(), o.dbias.data(), o.dout.data(), o.x.data(), o.weight.data(), o.mean.data(),
      o.rstd.data(), o.rows, o.channels);
}

// ---- 3: a block owns 32 rows
//
// One warp per row computes the two means, as before. Then, after one barrier, each thread has columns, and goes
// through the 32 rows of the block, so that dweight and dbias are summed in registers. A block writes one partial sum
// for its 32 rows; kernels/column_sum.cuh adds these up: 2·2/32 floats per element instead of two atomics, and the same
// bits every time.

// The workspace holds partial sums of 32 rows each: first the sums of dweight, then the sums of dbias.
template <class T>
void add_blocks(LayerNormBackward<T>& o, cudaStream_t stream) {
  const int blocks = ceil_div(o.rows, layernorm_rows_per_block);
  const size_t stride = round_up(size_t(blocks) * o.channels, size_t(64));
  add_partial_sums({o.dweight, o.workspace}, {o.dbias, o.workspace + stride}, blocks, o.channels, false, stream);
}

template <class T, int N>
void block_owns_rows(LayerNormBackward<T>& o, cudaStream_t stream) {
  const int blocks = ceil_div(o.rows, layernorm_rows_per_block);
  const size_t stride = round_up(size_t(blocks) * o.channels, size_t(64));
  layernorm_backward_long_rows_kernel<T, N><<<blocks, 256, 0, stream>>>(
      o.dx.data(), o.workspace.data(), o.workspace.data() + stride, o.dout.data(), o.x.data(), o.weight.data(),
      o.mean.data(), o.rstd.data(), o.rows, o.channels, Unseen());
  add_blocks(o, stream);
}

template <class T>
void owned_rows(LayerNormBackward<T>& o, cudaStream_t stream) {
  block_owns_rows<T, 1>(o, stream);
}

// ---- 4: packs of 16 bytes
//
// The same kernel, with 8 elements of bf16 at once: an eighth of the loads and stores, and of the loop around them. The
// bytes are the same as before, 6 elements per channel, because dout and x are still read twice: 32 rows of two tensors
// are 98 KB at 768 channels. The rows of all running blocks exceed the L2 cache, so the second read costs as much as
// the first.

template <class T>
void packs(LayerNormBackward<T>& o, cudaStream_t stream) {
  with_pack<T>(o.channels, [&](auto width) { block_owns_rows<T, decltype(width)::value>(o, stream); });
}

// ---- 5: rows kept in registers: the kernel of the model
//
// Each thread of a block has a pack of columns from the start, and keeps it in registers for two rows at a time: 4
// elements per channel, two thirds of the bytes. The price: the sums of a row are now sums over a block, not over a
// warp. So there is a barrier for every two rows instead of one for 32, with six loads of a thread in flight before
// each.

template <class T>
void kept_rows(LayerNormBackward<T>& o, cudaStream_t stream) {
  layernorm_backward<T>(o.dx, o.dweight, o.dbias, o.dout, o.x, o.weight, o.mean, o.rstd, o.rows, o.channels, false,
                        o.workspace, stream);
}

template <class T>
std::vector<Rung<LayerNormBackward<T>>> LayerNormBackward<T>::rungs() {
  return {
      {"thread_per_row", "the formulas as they stand: a sector and two atomics per element", thread_per_row<T>},
      {"warp_per_row", "32 threads side by side along the row: full sectors, the same atomics", warp_per_row<T>},
      {"owned_rows", "a block sums the columns of 32 rows in registers: no atomics, the same bits", owned_rows<T>},
      {"packs", "16 bytes per load: an eighth of the instructions", packs<T>},
      {"kept_rows", "kernels/layernorm.cuh: two rows at a time stay in registers: each is read once", kept_rows<T>},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<LayerNormBackward>(count, arguments); }
