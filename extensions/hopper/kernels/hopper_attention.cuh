// Attention by Hopper's copy engine and asynchronous tensor cores, for bf16 and fp16. Maths and tensors are as in
// kernels/attention/attention.cuh; the method is FlashAttention-3's (Shah et al., arXiv:2407.08608, algorithms 1 and
// 2), with the softmax of kernels/attention/flash_attention.cuh. There, the threads of a warp start products and wait
// for them; while they compute the exponentials, it is left to chance whether other warps use the tensor cores. Here
// that is arranged.
//
// The roles. A block of 3 warpgroups works on one tile of 128 queries after another:
//
//   warpgroup 0     the producer: one thread starts the copies of the queries, and of one tile of 128 keys or values
//                   after another into a ring of slots, as fast as these become empty
//   warpgroups 1, 2 the consumers: each has 64 of the queries. O, S and P are in its registers
//
// While a consumer computes P of tile j from S, the tensor cores can work on two things that do not need it: on its own
// O += P·V of tile j − 1, and on the products of the other consumer. For the first, S of tile j is started before the
// P·V of the tile before. For the second, consumers take turns to start products, so that they do not run in step, and
// both wait for the tensor cores and then both for the exponentials.
//
//   consumer 1   start S₁, PV₀ │ softmax of S₁         │ start S₂, PV₁ │ softmax of S₂ ...
//   consumer 2   softmax of S₀         │ start S₁, PV₀ │ softmax of S₁         │ start S₂, PV₁ ...
//
// The order in which a block does tiles of keys, and so the order of all sums, never depends on timing.
//
// Limits of the loop, in cycles of an SM for 128 queries and 128 keys, if nothing waits:
//
//                                                      HS 64   HS 128
//   tensor cores, 4·128·128·HS FLOPs, 4,096 a cycle    1,024    2,048
//   exponentials, 128·128, 16 a cycle                  1,024    1,024
//   shared memory, 128 bytes a cycle                     896    1,792   a warpgroup's products of 16 read 2 KB of Q and
//                                                                       4 KB of K; 32·HS bytes of V; copies write K, V
//   instructions, 4 a cycle                              882      980   441 and 490 of a warp in nvcc's code (13.0)
//   bytes from L2                                     32,768   65,536   32 a cycle, if tensor cores never wait
//
// So at HS = 64 exponentials take as long as products, and all else nearly as long: without overlap the speed would be
// halved. The bytes are the other limit: 24 to 31 a cycle and SM are reported of H100's L2. The largest tile that the
// registers hold is taken: O, S and P are HS/2 + 64 + 32 of 240.
//
// A causal head has tiles of queries with many keys and with few. A block gets them in pairs, the p-th from the end and
// then the p-th from the beginning, which are as much work for each p. Pairs of a head are dealt out to neighbouring
// blocks, so that its keys and values come from L2. There is one block per SM; the producer already loads a block's
// next tile while consumers finish this one, and its first S is computed while they store O.
//
// Non-finite inputs are not hidden, as in kernels/attention/flash_attention.cuh. Compiled head sizes are 64 and 128; in
// smaller heads the copy engine fills the tiles with zeros, and stores nothing there.
// Its barriers are tested by test_attention.
#pragma once

#include <algorithm>

#include "extensions/hopper/kernels/hopper.cuh"
#include "kernels/attention/flash_attention.cuh"
#include "kernels/device/multiprocessors.h"

namespace hopper_attention {

constexpr int warpgroup = 128, consumers = 2, threads = (1 + consumers) * warpgroup;
constexpr int group_rows = 64, tile_rows = 128;  // queries of a consumer; queries, keys or values of a tile
constexpr int warp_rows = 16, consumer_warps = consumers * warpgroup / 32;
static_assert(tile_rows == consumers * group_rows);
constexpr int producer_registers = 24, consumer_registers = 240;  // of each thread
static_assert(producer_registers + consumers * consumer_registers == (1 + consumers) * registers_at_launch(threads));

// HS / 64 boxes, which follow each other.
template <class Float, int HS, int rows = tile_rows>
struct alignas(1024) Tile {
  Float elements[rows * HS];
};

constexpr int query_tiles = 2;  // of this tile of queries and of the block's next
template <int HS>
constexpr int slot_count = 512 / HS;  // 128 KB

template <class Float, int HS>
struct Shared {
  Tile<Float, HS> queries[query_tiles];  // later the outputs of these queries, which are being stored
  Tile<Float, HS> slots[slot_count<HS>];
  Barrier queries_full[query_tiles], queries_empty[query_tiles], full[slot_count<HS>], empty[slot_count<HS>];
};
static_assert(sizeof(Shared<__half, 128>) <= 227 * 1024, "a block's shared memory on Hopper");

// A position in a ring of `count`.
template <int count>
struct Turn {
  int index = 0;
  unsigned parity = 0;  // of the round

  __device__ void next() {
    if (++index < count) return;
    index = 0;
    parity ^= 1;
  }
};

// A tile of queries, and the end of the keys that they see.
struct QueryTile {
  int sample, head, first, end;
  bool is_last;  // of the block
};

// The sizes of the problem, and the maps of the tensors: tiles of q, k and v, a warp's rows of out.
struct Problem {
  AttentionSizes sizes;
  TensorMap q, k, v, out;

  __host__ __device__ int tiles() const { return ceil_div(sizes.queries, tile_rows); }
  __host__ __device__ int pairs() const { return ceil_div(tiles(), 2); }
  __host__ __device__ int all_pairs() const { return sizes.batch * sizes.heads * pairs(); }
};

// Calls function(QueryTile) for this block's tiles, one after another.
template <class Function>
__device__ inline void for_each_tile(const Problem& problem, Function function) {
  const AttentionSizes& sizes = problem.sizes;
  for (int number = blockIdx.x; number < problem.all_pairs(); number += gridDim.x) {
    const int head = number / problem.pairs(), early = number % problem.pairs(), late = problem.tiles() - 1 - early;
#pragma unroll 1
    for (int tile = late;; tile = early) {
      const int first = tile * tile_rows;
      const bool is_last = tile == early && number + int(gridDim.x) >= problem.all_pairs();
      function(QueryTile{head / sizes.heads, head % sizes.heads, first, end_of_seen_keys(first, tile_rows, sizes),
                         is_last});
      if (tile == early) break;
    }
  }
}

template <class Float, int HS, int rows>
__device__ inline void load_tile(Tile<Float, HS, rows>& tile, const TensorMap& map, int sample, int head, int row,
                                 Barrier& full) {
  for (int column = 0; column < HS; column += box_columns)
    load_box(tile.elements + column * rows, map, {sample, head, row, column}, full);
}

// Called by one thread. The order of slots: keys of tile 0, of tile 1, values of tile 0, keys of tile 2, ...
template <class Float, int HS>
__device__ inline void produce(Shared<Float, HS>& shared, const Problem& problem) {
  Turn<query_tiles> queries;
  Turn<slot_count<HS>> slot;
  for_each_tile(problem, [&](const QueryTile& work) {
    auto load = [&](Tile<Float, HS>& tile, const TensorMap& map, int row, Barrier& full) {
      arrive_expecting(full, sizeof tile);
      load_tile(tile, map, work.sample, work.head, row, full);
    };
    auto load_next = [&](const TensorMap& map, int row) {
      wait(shared.empty[slot.index], slot.parity ^ 1);
      load(shared.slots[slot.index], map, row, shared.full[slot.index]);
      slot.next();
    };
    wait(shared.queries_empty[queries.index], queries.parity ^ 1);
    load(shared.queries[queries.index], problem.q, work.first, shared.queries_full[queries.index]);
    queries.next();
    load_next(problem.k, 0);
    for (int first = 0; first < work.end; first += tile_rows) {
      if (first + tile_rows < work.end) load_next(problem.k, first + tile_rows);
      load_next(problem.v, first);
    }
  });
}

// Starts x = (64 rows of a tile) · rowsᵀ. `rows` lie in a tile of box_rows; both have HS columns.
template <class Float, int HS, int box_rows, int J>
__device__ inline void start_transposed(float (&x)[J][4], const Float* left, const Float* rows) {
  order_registers();
#pragma unroll
  for (int k = 0; k < HS; k += 16) {
    const int strip = k / box_columns, within = k % box_columns / 16 * bytes_of_16_along_k;
    multiply_m64k16<Float, false>(x, along_k(left, strip * tile_rows * 128 + within),
                                  along_k(rows, strip * box_rows * 128 + within), k > 0);
  }
  commit_products();
}

// Starts sum += p · rows. `rows` lie in a tile of box_rows.
template <int box_rows, class Float, int J, int K>
__device__ inline void start_sum(float (&sum)[J][4], const uint32_t (&p)[K][4], const Float* rows) {
  order_registers();
#pragma unroll
  for (int k = 0; k < K; ++k)
    multiply_m64k16<Float, true>(sum, p[k], along_n<box_rows>(rows, k * bytes_of_16_along_n), true);
  commit_products();
}

// The warp writes left operands, 16 rows, to boxes of box_rows in shared memory. `rows`: the first of these rows.
template <int box_rows, class Float, int K>
__device__ inline void write_rows(Float* rows, const uint32_t (&x)[K][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < K; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = 2 * k + i / 2, place = swizzled<box_columns>(lane / 4 + i % 2 * 8, chunk % 8) + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(rows + chunk / 8 * (box_rows * box_columns) + place) = x[k][i];
    }
  share_with_engines();
}

// The warp's 16 rows of o, rounded to Float, go to out. `rows`: the place in shared memory of the queries that they
// belong to.
template <class Float, int HS>
__device__ inline void store_outputs(Float* rows, const float (&o)[HS / 8][4], const TensorMap& out, const QueryTile& work,
                                     int first) {
  uint32_t rounded[HS / 16][4];
  round_left<Float>(rounded, o);
  write_rows<tile_rows>(rows, rounded);
  __syncwarp();
  if (threadIdx.x % 32 > 0) return;
  for (int column = 0; column < HS; column += box_columns)
    store_box(out, {work.sample, work.head, first, column}, rows + column * tile_rows);
  commit_stores();
}

// A consumer's turn to start products: it waits for its barrier until the other has passed the turn on.
__device__ inline void take_turn(int consumer) { wait_at(1 + consumer, consumers * warpgroup); }
__device__ inline void pass_turn(int consumer) { announce_at(2 - consumer, consumers * warpgroup); }

// A consumer's state that lasts from one tile of queries to the next: s, the scores of a tile's first keys.
template <int HS>
struct ConsumerState {
  Turn<query_tiles> queries;
  Turn<slot_count<HS>> slot;
  int keys = 0;                     // the slot that s is computed from
  Barrier* last_queries = nullptr;  // where the outputs of the tile before are being stored
  float s[1][tile_rows / 8][4];
};

template <class Float, int HS>
__device__ inline int next_slot(Shared<Float, HS>& shared, Turn<slot_count<HS>>& slot) {
  const int index = slot.index;
  wait(shared.full[index], slot.parity);
  slot.next();
  return index;
}

// Waits for a tile of queries and its first keys.
template <class Float, int HS>
__device__ inline void wait_for_tile(Shared<Float, HS>& shared, ConsumerState<HS>& state) {
  wait(shared.queries_full[state.queries.index], state.queries.parity);
  state.keys = next_slot(shared, state.slot);
}

// Called by a consumer: out and lse of 64 queries.
template <class Float, int HS, class Seen>
__device__ inline void attend(Shared<Float, HS>& shared, ConsumerState<HS>& state, const Problem& problem,
                              const QueryTile& work, float* lse, float scale, int consumer, Seen seen) {
  const AttentionSizes& sizes = problem.sizes;
  const int lane = threadIdx.x % 32;
  const int warp_row = (threadIdx.x - warpgroup) / 32 * warp_rows, first_query = work.first + warp_row;
  const float factor = scale * log2_e;
  auto& s = state.s;
  auto release = [&](Barrier& barrier) {
    if (lane == 0) arrive(barrier);
  };
  Float* own_queries = shared.queries[state.queries.index].elements + consumer * group_rows * box_columns;

  float o[1][HS / 8][4] = {}, maximum[1][2] = {{-INFINITY, -INFINITY}}, sum[1][2] = {};
  float correction[1][2];
  uint32_t p[tile_rows / 16][4];
  int values = -1;
  auto softmax = [&](int first) {
    release(shared.empty[state.keys]);
    hide_unseen_keys(s, first, first_query, sizes);
    online_softmax(s, maximum, sum, correction, factor);
  };
  // p and o become the values of the tile whose softmax has been computed last, in registers that products have used so
  // far.
  auto finish_outputs = [&] {
    wait_for_products(o[0]);
    if (values >= 0) release(shared.empty[values]);
    for_each_element([&](Place at, float& x) { x *= correction[at.m][at.half]; }, o);
    round_left<Float>(p, s[0]);
  };

  if (lane == 0) wait_for_stores<0>();  // of the tile before: its memory is free
  if (state.last_queries) release(*state.last_queries);
  wait_for_products(s[0]);
  softmax(0);
  for (int first = tile_rows; first < work.end; first += tile_rows) {
    // The slots are waited for here, and not later, because ptxas moves no instruction across such a loop. Otherwise it
    // computes the softmax after the wait for o.
    state.keys = next_slot(shared, state.slot);
    const int next_values = next_slot(shared, state.slot);
    finish_outputs();
    values = next_values;
    take_turn(consumer);
    start_transposed<Float, HS, tile_rows>(s[0], own_queries, shared.slots[state.keys].elements);
    start_sum<tile_rows>(o[0], p, shared.slots[values].elements);
    pass_turn(consumer);
    wait_for_products<1>(s[0]);
    softmax(first);
  }
  const int last_values = next_slot(shared, state.slot);
  state.last_queries = &shared.queries_empty[state.queries.index];
  state.queries.next();
  const Float* next_queries = shared.queries[state.queries.index].elements + consumer * group_rows * box_columns;
  if (!work.is_last) wait_for_tile(shared, state);
  finish_outputs();
  take_turn(consumer);  // all warps of this consumer have waited for its last S: the queries are no longer needed
  start_sum<tile_rows>(o[0], p, shared.slots[last_values].elements);
  // The first S of the next tile runs while these outputs are stored. After the block's last tile it is computed for
  // nothing, because ptxas lets products run on beyond a branch only if they are started on both sides.
  start_transposed<Float, HS, tile_rows>(s[0], next_queries, shared.slots[state.keys].elements);
  pass_turn(consumer);

  float inverse[1][2];
  for_each_row<1>([&](int row, int m, int half) {
    const float total = quad_sum(sum[m][half]);
    inverse[m][half] = 1.0f / total;
    if (lane % 4 == 0 && first_query + row < sizes.queries)
      lse[(size_t(work.sample) * sizes.heads + work.head) * sizes.queries + first_query + row] =
          log_sum_exp(scale * maximum[m][half], total);
  });
  wait_for_products<1>(o[0]);
  release(shared.empty[last_values]);
  for_each_element([&](Place at, float& x) {
    x *= inverse[at.m][at.half];
    if (first_query + at.row < sizes.queries) seen.see({x});
  }, o);
  seen.raise();
  Float* rows = own_queries + threadIdx.x % warpgroup / 32 * warp_rows * box_columns;
  store_outputs<Float, HS>(rows, o[0], problem.out, work, first_query);
}

template <class Float, int HS, class Seen>
__device__ inline void consume(Shared<Float, HS>& shared, const Problem& problem, float* lse, float scale, const Seen& seen) {
  const int consumer = warpgroup_index() - 1;
  ConsumerState<HS> state;
  if (consumer == 1) pass_turn(consumer);  // the first turn is consumer 0's
  wait_for_tile(shared, state);
  start_transposed<Float, HS, tile_rows>(state.s[0], shared.queries[0].elements + consumer * group_rows * box_columns,
                                     shared.slots[state.keys].elements);
  for_each_tile(problem, [&](const QueryTile& work) { attend(shared, state, problem, work, lse, scale, consumer, seen); });
  wait_for_products<0>();
  if (consumer == 0) take_turn(consumer);  // nobody's turn is left over
  if (threadIdx.x % 32 == 0) wait_for_stores<0>();
}

template <class Float, int HS, class Seen>
__global__ void __launch_bounds__(threads, 1)
forward_kernel(const __grid_constant__ Problem problem, float* lse, float scale, Seen seen) {
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<Shared<Float, HS>*>(memory);
  if (threadIdx.x == 0) {
    init_barriers(shared.queries_full, 1);
    init_barriers(shared.queries_empty, consumer_warps);
    init_barriers(shared.full, 1);
    init_barriers(shared.empty, consumer_warps);
    share_barriers();
  }
  __syncthreads();
  if (threadIdx.x < warpgroup) {
    give_registers<producer_registers>();
    if (threadIdx.x == 0) produce(shared, problem);
  } else {
    take_registers<consumer_registers>();
    consume(shared, problem, lse, scale, seen);
  }
}

// The map of the rows (count, head_size) of all heads.
template <class T>
TensorMap map_heads(const Heads<T>& heads, int count, const AttentionSizes& sizes, int box_rows) {
  return make_tensor_map(MatrixStack<T>{heads.data, count, sizes.head_size, sizes.heads, sizes.batch, heads.strides.row,
                                        sizes.head_size, heads.strides.sample}, box_rows);
}

}  // namespace hopper_attention

// Arguments and conditions are those of flash_attention_forward. Only where has_wgmma().
template <class Float>
void hopper_attention_forward(const Heads<Float>& out, float* lse, const QkvHeads<const Float>& qkv,
                              const AttentionSizes& sizes, cudaStream_t stream, float* maximum = nullptr) {
  using namespace hopper_attention;
  const Problem problem{sizes, map_heads(qkv.q, sizes.queries, sizes, tile_rows),
                        map_heads(qkv.k, sizes.keys, sizes, tile_rows), map_heads(qkv.v, sizes.keys, sizes, tile_rows),
                        map_heads(out, sizes.queries, sizes, warp_rows)};
  const int blocks = std::min(problem.all_pairs(), persistent_blocks());
  with_compiled_head_size(sizes.head_size, [&](auto HS) {
    constexpr int bytes = sizeof(Shared<Float, HS>);
    with_maximum<Float>(maximum, [&](auto seen) {
      using Seen = decltype(seen);
      allow_shared_memory(forward_kernel<Float, HS, Seen>, bytes);
      forward_kernel<Float, HS, Seen><<<blocks, threads, bytes, stream>>>(problem, lse, sizes.scale(), seen);
    });
  });
}
