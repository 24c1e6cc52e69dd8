// The last rungs of the matmul ladder: C (M,N) = A (M,K) · B (K,N), row-major, in bf16 or fp16 with sums in float, by
// Hopper's copy engine and tensor cores (extensions/hopper/kernels/hopper.cuh). These do all the work; threads only start it. M is
// any size. N and K are multiples of 8, because the copy engine needs rows that are multiples of 16 bytes.
//
// Its limits. The tensor cores of an SM do 4,096 FLOPs per cycle (132 SMs at 1.83 GHz: 989 TFLOP/s). One step, 64 of K,
// of a tile of C, 128 × 256, is
//
//   2 · 128·256·64 FLOPs / 4,096              1,024 cycles of the tensor cores
//   (128·64 + 64·256) · 2 bytes = 48 KB       48 bytes a cycle from L2, if the tensor cores never wait
//
// The second is the stricter limit: for H100's L2, 5.5 to 7 TB/s are reported, 24 to 31 bytes per cycle for each SM,
// with which the tensor cores would work half to two thirds of the time. So the tile is as large as it can be: its
// 128·256 sums take half of the registers. L2 reads each byte from device memory once for all tiles that are computed at
// the same time, if these lie together: 16 tiles down and 8 across, 2,048 × 2,048 of C, are 2·2,048·2,048·K FLOPs and
// (2,048 + 2,048)·K·2 bytes. That is 1,024 FLOPs per byte, where 300 would be enough. Besides, the tensor cores must wait
// for nothing else: copies run up to 4 steps ahead, also into the next tile; the products of a step start before the
// products of the step before are done; and the copy engine writes the results to C.
//
// The roles. A block of 3 warpgroups works on one tile after another:
//
//   warpgroup 0     the producer: one thread starts the copies of each step, into the next stage of a ring
//   warpgroups 1, 2 the consumers: they multiply
//
//   producer   waits for empty[s], starts the copies that bring stage s to full[s]
//   consumers  wait for full[s], start the products of stage s, wait for the stage before it and arrive at its empty
//
// The sums of a consumer are 128 registers of each thread, so the threads of the producer give it some of theirs.
//
// Three ways to divide the work are three rungs. Two divide it between the consumers:
//
//   SharedTile  each multiplies 64 rows of A's tile with the whole tile of B, 4 products per step. While both round
//               their sums and store them, the tensor cores wait.
//   TileEach    each has every second tile of the block (CUTLASS: "ping-pong"). In the ring, the steps of one tile
//               follow the steps of the other, so one consumer multiplies while the other stores. It begins a tile when
//               the other has started the last products of the tile before: until then, full[s] may still be in the
//               round before, and a wait for its parity would be over too early.
//
// TileEach pays with bytes. A tile is 128 × 128, as its consumer has no more registers for sums; its step, 512 cycles
// of the tensor cores, takes 32 KB from L2: 64 bytes per cycle instead of 48. Shared memory gives and takes 128 bytes
// per cycle. Of these the copies write 64 instead of 48, and the products, which read 64 × 16 of A and 16 × N of B in
// N/2 cycles, read 96 instead of 80: 160 together, instead of 128. So its products run at four fifths of the peak at
// best. It saves the time of the stores, which is the same for any K: expect it to win for small K, if at all.
//
// The third saves bytes:
//
//   SharedByTwo  as SharedTile, in a cluster of two blocks whose tiles lie above one another, so that they need the same
//                tile of B: each block loads half of it, for both.
//
// For a step, a block now takes 128·64 + 64·128 elements from L2, 32 KB: 32 bytes a cycle instead of 48, about the rate
// of L2. Shared memory gets as much as before. The price: a stage is empty only when the consumers of both blocks are
// done with it, so the blocks wait for each other; and if the rows of tiles are odd in number, one more is computed.
// None of this is measured yet.
#pragma once

#include <algorithm>
#include <climits>

#include "dev/ladders/clusters.cuh"
#include "kernels/device/tensor_tiles.cuh"

namespace wgmma_rung {

constexpr int tile_rows = 128, step = 64;  // rows of a tile of C; elements of K at a time
constexpr int group_rows = 16;             // tiles that lie together
constexpr int warpgroup = 128, threads = 3 * warpgroup, consumers = 2;
constexpr int warp_rows = 16, product_rows = 64;  // of a product's 64 rows of C, a warp has 16
constexpr int producer_registers = 40, consumer_registers = 232;  // of each thread
static_assert(producer_registers + consumers * consumer_registers == (1 + consumers) * registers_at_launch(threads));

struct SharedTile {
  static constexpr int columns = 256, stages = 4;
  static constexpr int readers = consumers;  // of a stage, in a block
  static constexpr int blocks = 1;           // in a cluster
};
struct SharedByTwo : SharedTile {
  static constexpr int blocks = 2;
};
struct TileEach {
  static constexpr int columns = 128, stages = 6;
  static constexpr int readers = 1;
  static constexpr int blocks = 1;
};

template <class Way>
constexpr int strips = Way::columns / box_columns;  // boxes that are as wide as a tile
template <class Way>
constexpr int products = tile_rows / product_rows / Way::readers;  // products of a consumer, one above the other

template <class Way>
constexpr unsigned all_blocks = (1u << Way::blocks) - 1;  // of a cluster

// The sums of one thread.
template <class Way>
using Sums = float[products<Way>][Way::columns / 8][4];

template <class Way, class T>
struct Stage {
  alignas(1024) T a[tile_rows * step];
  alignas(1024) T b[strips<Way>][step * box_columns];
};

template <class Way, class T>
struct Shared {
  Stage<Way, T> stages[Way::stages];                                          // 192 KB
  alignas(1024) T c[consumers * warpgroup / 32][2][warp_rows * box_columns];  // 32 KB: results that are being stored
  Barrier full[Way::stages], empty[Way::stages];
  Barrier started[consumers];  // TileEach: all products of a tile
};
static_assert(sizeof(Shared<SharedTile, __half>) <= 227 * 1024, "a block's shared memory on Hopper");
static_assert(sizeof(Shared<TileEach, __half>) <= 227 * 1024, "a block's shared memory on Hopper");

// A position in the ring of stages.
template <class Way>
struct Turn {
  int stage = 0;
  unsigned parity = 0;  // of the round

  __device__ void advance(int steps = 1) {
    stage += steps;
    parity ^= stage / Way::stages % 2;
    stage %= Way::stages;
  }
};

struct Tile {
  int row, column;  // of its first element in C
};

// The unit of work of a cluster is as many tiles above one another as it has blocks.
struct Problem {
  int rows, columns;  // of units
  int depth;          // K

  __host__ __device__ int units() const { return rows * columns; }

  // The order of units: down a group of rows, then down its next column; after its last column, the next group.
  template <class Way>
  __device__ Tile tile(int unit) const {
    constexpr int group = group_rows / Way::blocks;
    const int first_row = unit / (group * columns) * group, within = unit % (group * columns);
    const int height = min(group, rows - first_row);
    int row = (first_row + within % height) * Way::blocks;
    if constexpr (Way::blocks > 1) row += block_in_cluster();
    return {row * tile_rows, within / height * Way::columns};
  }
};

// Called by one thread: starts the copies of B's tile, from row k on. A block of a cluster loads a part, for all blocks.
template <class Way, class T>
__device__ inline void load_b(Stage<Way, T>& stage, const TensorMap& b, int k, int column, Barrier& full) {
  if constexpr (Way::blocks == 1) {
    for (int strip = 0; strip < strips<Way>; ++strip)
      load_box(stage.b[strip], b, k, column + strip * box_columns, full);
  } else {
    constexpr int part = strips<Way> / Way::blocks;
    const int first = block_in_cluster() * part;
    for (int strip = first; strip < first + part; ++strip)
      load_box(stage.b[strip], b, k, column + strip * box_columns, full, all_blocks<Way>);
  }
}

// Called by one thread: copies for all steps of all tiles, as fast as stages become empty. Bytes from another block may
// arrive before this one expects them: a phase lasts until it does.
template <class Way, class T>
__device__ inline void produce(Shared<Way, T>& shared, const TensorMap& a, const TensorMap& b, const Problem& problem) {
  Turn<Way> turn;
  for (int unit = blockIdx.x / Way::blocks; unit < problem.units(); unit += gridDim.x / Way::blocks) {
    const Tile tile = problem.tile<Way>(unit);
    for (int k = 0; k < problem.depth; k += step, turn.advance()) {
      Stage<Way, T>& stage = shared.stages[turn.stage];
      Barrier& full = shared.full[turn.stage];
      wait(shared.empty[turn.stage], turn.parity ^ 1);
      arrive_expecting(full, sizeof stage);
      load_box(stage.a, a, tile.row, k, full);
      load_b(stage, b, k, tile.column, full);
    }
  }
}

// Called by a consumer: starts sum = or += (A's tile from `row` on) · (B's tile), for one step of k.
template <class Way, class T>
__device__ inline void start_step(Sums<Way>& sum, Shared<Way, T>& shared, const Turn<Way>& turn, int row, bool add) {
  const Stage<Way, T>& stage = shared.stages[turn.stage];
  wait(shared.full[turn.stage], turn.parity);
  order_registers();
#pragma unroll
  for (int i = 0; i < step / 16; ++i)
#pragma unroll
    for (int product = 0; product < products<Way>; ++product)
      multiply_m64k16<T, true>(sum[product],
                               along_k(stage.a + (row + product * product_rows) * step, i * bytes_of_16_along_k),
                               along_n<step>(stage.b, i * bytes_of_16_along_n), add || i > 0);
  commit_products();
}

// Called by a consumer: sum = its rows of the tile, from `row` on. While the tensor cores work on a step, the stage of
// the step before is released, to all blocks that refill it.
template <class Way, class T>
__device__ inline void multiply_tile(Sums<Way>& sum, Shared<Way, T>& shared, Turn<Way>& turn, int row, int depth) {
  auto release_stage = [&](const Turn<Way>& used) {
    const int lane = threadIdx.x % 32;
    if constexpr (Way::blocks == 1) {
      if (lane == 0) arrive(shared.empty[used.stage]);
    } else if (lane < Way::blocks) {
      arrive_at(shared.empty[used.stage], lane);
    }
  };
  Turn<Way> previous = turn;
  start_step(sum, shared, turn, row, false);
  turn.advance();
  for (int k = step; k < depth; k += step) {
    start_step(sum, shared, turn, row, true);
    wait_for_products<1>();
    release_stage(previous);
    previous = turn;
    turn.advance();
  }
  if constexpr (Way::readers == 1) arrive(shared.started[threadIdx.x / warpgroup - 1]);
#pragma unroll
  for (int product = 0; product < products<Way>; ++product) wait_for_products(sum[product]);
  release_stage(previous);
}

// 16 rows of a warp, rounded to T, go to C in boxes of 64 columns. While one is stored, the next is written.
// round_pair is one instruction in the source for both cases. (With one for each, ptxas of CUDA 13.0 makes every product wait
// for the one before, and says so: message C7514.)
template <class Way, class T>
__device__ inline void store_rows(Shared<Way, T>& shared, const float (&sum)[Way::columns / 8][4], const TensorMap& c,
                                  int row, int column) {
  const int warp = threadIdx.x / 32 - warpgroup / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int strip = 0; strip < strips<Way>; ++strip) {
    T* box = shared.c[warp][strip % 2];
    wait_for_stores<1>();
    __syncwarp();  // lane 0 has waited for the box's last store
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* pair = &sum[8 * strip + chunk][2 * half];
        T* to = box + (lane / 4 + 8 * half) * box_columns + (chunk ^ lane / 4) * 8 + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(to) = round_pair<T>(pair[0], pair[1]);
      }
    share_with_engines();
    __syncwarp();
    if (lane == 0) {
      store_box(c, row, column + strip * box_columns, box);
      commit_stores();
    }
  }
}

template <class Way, class T>
__device__ inline void consume(Shared<Way, T>& shared, const TensorMap& c, const Problem& problem) {
  const int consumer = warpgroup_index() - 1, warp = threadIdx.x / 32 % 4;
  const int row = Way::readers == 1 ? 0 : consumer * product_rows;  // of the tile
  Turn<Way> turn;
  int round = 0;
  for (int unit = blockIdx.x / Way::blocks; unit < problem.units(); unit += gridDim.x / Way::blocks, ++round) {
    if constexpr (Way::readers == 1) {
      if (round % 2 != consumer) {  // the other's tile
        turn.advance(ceil_div(problem.depth, step));
        continue;
      }
      wait(shared.started[1 - consumer], (round / 2 + 1 - consumer) % 2);  // the products of round - 1
    }
    const Tile tile = problem.tile<Way>(unit);
    Sums<Way> sum;
    multiply_tile(sum, shared, turn, row, problem.depth);
#pragma unroll
    for (int product = 0; product < products<Way>; ++product)
      store_rows<Way>(shared, sum[product], c, tile.row + row + product * product_rows + warp * warp_rows, tile.column);
  }
  wait_for_stores<0>();
}

// Waits for all threads of the block, or of its cluster.
template <class Way>
__device__ inline void sync() {
  if constexpr (Way::blocks == 1) __syncthreads();
  else sync_cluster();
}

template <class Way, class T>
__global__ void __launch_bounds__(threads, 1)
matmul_wgmma_kernel(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                    const __grid_constant__ TensorMap c, const Problem problem) {
  extern __shared__ __align__(1024) char boxes[];
  Shared<Way, T>& shared = *reinterpret_cast<Shared<Way, T>*>(boxes);
  if (threadIdx.x == 0) {
    init_barriers(shared.full, 1);
    init_barriers(shared.empty, Way::blocks * Way::readers * warpgroup / 32);
    if (Way::readers == 1) init_barriers(shared.started, warpgroup);
    share_barriers();
  }
  sync<Way>();  // the barriers of all are made
  if (threadIdx.x < warpgroup) {
    give_registers<producer_registers>();
    if (threadIdx.x == 0) produce<Way>(shared, a, b, problem);
  } else {
    take_registers<consumer_registers>();
    consume<Way>(shared, c, problem);
  }
  if constexpr (Way::blocks > 1) sync_cluster();  // another block may still release a stage here
}

}  // namespace wgmma_rung

// Only where has_wgmma(), and for sizes of at least 1. There may be fewer blocks than the device has room for (but at
// least a cluster): then each computes more tiles.
template <class Way, class T>
void matmul_wgmma(T* c, const T* a, const T* b, int m, int n, int k, cudaStream_t stream, int most_blocks = INT_MAX) {
  using namespace wgmma_rung;
  const Problem problem{ceil_div(m, Way::blocks * tile_rows), ceil_div(n, Way::columns), k};
  const TensorMap a_boxes = make_tensor_map(a, m, k, tile_rows), b_boxes = make_tensor_map(b, k, n, step);
  const TensorMap c_boxes = make_tensor_map(c, m, n, warp_rows);
  const int room = std::max(std::min(device_attribute(cudaDevAttrMultiProcessorCount), most_blocks) / Way::blocks, 1);
  const int blocks = std::min(problem.units(), room) * Way::blocks;
  allow_shared_memory(matmul_wgmma_kernel<Way, T>, sizeof(Shared<Way, T>));
  launch_clusters(Way::blocks, matmul_wgmma_kernel<Way, T>, blocks, threads, sizeof(Shared<Way, T>), stream, a_boxes,
                  b_boxes, c_boxes, problem);
}
