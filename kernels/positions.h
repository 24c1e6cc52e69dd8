// Where in its sample each row of a batch stands. Context parallelism deals the tokens of a sample out to N ranks
// (parallel/context_parallel.cuh), in two runs of neighbours each, so that all of them have the same number:
//
//   zigzag (Llama 3, arXiv:2407.21783)   2N runs; rank r has runs r and 2N−1−r. The later a query, the more keys it sees:
//                                        an early run and a late one together are the same work on every rank
//   neighbours                           N runs; rank r has run r, and its second run is empty
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

// How ranks that split the sequence compute attention (parallel/context_parallel.cuh).
enum class ContextMethod { ring, ulysses };

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

// Of rank `rank` of `ranks`. If 2·ranks does not divide seq_len, the last runs go on behind the sample's end.
inline Positions zigzag(int seq_len, int ranks, int rank) {
  const int run = (seq_len + 2 * ranks - 1) / (2 * ranks);
  return ranks == 1 ? neighbours(seq_len) : Positions{2 * run, run, rank * run, (2 * ranks - 1 - rank) * run};
}

// A ring needs the balance of zigzag. With Ulysses, where every rank sees all queries, neighbours are balanced, and simpler.
inline Positions positions_of(ContextMethod method, int seq_len, int ranks, int rank) {
  if (method == ContextMethod::ring) return zigzag(seq_len, ranks, rank);
  const int run = (seq_len + ranks - 1) / ranks;
  return neighbours(run, run * rank);
}

// The tokens of a text whose keys and values a rank keeps, while ranks share them: those that it had when the prompt was
// computed; then those behind the prompt where its last runs go on; then every `ranks`th. So of n tokens, a multiple of
// 2·ranks, no rank keeps more than n / ranks.
struct KeptTokens {
  Positions prompt;
  int ranks, rank;

  // So many of them stand before this position.
  int before(int position) const {
    const int later = position - prompt.length * ranks;  // than the last runs
    return prompt.before(position) + (later > 0 ? (later - rank + ranks - 1) / ranks : 0);
  }
};
