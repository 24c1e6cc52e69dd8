// The backward pass of attention by Hopper's copy engine and asynchronous tensor cores, for bf16 and fp16, beside
// extensions/hopper/kernels/hopper_attention.cuh. Maths and tensors are as in kernels/attention/attention.cuh. S and dP are
// computed once, for dQ and for dK and dV: 5 products, where kernels/attention/flash_attention.cuh has 7. Both are
// computed as transposes:
//
//   Sᵀ = K·Qᵀ,  Pᵀ = 2^(c·Sᵀ − lse·log2 e),  dPᵀ = V·dOᵀ,  dSᵀ = Pᵀ·(dPᵀ − D)
//   dV += Pᵀ·dO,  dK += dSᵀ·Q,  dQ += dS·K
//
// so that Pᵀ and dSᵀ, from registers, are left operands of dV and dK. Three kernels:
//
//   row_dots   D = Σ_d dO·O, and all counters become 0    (hopper_attention_queries.cuh)
//   gradients  a block has one tile of keys after another, 128 keys of a head, and for each all tiles of queries that see
//              some of them come by. The two consumer warpgroups have 64 keys each, with sums of dK and dV in registers.
//              For dQ they exchange dSᵀ through shared memory, and each computes 64 × 64 of dS·K, the sum over the
//              tile's keys
//   finish     dQ = scale · sums, rounded                 (hopper_attention_queries.cuh)
//
// dQ is a sum over tiles of keys, in float32. So that its bits do not depend on timing, these add to a tile of queries
// in a fixed order, last keys first: each waits until the queries' counter says that those before it are done. (With
// causal attention, tiles of later keys begin at later queries, so that they are the first if all run in step.) A block
// takes the numbers of its tiles from a ticket, one after another, and only waits for smaller numbers: for tiles of
// blocks that run already, or its own. Two threads that do nothing else wait: consumers write their part of dQ to one of
// two buffers, from where the copy engine adds it to the workspace. The first part is stored.
//
// There is one block per SM, so the start and the end of a tile of keys must overlap with other work: the producer takes
// the next tile and loads its first queries while consumers finish this one, its keys arrive while dK and dV are stored,
// and the last parts of dQ are added while the next tile is computed.
//
// Limits of the loop, in cycles of an SM for a tile, 128 queries (HS = 64) or 64 (HS = 128), and 128 keys:
//
//                                                      HS 64   HS 128
//   tensor cores, 10·8,192·128 FLOPs, 4,096 a cycle    2,560    2,560
//   exponentials, 16 a cycle                           1,024      512
//   instructions, 4 a cycle                            1,466      968   733 and 484 of a warp in nvcc's code (13.0)
//   shared memory, 128 bytes a cycle                   3,072    2,944   products read 256 KB; Q, dO, dS and dQ
//                                                                       come and go, 128 or 112 KB
//   bytes to and from L2                              65,536   65,536   Q, dO; dQ
//
// Shared memory is the limit, then the tensor cores: products of 64 keys and 64 queries read as much of both. With 128
// queries, registers would not hold S, dP, P and dS beside dK and dV. P is computed while dP is, dS while dV is, and S
// of the next tile is computed while dQ of this one is written. The two consumers fill each other's gaps.
// Its barriers are tested by test_attention.
#pragma once

#include "extensions/hopper/kernels/hopper_attention.cuh"
#include "extensions/hopper/kernels/hopper_attention_queries.cuh"

namespace hopper_attention {

template <int HS>
constexpr int tile_queries = 8192 / HS;  // so that a consumer computes 64 × 64 of the tile's dQ
constexpr int part_rows = 64;            // queries for which a consumer has S and dP at a time
constexpr int dq_side = 64, dq_buffers = 2, stage_count = 2;

template <class Float, int HS>
struct QueryStage {
  Tile<Float, HS, tile_queries<HS>> queries, douts;
};

template <class Float, int HS>
struct BackwardShared {
  Tile<Float, HS> keys, values;
  QueryStage<Float, HS> stages[stage_count];
  Tile<Float, tile_queries<HS>, group_rows> ds[2][consumers];  // dSᵀ: rows are the consumer's keys
  alignas(1024) float dq[dq_buffers][consumers][dq_side * dq_side];
  float2 statistics[stage_count][tile_queries<HS>];  // lse·log2 e, and D
  Barrier keys_full, keys_empty, full[stage_count], empty[stage_count], dq_full[dq_buffers], dq_empty[dq_buffers];
  int number;  // of the tile of keys; comes and goes with them
};
static_assert(sizeof(BackwardShared<__half, 64>) <= 227 * 1024 && sizeof(BackwardShared<__half, 128>) <= 227 * 1024);

struct BackwardProblem {
  AttentionSizes sizes;
  TensorMap q, k, v, dout;
  const float *lse, *row_dots;
  Workspace workspace;
  float scale;

  __host__ __device__ int tiles() const { return sizes.batch * sizes.heads * ceil_div(sizes.keys, tile_rows); }
};

// A tile of keys of a head, and the queries that see some of it: from `start` on, in tiles of Q.
template <int Q>
struct KeyTile {
  int head, sample, first, start;  // head: of all samples

  __device__ KeyTile(const AttentionSizes& sizes, int number) {
    const int tiles = ceil_div(sizes.keys, tile_rows);
    head = number / tiles;
    sample = head / sizes.heads;
    first = (tiles - 1 - number % tiles) * tile_rows;
    const int first_query = sizes.first_query(first);
    start = first_query < sizes.queries ? first_query / Q * Q : sizes.queries;
  }

  // The number of blocks that add to the dQ of this tile of queries before this one: those of later keys that it sees.
  __device__ unsigned before(const AttentionSizes& sizes, int query) const {
    return (end_of_seen_keys(query, Q, sizes) - 1) / tile_rows - first / tile_rows;
  }
};

// Calls function(KeyTile) for this block's tiles of keys, one after another, each after its number and keys have arrived.
template <class Float, int HS, class Function>
__device__ inline void for_each_key_tile(BackwardShared<Float, HS>& shared, const BackwardProblem& problem,
                                         Function function) {
  for (unsigned parity = 0;; parity ^= 1) {
    wait(shared.keys_full, parity);
    const int number = shared.number;
    if (number >= problem.tiles()) return;
    function(KeyTile<tile_queries<HS>>(problem.sizes, number));
  }
}

// Called by a warp: takes tiles of keys, and starts their copies; then the copies of one tile of queries after another,
// with each query's lse (base 2) and D. It is ahead of the consumers by the stages, also in the next tile of keys.
template <class Float, int HS>
__device__ inline void produce(BackwardShared<Float, HS>& shared, const BackwardProblem& problem) {
  constexpr int Q = tile_queries<HS>;
  const AttentionSizes& sizes = problem.sizes;
  const int lane = threadIdx.x % 32;
  Turn<stage_count> turn;
  for (unsigned parity = 0;; parity ^= 1) {
    const int own_number = lane == 0 ? int(atomicAdd(problem.workspace.ticket, 1u)) : 0;
    const int number = __shfl_sync(0xffffffffu, own_number, 0);
    const KeyTile<Q> tile(sizes, number);
    const int head = tile.head % sizes.heads;
    const bool is_seen = number < problem.tiles() && tile.start < sizes.queries;
    if (lane == 0) {
      wait(shared.keys_empty, parity ^ 1);
      shared.number = number;
      arrive_expecting(shared.keys_full, is_seen ? sizeof shared.keys + sizeof shared.values : 0);
      if (is_seen) {
        load_tile(shared.keys, problem.k, tile.sample, head, tile.first, shared.keys_full);
        load_tile(shared.values, problem.v, tile.sample, head, tile.first, shared.keys_full);
      }
    }
    if (number >= problem.tiles()) return;
    for (int first = tile.start; first < sizes.queries; first += Q, turn.next()) {
      Barrier& full = shared.full[turn.index];
      QueryStage<Float, HS>& stage = shared.stages[turn.index];
      wait(shared.empty[turn.index], turn.parity ^ 1);
      if (lane == 0) {
        load_tile(stage.queries, problem.q, tile.sample, head, first, full);
        load_tile(stage.douts, problem.dout, tile.sample, head, first, full);
      }
#pragma unroll
      for (int i = lane; i < Q; i += 32) {
        const size_t at = size_t(tile.head) * sizes.queries + min(first + i, sizes.queries - 1);
        const float2 row = {log2_e * problem.lse[at], problem.row_dots[at]};
        shared.statistics[turn.index][i] = first + i < sizes.queries ? row : float2{INFINITY, 0};  // P is 0 there
      }
      __syncwarp();
      if (lane == 0) arrive_expecting(full, sizeof stage);
    }
  }
}

// Called by one thread for each buffer: adds the block's part of dQ to the sums, for every second tile of queries. Tiles
// have counters of their own, so the two threads need no order between them. They may still add parts of one tile of
// keys while the consumers compute the next.
template <class Float, int HS>
__device__ inline void add_queries(BackwardShared<Float, HS>& shared, const BackwardProblem& problem, int buffer) {
  constexpr int Q = tile_queries<HS>;
  const AttentionSizes& sizes = problem.sizes;
  int turns = 0;
  for_each_key_tile(shared, problem, [&](const KeyTile<Q>& tile) {
    arrive(shared.keys_empty);  // it has the number
    float* sums = problem.workspace.sums + tile.head * Workspace::head_sums(sizes);
    unsigned* counters = problem.workspace.counters + tile.head * ceil_div(sizes.queries, Q);
    for (int first = tile.start; first < sizes.queries; first += Q, ++turns) {
      if (turns % dq_buffers != buffer) continue;
      const unsigned before = tile.before(sizes, first);
      wait(shared.dq_full[buffer], turns / dq_buffers % 2);
      wait_for_count(&counters[first / Q], before);
      for (int consumer = 0; consumer < consumers; ++consumer) {
        const int rows = HS == 64 ? consumer * dq_side : 0, channels = HS == 64 ? 0 : consumer * dq_side;
        const int bytes = min(sizes.head_size - channels, dq_side) * dq_side * int(sizeof(float));
        float* to = sums + size_t(first + rows) * sizes.head_size + channels * dq_side;
        if (bytes <= 0) continue;
        if (before == 0) store_floats(to, shared.dq[buffer][consumer], bytes);
        else add_floats(to, shared.dq[buffer][consumer], bytes);
      }
      commit_stores();
      finish_stores();
      arrive(shared.dq_empty[buffer]);
      count_up(&counters[first / Q]);
    }
  });
}

// Starts the consumer's 64 × 64 of dQ = dS · K: its half of the queries, or of the channels.
template <class Float, int HS>
__device__ inline void start_dq(float (&dq)[dq_side / 8][4], const BackwardShared<Float, HS>& shared, int buffer,
                                int consumer) {
  const int query_box = HS == 64 ? consumer : 0, strip = HS == 64 ? 0 : consumer;
  order_registers();
#pragma unroll
  for (int k = 0; k < tile_rows / 16; ++k) {
    const Float* ds = shared.ds[buffer][k / 4].elements + query_box * group_rows * box_columns;
    const Float* keys = shared.keys.elements + strip * tile_rows * box_columns;
    multiply_m64k16<Float, true, true>(dq, along_m(ds, k % 4 * bytes_of_16_along_n),
                                       along_n<tile_rows>(keys, k * bytes_of_16_along_n), k > 0);
  }
  commit_products();
}

// The number of the barrier at which both consumers meet when dSᵀ of a tile is there.
constexpr int ds_barrier = 1;

// p, scores of 16 keys from first_key on with 64 queries, becomes Pᵀ. It is 0 for keys that the query does not see, and
// past the last.
__device__ inline void compute_p(float (&p)[1][part_rows / 8][4], int first_key, int first_query,
                                 const float2* statistics, const AttentionSizes& sizes, float factor) {
  if (first_key + warp_rows - 1 > sizes.last_key(first_query))
    for_each_element([&](Place at, float& x) {
      if (first_key + at.row > sizes.last_key(first_query + at.column)) x = -INFINITY;
    }, p);
  for_each_element([&](Place at, float& x) { x = exp2_approximate(factor * x - statistics[at.column].x); }, p);
}

// A consumer writes its part of dQ for the copy engine, in the layout of the workspace.
__device__ inline void write_dq(float* to, const float (&dq)[dq_side / 8][4]) {
#pragma unroll
  for (int j = 0; j < dq_side / 8; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = (2 * j + half) * warpgroup + threadIdx.x % warpgroup;
      reinterpret_cast<float2*>(to)[place] = {dq[j][2 * half], dq[j][2 * half + 1]};
    }
  share_with_engines();
}

// Called by a consumer: dK and dV of 64 keys.
template <class Float, class Gradient, int HS, class Seen>
__device__ inline void consume(BackwardShared<Float, HS>& shared, const BackwardProblem& problem,
                               const KeyTile<tile_queries<HS>>& tile, Turn<stage_count>& turn,
                               Turn<dq_buffers>& dq_turn, const HeadRows<Gradient>& dk_rows,
                               const HeadRows<Gradient>& dv_rows, const Seen& seen) {
  constexpr int Q = tile_queries<HS>, parts = Q / part_rows;
  const AttentionSizes& sizes = problem.sizes;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const int consumer = warpgroup_index() - 1, own_row = consumer * group_rows;
  const int warp_row = threadIdx.x % warpgroup / 32 * warp_rows, first_key = tile.first + own_row + warp_row;
  const Float* own_keys = shared.keys.elements + own_row * box_columns;
  const Float* own_values = shared.values.elements + own_row * box_columns;
  float dk[1][HS / 8][4] = {}, dv[1][HS / 8][4] = {}, p[parts][1][part_rows / 8][4];
  auto store_keys = [&] {
    store_rows<HS>(dk_rows, first_key, dk, problem.scale, seen);
    store_rows<HS>(dv_rows, first_key, dv, 1.0f, seen);
  };
  auto start_scores = [&] {
    wait(shared.full[turn.index], turn.parity);
#pragma unroll
    for (int part = 0; part < parts; ++part)
      start_transposed<Float, HS, Q>(p[part][0], own_keys,
                                     shared.stages[turn.index].queries.elements + part * part_rows * box_columns);
  };

  auto release = [&](Barrier& barrier) {
    if (is_first_lane) arrive(barrier);
  };
  if (tile.start >= sizes.queries) {  // no query sees these keys: their gradients are zero
    __syncwarp();                     // all lanes have the tile's number
    release(shared.keys_empty);
    return store_keys();
  }
  start_scores();
  for (int first = tile.start; first < sizes.queries; first += Q, dq_turn.next()) {
    const QueryStage<Float, HS>& stage = shared.stages[turn.index];
    float ds[1][part_rows / 8][4], dq[dq_side / 8][4];
    // One left_p for each part: while one is computed, dV may still be computed from the other.
    uint32_t left_p[parts][part_rows / 16][4], left_ds[part_rows / 16][4];
#pragma unroll
    for (int part = 0; part < parts; ++part) wait_for_products(p[part][0]);
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const Float* queries = stage.queries.elements + part * part_rows * box_columns;
      const Float* douts = stage.douts.elements + part * part_rows * box_columns;
      const float2* statistics = shared.statistics[turn.index] + part * part_rows;
      start_transposed<Float, HS, Q>(ds[0], own_values, douts);
      compute_p(p[part], first_key, first + part * part_rows, statistics, sizes, problem.scale * log2_e);
      round_left<Float>(left_p[part], p[part][0]);
      start_sum<Q>(dv[0], left_p[part], douts);
      wait_for_products<1>(ds[0]);
      for_each_element([&](Place at, float& x, float p) { x = p * (x - statistics[at.column].y); }, ds, p[part]);
      round_left<Float>(left_ds, ds[0]);
      start_sum<Q>(dk[0], left_ds, queries);
      write_rows<group_rows>(shared.ds[dq_turn.index][consumer].elements +
                                 (part * group_rows + warp_row) * box_columns, left_ds);
    }
    wait_at(ds_barrier, consumers * warpgroup);
    start_dq(dq, shared, dq_turn.index, consumer);
    wait(shared.dq_empty[dq_turn.index], dq_turn.parity ^ 1);
    wait_for_products(dq);
    wait_for_products(dk[0]);
    wait_for_products(dv[0]);
    // S of the next tile runs under the rest of the work on this one. After the last tile its S is computed again, for
    // nothing, because ptxas lets products run on beyond a branch only if they are started on both sides.
    if (first + Q < sizes.queries) {
      release(shared.empty[turn.index]);
      turn.next();
    }
    start_scores();
    write_dq(shared.dq[dq_turn.index][consumer], dq);
    __syncwarp();
    release(shared.dq_full[dq_turn.index]);
  }
  wait_for_products<0>();
  release(shared.empty[turn.index]);
  turn.next();
  release(shared.keys_empty);
  store_keys();
}

template <class Float, class Gradient, int HS, class Seen>
__global__ void __launch_bounds__(threads, 1)
gradients_kernel(const __grid_constant__ BackwardProblem problem, Heads<Gradient> dk, Heads<Gradient> dv, Seen seen) {
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<BackwardShared<Float, HS>*>(memory);
  const AttentionSizes& sizes = problem.sizes;
  if (threadIdx.x == 0) {
    init_barrier(shared.keys_full, 1);
    init_barrier(shared.keys_empty, consumer_warps + dq_buffers);
    init_barriers(shared.full, 1);
    init_barriers(shared.empty, consumer_warps);
    init_barriers(shared.dq_full, consumer_warps);
    init_barriers(shared.dq_empty, 1);
    share_barriers();
  }
  __syncthreads();
  if (threadIdx.x < warpgroup) {
    give_registers<producer_registers>();
    const int warp = threadIdx.x / 32;
    if (warp == 0) produce(shared, problem);
    else if (warp <= dq_buffers && threadIdx.x % 32 == 0) add_queries(shared, problem, warp - 1);
  } else {
    take_registers<consumer_registers>();
    Turn<stage_count> turn;
    Turn<dq_buffers> dq_turn;
    for_each_key_tile(shared, problem, [&](const KeyTile<tile_queries<HS>>& tile) {
      auto rows = [&](const Heads<Gradient>& heads) {
        return HeadRows<Gradient>{heads.data + tile.sample * heads.strides.sample +
                                      tile.head % sizes.heads * sizes.head_size,
                                  heads.strides.row, sizes.keys, sizes.head_size};
      };
      consume<Float, Gradient, HS>(shared, problem, tile, turn, dq_turn, rows(dk), rows(dv), seen);
    });
  }
}

}  // namespace hopper_attention

// Arguments and conditions are those of flash_attention_backward. Only where has_wgmma().
template <class Float, class Gradient>
void hopper_attention_backward(const QkvHeads<Gradient>& dqkv, float* row_dots, float* workspace,
                               const Heads<const Float>& dout, const Heads<const Float>& out,
                               const QkvHeads<const Float>& qkv, const float* lse, const AttentionSizes& sizes,
                               cudaStream_t stream, float* maximum = nullptr) {
  using namespace hopper_attention;
  const Workspace memory(workspace, sizes);
  const int rows = sizes.batch * sizes.queries * sizes.heads, chunks = rows * (sizes.head_size / 8);
  with_compiled_head_size(sizes.head_size, [&](auto HS) {
    constexpr int bytes = sizeof(BackwardShared<Float, HS>);
    row_dots_kernel<Float, HS><<<ceil_div(rows, side_threads / (HS / 8) * side_rows), side_threads, 0, stream>>>(
        row_dots, dout, out, sizes, memory.ticket, int(memory.counts(sizes)));
    const BackwardProblem problem{sizes, map_heads(qkv.q, sizes.queries, sizes, tile_queries<HS>),
                                  map_heads(qkv.k, sizes.keys, sizes, tile_rows),
                                  map_heads(qkv.v, sizes.keys, sizes, tile_rows),
                                  map_heads(dout, sizes.queries, sizes, tile_queries<HS>),
                                  lse, row_dots, memory, sizes.scale()};
    const int blocks = std::min(problem.tiles(), persistent_blocks());
    with_maximum<Gradient>(maximum, [&](auto seen) {
      using Seen = decltype(seen);
      allow_shared_memory(gradients_kernel<Float, Gradient, HS, Seen>, bytes);
      gradients_kernel<Float, Gradient, HS, Seen><<<blocks, threads, bytes, stream>>>(problem, dqkv.k, dqkv.v, seen);
    });
  });
  with_maximum<Gradient>(maximum, [&](auto seen) {
    finish_kernel<Gradient><<<ceil_div(chunks, side_threads * side_rows), side_threads, 0, stream>>>(
        dqkv.q, memory.sums, sizes, sizes.scale(), seen);
  });
}
