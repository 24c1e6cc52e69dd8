// Where in its sample each row of a batch stands. Context parallelism deals the tokens of a sample out to N ranks
// (parallel/context_parallel.cuh), in two runs of neighbours each, so that all of them have the same number:
//
//   zigzag (Llama 3, arXiv:2407.21783)   2N runs; rank r has runs r and 2N−1−r. The later a query, the more keys it sees:
//                                        an early run and a late one together are the same work on every rank
//   neighbours                           N runs; rank r has both halves of run r
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

struct Positions {
  int length;         // rows of a sample on this rank
  int half;           // the first so many of them are the first run, the others the second
  int first, second;  // position of each run's first row

  // The position of row `row` of a batch, whose samples come one after another.
  __host__ __device__ int of_row(int row) const {
    const int i = row % length;
    return i < half ? first + i : second + i - half;
  }

  // The row of a sample that stands at this position; -1: none on this rank.
  __host__ __device__ int row_at(int position) const {
    if (position >= first && position < first + half) return position - first;
    if (position >= second && position < second + length - half) return position - second + half;
    return -1;
  }

  // So many rows of a sample stand before this position: its first ones.
  int before(int position) const {
    return std::clamp(position - first, 0, half) + std::clamp(position - second, 0, length - half);
  }
};

// `length` rows from position `first` on.
inline Positions neighbours(int length, int first = 0) { return {length, length, first, first + length}; }

// Of rank `rank` of `ranks`; 2·ranks divides seq_len.
inline Positions zigzag(int seq_len, int ranks, int rank) {
  const int run = seq_len / (2 * ranks);
  return ranks == 1 ? neighbours(seq_len) : Positions{2 * run, run, rank * run, (2 * ranks - 1 - rank) * run};
}

// The tokens of a text whose keys and values a rank caches: those that it had when the prompt was computed, padded to whole
// runs; then those that fill up these runs; then every `ranks`th. So of n tokens none has more than ⌈n / 2·ranks⌉·2.
struct CachedTokens {
  Positions prompt;
  int ranks, rank;

  // So many of them stand before this position.
  int before(int position) const {
    const int later = position - prompt.length * ranks;  // than the prompt's runs
    return prompt.before(position) + (later > 0 ? (later - rank + ranks - 1) / ranks : 0);
  }
};
