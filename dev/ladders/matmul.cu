// The ladder of the matrix product: C (m,n) = A (m,k) · B (k,n), all row-major, in T with sums in float.
//
// Least bytes: A and B read once, C written once, (m·k + k·n + m·n) elements; FLOPs 2·m·n·k. gpt2's products of 65,536
// tokens do 380 to 610 FLOPs for each of these bytes, and an H100 does 295 in the time that a byte takes (989 TFLOP/s,
// 3.35 TB/s): there is time to move each byte once, but not once for every FLOP. So each rung is about how often an
// element is brought closer (from memory and caches to shared memory, from there to registers), and how often it is
// used when it is there.
//
// The numbers that the comments use: a warp asks for sectors of 32 bytes. An SM of Hopper does, in a cycle, 128 FMAs of
// float, or 2,048 of bf16 on tensor cores; it serves one *wavefront* (128 bytes) of shared memory, and gets up to 30
// bytes from the L2 cache (7 TB/s, the most that microbenchmarks see). Numbers are for bf16, unless they say fp32.
//
// gpt2's products have (n, k) = (2304, 768), (768, 768), (3072, 768), (768, 3072), gpt2-xl's (4800, 1600), (1600,
// 1600), (6400, 1600), (1600, 6400): ladder_matmul --shape n=2304,k=768. Blocks that run together share rows of A, and
// B stays in the L2 cache, which is right for these; the head's B (n = 50,304) does not fit there.
#include <numeric>

#include "dev/ladders/device.cuh"
#include "dev/ladders/harness.cuh"
#include "dev/ladders/matmul_wgmma.cuh"
#include "dev/ladders/operation.cuh"
#include "kernels/linear.cuh"
#include "kernels/device/tensor_tiles.cuh"
#include "test/bounds.h"

namespace {

using namespace ladder;

template <class T>
struct Matmul {
  static constexpr const char* name = "matmul";
  static std::vector<Shape> checked_shapes() {
    return {{{"m", 1}, {"n", 8}, {"k", 8}},
            {{"m", large_shapes ? 33 : 3}, {"n", 45}, {"k", 77}},
            {{"m", large_shapes ? 130 : 20}, {"n", large_shapes ? 264 : 40}, {"k", 264}}};
  }
  static Shape counted_shape() { return {{"m", 256}, {"n", 256}, {"k", 256}}; }
  static Shape timed_shape() { return {{"m", 65536}, {"n", 3072}, {"k", 768}}; }
  static std::vector<Rung<Matmul>> rungs();

  explicit Matmul(const Shape& shape)
      : m(at_most(32 * most_blocks_along_y, shape, "m")), n(at_most(32 * most_blocks_along_y, shape, "n")),
        k(at_most(1 << 30, shape, "k")), a(size_t(m) * k, 1, 0, 1), b(size_t(k) * n, 1, 0, 2),
        c(size_t(m) * n) {}

  void reset() { c.poison(); }
  double elements() const { return double(m) * n; }
  double bytes() const { return product_counts(m, n, k, sizeof(T), sizeof(T)).bytes; }
  double flops() const { return product_counts(m, n, k, sizeof(T), sizeof(T)).flops; }

  std::vector<Output> outputs() const {
    const std::vector<T> out = c.get();
    std::vector<double> actual;
    for (size_t i = 0; i < out.size(); i += sample_step()) actual.push_back(to_float(out[i]));
    if (expected.empty()) expected = samples();
    const double sums = tensor_core_sum_error(k) * std::sqrt(double(k));  // of size √k
    return {{"c", actual, expected, sums / rounding<T>, rounding<T>}};
  }

  int m, n, k;
  RandomBuffer<T> a, b;
  Buffer<T> c;

 private:
  // The elements that are checked: up to 65,536, fewer where k is large, evenly spread over rows and columns.
  size_t sample_step() const {
    const size_t most = std::clamp((1 << 26) / k, 1024, 65536);
    size_t step = size_t(m) * n / most + 1;
    while (std::gcd(step, size_t(n)) > 1) ++step;
    return step;
  }

  std::vector<double> samples() const {
    const std::vector<T> left = a.get(), right = b.get();
    std::vector<double> sums;
    for (size_t i = 0; i < size_t(m) * n; i += sample_step()) {
      const T *row = &left[i / n * k], *column = &right[i % n];
      double sum = 0;
      for (int j = 0; j < k; ++j) sum += double(to_float(row[j])) * double(to_float(column[size_t(j) * n]));
      sums.push_back(sum);
    }
    return sums;
  }

  mutable std::vector<double> expected;  // samples(), once a rung is checked
};

// Rows of B and C, and of A, can be cut into 16 bytes.
template <class T>
constexpr int chunk = 16 / int(sizeof(T));

template <class T>
bool has_chunks(const Matmul<T>& o) {
  return o.n % chunk<T> == 0 && o.k % chunk<T> == 0;
}

// ---- 1: one thread per output
//
// The obvious way: a thread has a row of A and a column of B, and the x of CUDA's indices is the row. So a warp has 32
// rows and one column: for each of k it asks for 32 elements of A that are rows apart, each in a sector of its own, and
// for one of B. That is 33 sectors for 32 FMAs, of which a tenth is used, and 32 more sectors for its outputs.

template <class T>
__device__ float row_times_column(const T* row, const T* column, int n, int k) {
  float sum = 0;
  for (int i = 0; i < k; ++i) sum += to_float(row[i]) * to_float(column[size_t(i) * n]);
  return sum;
}

template <class T>
__global__ void naive_kernel(T* c, const T* a, const T* b, int m, int n, int k) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x, column = blockIdx.y * blockDim.y + threadIdx.y;
  if (row < m && column < n)
    c[size_t(row) * n + column] = from_float<T>(row_times_column(a + size_t(row) * k, b + column, n, k));
}

template <class T>
void naive(Matmul<T>& o, cudaStream_t stream) {
  const dim3 grid(ceil_div(o.m, 32), ceil_div(o.n, 32)), block(32, 32);
  naive_kernel<T><<<grid, block, 0, stream>>>(o.c.data(), o.a.data(), o.b.data(), o.m, o.n, o.k);
}

// ---- 2: a warp along the columns
//
// Memory is read in sectors, and 32 of the 33 were read for one element. With x for the column, a warp has one row and
// 32 columns: its element of A is the same for all threads, one sector, and its elements of B are side by side, two
// sectors (fp32: four). That is 3 sectors for 32 FMAs, an eleventh, and C's sectors are written whole.

template <class T>
__global__ void coalesced_kernel(T* c, const T* a, const T* b, int m, int n, int k) {
  const int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < m && column < n)
    c[size_t(row) * n + column] = from_float<T>(row_times_column(a + size_t(row) * k, b + column, n, k));
}

template <class T>
void coalesced(Matmul<T>& o, cudaStream_t stream) {
  const dim3 grid(ceil_div(o.n, 32), ceil_div(o.m, 32)), block(32, 32);
  coalesced_kernel<T><<<grid, block, 0, stream>>>(o.c.data(), o.a.data(), o.b.data(), o.m, o.n, o.k);
}

// ---- 3: tiles in shared memory
//
// In rung 2 every warp of a block reads its row and its columns for itself. Now the 1,024 threads of the block bring
// 32×32 elements of A and of B into shared memory, one of each per thread, and each element is used 32 times: for 32 of
// k 128 sectors per block instead of 3,072, a 24th. The price: two barriers.

template <class T>
__global__ void shared_tiles_kernel(T* c, const T* a, const T* b, int m, int n, int k) {
  __shared__ float a_tile[32][32], b_tile[32][32];
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * 32 + y, column = blockIdx.x * 32 + x;
  float sum = 0;
  for (int first = 0; first < k; first += 32) {
    a_tile[y][x] = row < m && first + x < k ? to_float(a[size_t(row) * k + first + x]) : 0.0f;
    b_tile[y][x] = first + y < k && column < n ? to_float(b[size_t(first + y) * n + column]) : 0.0f;
    __syncthreads();
    for (int i = 0; i < 32; ++i) sum += a_tile[y][i] * b_tile[i][x];
    __syncthreads();
  }
  if (row < m && column < n) c[size_t(row) * n + column] = from_float<T>(sum);
}

template <class T>
void shared_tiles(Matmul<T>& o, cudaStream_t stream) {
  const dim3 grid(ceil_div(o.n, 32), ceil_div(o.m, 32)), block(32, 32);
  shared_tiles_kernel<T><<<grid, block, 0, stream>>>(o.c.data(), o.a.data(), o.b.data(), o.m, o.n, o.k);
}

// ---- 4: tiles in registers
//
// In rung 3 the 32 FMAs of a warp take two wavefronts of shared memory, and in that time the SM could do 256. Here a
// thread has 8×8 outputs, and uses each loaded element 8 times; all loads are of 16 bytes. For 8 of k it loads 8 times
// from A, 8 times from B and does 512 FMAs. Such a load takes a warp 4 wavefronts, one for each quarter of the warp,
// even where all quarters ask for the same: an eighth of a wavefront for 32 FMAs, a sixteenth of before (fp32: a
// quarter, an eighth). And a block's tile of 128×128 reads a quarter of the sectors that tiles of 32×32 read.

constexpr int fma_threads = 256, fma_side = 128;
template <class T>
constexpr int fma_depth = 128 / int(sizeof(T));

// Rows of A are 16 bytes longer than needed, so that neighbouring rows start in different banks.
template <class T>
struct alignas(16) FmaTiles {
  T a[fma_side][fma_depth<T> + chunk<T>], b[fma_depth<T>][fma_side];
};

// The source of copies: a matrix (rows, columns) from element (row, column) on.
template <class T>
struct Corner {
  const T* first;
  int rows, columns, row, column;
};

// The block calls copy(to, from, inside) for each 16 bytes of the first `width` columns of a tile.
template <int width, class T, int rows, int stride, class Copy>
__device__ inline void copy_chunks(T (&tile)[rows][stride], const Corner<T>& from, Copy copy) {
  constexpr int chunks = width / chunk<T>, step = fma_threads / chunks;
  const int y = threadIdx.x / chunks, x = threadIdx.x % chunks * chunk<T>;
  const bool inside_columns = from.column + x < from.columns;
  const T* source = from.first + size_t(from.row + y) * from.columns + from.column + x;
#pragma unroll
  for (int i = 0; i < rows; i += step) {
    copy(&tile[y + i][x], source, inside_columns && from.row + y + i < from.rows);
    source += size_t(step) * from.columns;
  }
}

template <class T, class Copy>
__device__ inline void copy_fma_tiles(FmaTiles<T>& tiles, const Corner<T>& a, const Corner<T>& b, Copy copy) {
  copy_chunks<fma_depth<T>>(tiles.a, a, copy);
  copy_chunks<fma_side>(tiles.b, b, copy);
}

// The thread's 8×8 outputs: sum[i][p][j] is in row `row` + 16i and column `column` + 16·chunk·p + j of the tile. A warp
// is 4×8 threads: it reads 4 neighbouring rows of A and 8 neighbouring chunks of B at once.
template <class T>
using FmaSums = float[8][8 / chunk<T>][chunk<T>];
struct FmaPlace {
  int row, column;
};
template <class T>
__device__ inline FmaPlace fma_place() {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  return {warp / 2 * 4 + lane / 8, (warp % 2 * 8 + lane % 8) * chunk<T>};
}

template <class T>
__device__ inline void multiply_tiles(FmaSums<T>& sum, const FmaTiles<T>& tiles, const FmaPlace& at) {
#pragma unroll 1
  for (int first = 0; first < fma_depth<T>; first += chunk<T>) {
    Pack<T, chunk<T>> a[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = *reinterpret_cast<const Pack<T, chunk<T>>*>(&tiles.a[at.row + 16 * i][first]);
#pragma unroll
    for (int k = 0; k < chunk<T>; ++k)
#pragma unroll
      for (int p = 0; p < 8 / chunk<T>; ++p) {
        float b[chunk<T>];
        load(&tiles.b[first + k][at.column + 16 * chunk<T> * p], b);
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
          for (int j = 0; j < chunk<T>; ++j) sum[i][p][j] += to_float(a[i].values[k]) * b[j];
      }
  }
}

template <class T>
__device__ inline void store_sums(T* c, int m, int n, const FmaSums<T>& sum, const FmaPlace& at) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int p = 0; p < 8 / chunk<T>; ++p) {
      const int row = blockIdx.y * fma_side + at.row + 16 * i;
      const int column = blockIdx.x * fma_side + at.column + 16 * chunk<T> * p;
      if (row < m && column < n) store(c + size_t(row) * n + column, sum[i][p]);
    }
}

template <class T>
__global__ void __launch_bounds__(fma_threads, 2)
register_tiles_kernel(T* c, const T* a, const T* b, int m, int n, int k) {
  __shared__ FmaTiles<T> tiles;
  const FmaPlace at = fma_place<T>();
  const int row = blockIdx.y * fma_side, column = blockIdx.x * fma_side;
  FmaSums<T> sum = {};
  const auto copy = [](T* to, const T* from, bool inside) {
    *reinterpret_cast<uint4*>(to) = inside ? *reinterpret_cast<const uint4*>(from) : uint4{};
  };
  for (int first = 0; first < k; first += fma_depth<T>) {
    copy_fma_tiles(tiles, Corner<T>{a, m, k, row, first}, Corner<T>{b, k, n, first, column}, copy);
    __syncthreads();
    multiply_tiles(sum, tiles, at);
    __syncthreads();
  }
  store_sums(c, m, n, sum, at);
}

template <class T>
dim3 fma_grid(const Matmul<T>& o) {
  return dim3(ceil_div(o.n, fma_side), ceil_div(o.m, fma_side));
}

template <class T>
void register_tiles(Matmul<T>& o, cudaStream_t stream) {
  register_tiles_kernel<T><<<fma_grid(o), fma_threads, 0, stream>>>(o.c.data(), o.a.data(), o.b.data(), o.m, o.n, o.k);
}

// ---- 5: two tiles in turn
//
// In rung 4 the block waits for memory at each tile, some 600 cycles, and has two barriers. Now there are two tiles:
// while one is used, cp.async fills the other, without going through registers. There is one barrier per tile; bytes
// and wavefronts are the same. The FMAs of a tile take 8,192 cycles (fp32: 4,096), so at most a tenth of the time can
// be gained, and the other block on the SM already hid some of it. The next rung needs it more.

template <class T>
__global__ void __launch_bounds__(fma_threads, 2)
double_buffer_kernel(T* c, const T* a, const T* b, int m, int n, int k) {
  extern __shared__ __align__(128) char memory[];
  FmaTiles<T>* tiles = reinterpret_cast<FmaTiles<T>*>(memory);  // (2)
  const FmaPlace at = fma_place<T>();
  const int row = blockIdx.y * fma_side, column = blockIdx.x * fma_side;
  FmaSums<T> sum = {};
  const auto start_copies = [&](int first) {
    copy_fma_tiles(tiles[first / fma_depth<T> % 2], Corner<T>{a, m, k, row, first}, Corner<T>{b, k, n, first, column},
                   copy_async<16>);
  };
  start_copies(0);
  for (int first = 0; first < k; first += fma_depth<T>) {
    wait_for_copies();
    __syncthreads();  // all threads see this tile, and all have used the last one
    if (first + fma_depth<T> < k) start_copies(first + fma_depth<T>);
    multiply_tiles(sum, tiles[first / fma_depth<T> % 2], at);
  }
  store_sums(c, m, n, sum, at);
}

template <class T>
constexpr int double_buffer_bytes = 2 * sizeof(FmaTiles<T>);

template <class T>
bool suits_double_buffer(const Matmul<T>& o) {
  return has_chunks(o) && fits_shared_memory(double_buffer_bytes<T>);
}

template <class T>
void double_buffer(Matmul<T>& o, cudaStream_t stream) {
  constexpr int bytes = double_buffer_bytes<T>;
  allow_shared_memory(double_buffer_kernel<T>, bytes);
  double_buffer_kernel<T>
      <<<fma_grid(o), fma_threads, bytes, stream>>>(o.c.data(), o.a.data(), o.b.data(), o.m, o.n, o.k);
}

// ---- 6: tensor cores
//
// Until now an instruction did 32 FMAs; mma.m16n8k16 does 2,048, one in 1.6 cycles of an SM. That is 62 % of the rate
// of tensor cores with wgmma, but ten times the FMAs of before. Now everything else must become faster, too. A warp has
// 64×64 outputs, so that 16 of k take 32 mma, 51 cycles, and 8 ldmatrix, 32 wavefronts: a 64th of a wavefront for 32
// FMAs, an eighth of before, without bank conflicts, because tiles are swizzled (kernels/device/tensor_tiles.cuh).
// Counted, with the wavefronts that write the tiles, 172 for 1,000 outputs instead of 1,060: a sixth. A block's tile of
// 128×128 would take 40 bytes per cycle from L2, 128×256 takes 30.
//
// ---- 7: three tiles in turn
//
// The mma of a tile now take 1,640 cycles. The next tile, 48 KB, takes about as long from the L2 cache, and its first
// bytes come 600 cycles after they are asked for: with one tile on the way, tensor cores wait for a quarter of the
// time. cp.async's groups let two tiles be on the way while a third is used, 3,280 cycles for each. The kernel is the
// same, and so are the numbers of bytes, wavefronts and barriers.
//
// ---- 8: whole sectors
//
// After mma a lane (a thread of the warp) has pairs of neighbouring elements of C, 4 bytes. So one store of a warp
// wrote 16 bytes in each of 8 rows, half a sector, and the next instruction the other half. If C goes through shared
// memory, which is free by then, a lane gets 16 bytes: whole sectors, half as many, in a quarter of the instructions.
// For gpt2's up projection C is four fifths of all bytes.
//
// A block's first copies and its stores still overlap with nothing, some 3,500 cycles of 23,000 at k = 768. So expect
// half of 989 TFLOP/s, two thirds of the 790 that dev/roofline.md assumes for cuBLASLt with wgmma. None of it is measured
// yet. The instructions of Ampere allow no more; the next rung uses Hopper's.

constexpr int mma_threads = 256, mma_rows = 128, mma_columns = 256, mma_depth = 64;

template <class T>
struct alignas(128) MmaTiles {
  T a[mma_rows * mma_depth], b[mma_depth * mma_columns];
};

// For the tiles of kernels/device/tensor_tiles.cuh, a matrix from some column on is like a head in a packed tensor.
template <class T>
__device__ inline HeadRows<T> columns_from(int column, T* matrix, int rows, int columns) {
  return {matrix + column, columns, rows, columns - column};
}

// sum (64×64) of a warp += its 64 rows of A's tile, from `row` on, times its 64 columns of B's tile.
template <class T>
__device__ inline void multiply_tiles(float (&sum)[4][8][4], const MmaTiles<T>& tiles, int row, int column) {
#pragma unroll
  for (int k = 0; k < mma_depth; k += 16) {
    uint32_t a[4][4];
#pragma unroll
    for (int m = 0; m < 4; ++m) load_left<mma_depth>(a[m], tiles.a, row + 16 * m, k);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      load_right<mma_columns>(b, tiles.b, k, column + 8 * n);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        multiply_m16n8k16<T>(sum[m][n], a[m], b[0], b[1]);
        multiply_m16n8k16<T>(sum[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Rows `first` and following of `to` = sum (64×64), by way of this warp's `tile` in shared memory.
template <class T>
__device__ inline void store_whole_sectors(const HeadRows<T>& to, int first, const float (&sum)[4][8][4], T* tile) {
  const int lane = threadIdx.x % 32;
  for_each_row<4>([&](int row, int m, int half) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float pair[2] = {sum[m][n][2 * half], sum[m][n][2 * half + 1]};
      store(tile + swizzled<64>(row, n) + lane % 4 * 2, pair);
    }
  });
  __syncwarp();
  const int chunk = lane % 8;
#pragma unroll
  for (int row = lane / 8; row < 64; row += 4)
    if (first + row < to.count && 8 * chunk < to.head_size)
      *reinterpret_cast<uint4*>(to[first + row] + 8 * chunk) =
          *reinterpret_cast<const uint4*>(tile + swizzled<64>(row, chunk));
}

template <class T, int stages, bool whole_sectors>
__global__ void __launch_bounds__(mma_threads, 1)
tensor_cores_kernel(T* c, const T* a, const T* b, int m, int n, int k) {
  extern __shared__ __align__(128) char memory[];
  MmaTiles<T>* tiles = reinterpret_cast<MmaTiles<T>*>(memory);  // (stages)
  const int row = blockIdx.y * mma_rows, column = blockIdx.x * mma_columns;
  const int warp = threadIdx.x / 32, warp_row = warp / 4 * 64, warp_column = warp % 4 * 64;
  const auto start_copies = [&](int step) {
    const int first = step * mma_depth;
    if (first < k) {
      MmaTiles<T>& to = tiles[step % stages];
      copy_tile<mma_depth, mma_rows, mma_threads>(to.a, columns_from(first, a, m, k), row);
      copy_tile<mma_columns, mma_depth, mma_threads>(to.b, columns_from(column, b, k, n), first);
    }
    commit_copies();  // without copies, too: the wait below counts groups
  };
  float sum[4][8][4] = {};
  for (int step = 0; step < stages - 1; ++step) start_copies(step);
  for (int step = 0; step * mma_depth < k; ++step) {
    wait_for_copies<stages - 2>();
    __syncthreads();  // all threads see this step's tiles, and all have used the last step's
    start_copies(step + stages - 1);
    multiply_tiles(sum, tiles[step % stages], warp_row, warp_column);
  }
  const HeadRows<T> out = columns_from(column + warp_column, c, m, n);
  if constexpr (whole_sectors) {
    __syncthreads();  // all have used the tiles
    store_whole_sectors(out, row + warp_row, sum, reinterpret_cast<T*>(memory) + warp * 64 * 64);
  } else {
    store_rows<64>(out, row + warp_row, sum, 1.0f);
  }
}

template <class T, int stages>
constexpr int stage_bytes = stages * sizeof(MmaTiles<T>);  // 96 KB for two, 144 KB for three

template <class T, int stages>
bool suits_tensor_cores(const Matmul<T>& o) {
  return sizeof(T) == 2 && has_chunks(o) && fits_shared_memory(stage_bytes<T, stages>);
}

template <class T, int stages, bool whole_sectors>
void tensor_cores(Matmul<T>& o, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    constexpr int bytes = stage_bytes<T, stages>;
    const dim3 grid(ceil_div(o.n, mma_columns), ceil_div(o.m, mma_rows));
    allow_shared_memory(tensor_cores_kernel<T, stages, whole_sectors>, bytes);
    tensor_cores_kernel<T, stages, whole_sectors>
        <<<grid, mma_threads, bytes, stream>>>(o.c.data(), o.a.data(), o.b.data(), o.m, o.n, o.k);
  }
}

// ---- 9: Hopper's copy engine and asynchronous products: dev/ladders/matmul_wgmma.cuh
// ---- 10: two blocks share B's tile: in the same file
// ---- 11: a tile for each half of a block, so that one multiplies while the other stores: in the same file

template <class T>
bool suits_wgmma(const Matmul<T>& o) {
  return sizeof(T) == 2 && has_chunks(o) && has_wgmma();
}

template <class Way, class T>
void wgmma(Matmul<T>& o, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) matmul_wgmma<Way, T>(o.c, o.a, o.b, o.m, o.n, o.k, stream);
}

// ---- the library: cuBLASLt on a GPU, oneDNN on the CPU device

template <class T>
void library(Matmul<T>& o, cudaStream_t stream) {
  gemm_choices().times = true;
  linear_forward<T>(o.c, o.a, o.b, nullptr, o.m, o.k, o.n, stream);
}

template <class T>
std::vector<Rung<Matmul<T>>> Matmul<T>::rungs() {
  return {
      {"naive", "one thread per output; a warp has 32 rows of A: 33 sectors for 32 FMAs", naive<T>},
      {"coalesced", "a warp has 32 neighbouring columns of B: 3 sectors", coalesced<T>},
      {"shared_tiles", "the 32×32 outputs of a block share what they read: 23 times fewer sectors", shared_tiles<T>},
      {"register_tiles", "8×8 outputs per thread, 16 bytes per load: 16 times fewer wavefronts of shared memory",
       register_tiles<T>, has_chunks<T>},
      {"double_buffer", "cp.async brings the next tile while this one is used; half the barriers", double_buffer<T>,
       suits_double_buffer<T>},
      {"tensor_cores", "mma: 2,048 FMAs per instruction; ldmatrix from swizzled tiles", tensor_cores<T, 2, false>,
       suits_tensor_cores<T, 2>},
      {"pipeline", "the same kernel with two tiles on the way", tensor_cores<T, 3, false>, suits_tensor_cores<T, 3>},
      {"whole_sectors", "C goes through shared memory, from where a thread stores 16 bytes", tensor_cores<T, 3, true>,
       suits_tensor_cores<T, 3>},
      {"wgmma", "Hopper's tensor cores read shared memory by themselves, and its copy engine fills it",
       wgmma<wgmma_rung::SharedTile, T>, suits_wgmma<T>},
      {"cluster", "two blocks, one above the other, load B once for both: 32 bytes per cycle instead of 48",
       wgmma<wgmma_rung::SharedByTwo, T>, suits_wgmma<T>},
      {"ping_pong", "two warpgroups with a tile each: one multiplies while the other stores",
       wgmma<wgmma_rung::TileEach, T>, suits_wgmma<T>},
      {"library", "kernels/matmul.cuh: cuBLASLt (on the CPU device oneDNN)", library<T>, nullptr, true},
  };
}

}  // namespace

int main(int count, char** arguments) { return ladder::run<Matmul>(count, arguments); }
