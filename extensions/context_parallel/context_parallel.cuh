// Context parallelism: N ranks split the sequence, so that a sample may be N times as long as one rank has memory for.
// All layers except attention work on rows, and need only the position of each row (kernels/positions.h). Attention
// needs the keys of all rows, in one of two ways:
//
//   ring      keys travel from rank to rank while attention to the last ones is computed     extensions/context_parallel/ring_attention.cuh
//   ulysses   for attention alone, ranks split the heads instead of the rows                 extensions/context_parallel/ulysses.cuh
//
// Both give the same results as one rank with whole sequences. Sent by a rank, in a layer and micro-batch of R = B·T/N
// rows and c channels, w bytes each:
//
//              forward              backward                 hidden behind      needs
//   ring       (N−1)·2·R·c·w        (N−1)·2·R·c·(w + 4)      its own products   2·N divides T
//   ulysses    (N−1)/N·4·R·c·w      (N−1)/N·4·R·c·w          nothing            N divides T and the heads
//
// A step of the ring computes 2·R·c·T/N FLOPs forward for 2·R·c·w bytes. So it hides where T/N is at least
// w·(FLOP/s)/(bytes/s): in 16 bits, with 500 TFLOP/s of attention, 2,200 rows over NVLink's 450 GB/s, and 20,000 over
// 50 GB/s between nodes.
#pragma once

#include "extensions/context_parallel/sequence_split.h"
#include "gpt/attention.cuh"
#include "gpt/collectives.cuh"
#include "kernels/device/memory.cuh"

// What both have in common. ranks: two or more
template <class Float>
class ContextParallel : public AttentionOfRows<Float> {
 public:
  ContextParallel(Communicator& ranks, cudaStream_t stream) : AttentionOfRows<Float>(stream), ranks_(ranks) {}

  // largest: of this rank's rows (B, T/N) and the heads of this tensor-parallel rank. training: backward too.
  virtual void lay_out(Arena& arena, const AttentionSizes& largest, bool training) = 0;
  bool leaves_maximum(const AttentionSizes&) const override { return true; }

 protected:
  Communicator& ranks_;
};
