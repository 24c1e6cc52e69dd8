// Tiles of 16-bit numbers in shared memory, and products of tiles on tensor cores.
//
// A tile has rows of HS elements: the channels of one attention head, with zeros after the end of the head or of the
// sequence. HS is a multiple of 64. A row is cut into chunks of 8 elements (16 bytes). A thread copies one chunk at a
// time, and ldmatrix reads one chunk of each of 8 rows at a time. If chunk c of every row lay at place c, these 8
// chunks would be one row's length apart, in the same banks. It lies at place c xor (row mod 8) instead, so that chunk
// c of 8 neighbouring rows covers all 32 banks once. Tiles start at multiples of 128 bytes.
//
// A warp's accumulator `float x[M][N][4]` is a matrix of 16M × 8N, spread over the lanes as multiply_m16n8k16 leaves it
// (kernels/device/instructions.cuh): a lane has 2 columns of each 8, in rows lane/4 and lane/4 + 8 of each 16. So four
// lanes share a row; they are called a *quad*. Statistics of rows are kept as x[M][2]. Two 16×8 accumulators side by
// side, rounded to T, are a 16×16 left operand, so the result of one product can be multiplied again without leaving
// the registers.
#pragma once

#include "kernels/device/common.cuh"
#include "kernels/device/maximum.cuh"

// The index of element (row, 8·chunk) in a tile.
template <int HS>
__host__ __device__ constexpr int swizzled(int row, int chunk) {
  static_assert(HS % 64 == 0);
  return row * HS + (chunk ^ row % 8) * 8;
}

// The rows of one head in a tensor.
template <class T>
struct HeadRows {
  T* first;
  int stride;  // elements from row to row
  int count, head_size;
  __device__ T* operator[](int row) const { return first + int64_t(row) * stride; }
};

// A block of `threads` threads starts to copy rows [first, first + rows) to a tile.
template <int HS, int rows, int threads, class T>
__device__ inline void copy_tile(T* tile, const HeadRows<const T>& from, int first) {
  constexpr int chunks = HS / 8, step = threads / chunks;
  static_assert(rows % step == 0);
  const int row = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
  const T* source = from[first + row] + 8 * chunk;
  const bool inside_head = 8 * chunk < from.head_size;
#pragma unroll
  for (int r = 0; r < rows; r += step) {
    const bool inside = inside_head && first + row + r < from.count;
    copy_async<16>(tile + swizzled<HS>(row + r, chunk), source, inside);
    source += int64_t(step) * from.stride;
  }
}

// The address that this lane gives to load_matrices for the 16×16 elements at (row, column), both multiples of 16: the
// address of chunk lane_chunk in row lane_row of them. `row` is added after the xor, so that it becomes a constant
// offset in the instruction.
template <int HS, class T>
__device__ inline SharedAddress lane_address(const T* tile, int row, int column, int lane_row, int lane_chunk) {
  const SharedAddress corner = shared_address(tile + swizzled<HS>(lane_row, lane_chunk));
  return (corner ^ column % 64 * sizeof(T)) + (row * HS + column / 64 * 64) * sizeof(T);
}

// Loads this lane's part of the 16×16 elements at (row, column), as a left operand.
template <int HS, class T>
__device__ inline void load_left(uint32_t (&a)[4], const T* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrices(a, lane_address<HS>(tile, row, column, lane % 16, lane / 16));
}

// Loads the transpose of these elements, as right operands of two products: b[0], b[1] hold rows 0..7 of the elements,
// b[2], b[3] rows 8..15.
template <int HS, class T>
__device__ inline void load_right_transposed(uint32_t (&b)[4], const T* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrices(b, lane_address<HS>(tile, row, column, lane % 8 + lane / 16 * 8, lane / 8 % 2));
}

// Loads these elements without transposing them, as right operands of two products: b[0], b[1] hold columns 0..7, b[2],
// b[3] columns 8..15.
template <int HS, class T>
__device__ inline void load_right(uint32_t (&b)[4], const T* tile, int row, int column) {
  const int lane = threadIdx.x % 32;
  load_matrices_transposed(b, lane_address<HS>(tile, row, column, lane % 16, lane / 16));
}

// sum (16M × 8N) += (rows first..first+16M of `own`) · (rows 0..8N of `tile`)ᵀ
template <int HS, int M, int N, class T>
__device__ inline void multiply_transposed(float (&sum)[M][N][4], const T* own, int first, const T* tile) {
#pragma unroll
  for (int k = 0; k < HS; k += 16) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) load_left<HS>(a[m], own, first + 16 * m, k);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      uint32_t b[4];
      load_right_transposed<HS>(b, tile, 8 * n, k);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_m16n8k16<T>(sum[m][n], a[m], b[0], b[1]);
        multiply_m16n8k16<T>(sum[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// x and y rounded to T: x in the lower half of the result, y in the upper. One instruction.
template <class T>
__device__ inline uint32_t round_pair(float x, float y) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(x, y);
    memcpy(&bits, &pair, sizeof bits);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    memcpy(&bits, &pair, sizeof bits);
  }
  return bits;
}

// x (16 × 8N), rounded to T, as left operands a[k] of columns 16k to 16k + 16.
template <class T, int K, int N>
__device__ inline void round_left(uint32_t (&a)[K][4], const float (&x)[N][4]) {
  static_assert(N == 2 * K);
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&pairs)[4] = x[2 * k + i / 2];
      a[k][i] = round_pair<T>(pairs[i % 2 * 2], pairs[i % 2 * 2 + 1]);
    }
}

// sum (16M × HS) += x (16M × 8N, rounded to T) · (rows 0..8N of the tile)
template <int HS, int M, int N, class T>
__device__ inline void multiply(float (&sum)[M][HS / 8][4], const float (&x)[M][N][4], const T* tile) {
  uint32_t a[M][N / 2][4];
#pragma unroll
  for (int m = 0; m < M; ++m) round_left<T>(a[m], x[m]);
#pragma unroll
  for (int k = 0; k < N / 2; ++k) {
#pragma unroll
    for (int n = 0; n < HS / 8; n += 2) {
      uint32_t b[4];
      load_right<HS>(b, tile, 16 * k, 8 * n);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_m16n8k16<T>(sum[m][n], a[m][k], b[0], b[1]);
        multiply_m16n8k16<T>(sum[m][n + 1], a[m][k], b[2], b[3]);
      }
    }
  }
}

struct Place {
  int row, column;  // of the element in the matrix
  int m, half;      // statistics of its row are at [m][half]
};

// Calls function(place, x, others...) for each element that this lane holds of several matrices of the same shape.
template <class Function, int M, int N, class... Others>
__device__ inline void for_each_element(Function function, float (&x)[M][N][4], Others&... others) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        function(Place{16 * m + lane / 4 + i / 2 * 8, 8 * n + lane % 4 * 2 + i % 2, m, i / 2}, x[m][n][i],
                 others[m][n][i]...);
}

// Calls function(row, m, half) for each row that this lane holds elements of.
template <int M, class Function>
__device__ inline void for_each_row(Function function) {
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) function(16 * m + threadIdx.x % 32 / 4 + 8 * half, m, half);
}

// Sum and maximum over the four lanes that share a row; each lane gets the result.
__device__ inline float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}

__device__ inline float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
}

// Stores factor · row r of x to row first + r of `to`, for rows below its count and columns below head_size. Four lanes
// share a row; each has two columns of every 8. Floats of the four fill a sector of memory, 32 bytes. Elements of 16
// bits do if lanes exchange some: lanes of even number take four columns of 8, their neighbours four of the next 8.
// seen: is shown the stored numbers (kernels/device/maximum.cuh)
template <int HS, int M, class T, class Seen = Unseen>
__device__ inline void store_rows(const HeadRows<T>& to, int first, const float (&x)[M][HS / 8][4], float factor, Seen seen = {}) {
  const int quad_lane = threadIdx.x % 4;
  for_each_row<M>([&](int row, int m, int half) {
    const bool exists = first + row < to.count;
    const auto pair = [&](int n, int i) { return factor * x[m][n][2 * half + i]; };
#pragma unroll
    for (int n = 0; n < HS / 8; n += 2) {
      if (exists) seen.see({pair(n, 0), pair(n, 1), pair(n + 1, 0), pair(n + 1, 1)});
      if constexpr (sizeof(T) == 2) {
        const bool odd = quad_lane % 2;
        const uint32_t here = round_pair<T>(pair(n, 0), pair(n, 1)), next = round_pair<T>(pair(n + 1, 0), pair(n + 1, 1));
        const uint32_t others = __shfl_xor_sync(0xffffffffu, odd ? here : next, 1);
        const int column = 8 * (n + odd);
        const uint2 four = odd ? uint2{others, next} : uint2{here, others};
        if (exists && column < to.head_size)
          *reinterpret_cast<uint2*>(to[first + row] + column + quad_lane / 2 * 4) = four;
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float two[2] = {pair(n + i, 0), pair(n + i, 1)};
          if (exists && 8 * (n + i) < to.head_size) store(to[first + row] + 8 * (n + i) + quad_lane * 2, two);
        }
      }
    }
  });
  seen.raise();
}
