// The ladder of a bias's gradient: dbias = Σ_rows dout, the column sums of a matrix (rows, columns).
//
// Least bytes: dout read once, 1 element each; the result is small. There is one addition per element, so memory alone
// decides. The difficulty is the shape: thousands of rows are added up to one, and the order of additions must not
// depend on timing. Threads that are side by side read neighbouring columns of a row-major matrix, so sectors are full
// from the start. But there are too few threads.
#include "dev/ladders/harness.cuh"
#include "dev/ladders/operation.cuh"
#include "kernels/column_sum.cuh"

namespace {

using namespace ladder;

template <class T>
struct BiasGradient {
  static constexpr const char* name = "bias_gradient";
  static std::vector<Shape> checked_shapes() {
    return {{{"rows", 5}, {"columns", 64}}, {{"rows", 67}, {"columns", 77}}, {{"rows", 130}, {"columns", 32}}};
  }
  static Shape counted_shape() { return {{"rows", 512}, {"columns", 768}}; }
  static Shape timed_shape() { return {{"rows", 65536}, {"columns", 3072}}; }
  static std::vector<Rung<BiasGradient>> rungs();

  explicit BiasGradient(const Shape& shape)
      : rows(at_most(column_sum_rows * most_blocks_along_y, shape, "rows")), columns(shape["columns"]),
        dout(count()), dbias(columns),
        workspace(2 * column_sum_workspace(rows, columns) + 256) {}  // enough for all levels of a tree

  void reset() { dbias.poison(), workspace.poison(); }
  size_t count() const { return size_t(rows) * columns; }
  double elements() const { return double(count()); }
  double bytes() const { return elements() * sizeof(T); }
  double flops() const { return elements(); }

  std::vector<Output> outputs() const {
    const std::vector<double> d = dout.numbers();
    std::vector<double> right(columns);
    for (size_t i = 0; i < d.size(); ++i) right[i % columns] += d[i];
    // Terms of size 1 cancel to √rows. Each addition rounds a sum of at most that size. There are as many additions as
    // rows: the worst case is all their roundings together, the usual case the root of their number.
    return {{"dbias", dbias.numbers(), right, std::sqrt(double(rows)), 3 * std::sqrt(double(rows)) * rounding<float>}};
  }

  int rows, columns;
  RandomBuffer<T> dout;
  Buffer<float> dbias, workspace;
};

// ---- 1: one thread per element
//
// There are many threads, and sectors are full. But each element takes an atomic: 4 bytes besides the 2 that are read
// in bf16. And all rows wait for the same few addresses, at each of which one addition is done after the other. Their
// order depends on timing, and so do the last bits.

template <class T>
__global__ void thread_per_element_kernel(float* dbias, const T* dout, size_t count, int columns) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) atomicAdd(&dbias[i % columns], to_float(dout[i]));
}

template <class T>
void thread_per_element(BiasGradient<T>& o, cudaStream_t stream) {
  CUDA_CHECK(cudaMemsetAsync(o.dbias.data(), 0, o.columns * sizeof(float), stream));
  thread_per_element_kernel<T>
      <<<blocks_for(o.count(), 256), 256, 0, stream>>>(o.dbias.data(), o.dout.data(), o.count(), o.columns);
}

// ---- 2: one thread per column
//
// The thread adds up its column in a register: no atomics, one order, the same bits every time, and the least bytes.
// But there are only as many threads as columns: 3,072 are two warps on each of 48 multiprocessors, with a few loads of
// 2 bytes under way in each thread. The counts are perfect, but the time is not: to keep the memory busy, each
// multiprocessor must have asked for thousands of bytes at any time.

template <class T>
__global__ void thread_per_column_kernel(float* dbias, const T* dout, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= columns) return;
  float sum = 0;
  for (int row = 0; row < rows; ++row) sum += to_float(dout[size_t(row) * columns + column]);
  dbias[column] = sum;
}

template <class T>
void thread_per_column(BiasGradient<T>& o, cudaStream_t stream) {
  thread_per_column_kernel<T>
      <<<ceil_div(o.columns, 64), 64, 0, stream>>>(o.dbias.data(), o.dout.data(), o.rows, o.columns);
}

// ---- 3: a tree
//
// A thread adds 64 rows of a column. Its sum is an element of a matrix with a 64th of the rows, which is added up in
// the same way. There is one thread per 64 elements, enough to fill a GPU. A 64th of the elements is written as float
// and read again, 4·2/64 bytes per element, 6 % of bf16's 2. The tree depends on the shape alone, so the bits stay the
// same.

template <class T>
__global__ void sums_of_rows_kernel(float* sums, const T* dout, int rows, int columns) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x, group = blockIdx.y;
  if (column >= columns) return;
  float sum = 0;
  for (int row = group * column_sum_rows; row < min(rows, (group + 1) * column_sum_rows); ++row)
    sum += to_float(dout[size_t(row) * columns + column]);
  sums[size_t(group) * columns + column] = sum;
}

template <class T, class U>
void tree_level(BiasGradient<T>& o, const U* input, int rows, float* sums, cudaStream_t stream) {
  const int groups = ceil_div(rows, column_sum_rows);
  const dim3 grid(ceil_div(o.columns, 64), groups);
  sums_of_rows_kernel<U><<<grid, 64, 0, stream>>>(groups == 1 ? o.dbias.data() : sums, input, rows, o.columns);
  float* next = sums + round_up(size_t(groups) * o.columns, size_t(64));
  if (groups > 1) tree_level<T, float>(o, sums, groups, next, stream);
}

template <class T>
void tree(BiasGradient<T>& o, cudaStream_t stream) {
  tree_level<T, T>(o, o.dout.data(), o.rows, o.workspace.data(), stream);
}

// ---- 4: packs of 16 bytes, two levels: the kernel of the model
//
// Each thread has 8 columns of bf16: an eighth of the loads, and each load has eight times as many bytes under way.
// Four rows are loaded before the first is added, so a thread waits once for four. The upper levels of the tree had few
// threads, each of which waited for one load after the other. Now a block adds all partial sums of a few columns, 64
// threads to a column: there is one such level, however many rows there are.

template <class T>
void two_levels(BiasGradient<T>& o, cudaStream_t stream) {
  column_sum<T>(o.dbias, o.dout, o.rows, o.columns, false, o.workspace, stream);
}

template <class T>
std::vector<Rung<BiasGradient<T>>> BiasGradient<T>::rungs() {
  return {
      {"thread_per_element", "one atomic per element: rows queue for the same few addresses", thread_per_element<T>},
      {"thread_per_column", "sums in registers: no atomics, the same bits; too few threads", thread_per_column<T>},
      {"tree", "64 rows per thread, then 64 sums per thread: enough threads, for 1/16 more bytes", tree<T>},
      {"two_levels", "kernels/column_sum.cuh: 16 bytes per load, four at once; a block adds a column's sums", two_levels<T>},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<BiasGradient>(count, arguments); }
