// How ranks of context parallelism deal out the tokens of a sample (extensions/context_parallel/context_parallel.cuh): each of N ranks
// gets two runs of neighbours, so that all have the same number of tokens.
//
//   zigzag (Llama 3, arXiv:2407.21783)   2N runs; rank r has runs r and 2N−1−r. The later a query, the more keys it sees:
//                                        an early run and a late one together are the same work on every rank
//   neighbours                           N runs; rank r has run r, and its second run is empty
#pragma once

#include "kernels/positions.h"

// How ranks that split the sequence compute attention (extensions/context_parallel/context_parallel.cuh).
enum class ContextMethod { ring, ulysses };

// What a model is told of ranks that split its sequences.
struct ContextOptions {
  ContextMethod method = ContextMethod::ring;
};

// The positions of rank `rank` of `ranks`. If 2·ranks does not divide seq_len, the last runs go on behind the sample's
// end.
inline Positions zigzag(int seq_len, int ranks, int rank) {
  const int run = (seq_len + 2 * ranks - 1) / (2 * ranks);
  return ranks == 1 ? neighbours(seq_len) : Positions{2 * run, run, rank * run, (2 * ranks - 1 - rank) * run};
}

// A ring needs the balance of zigzag. With Ulysses, where every rank sees all queries, neighbours are balanced, and
// simpler.
inline Positions positions_of(ContextMethod method, int seq_len, int ranks, int rank) {
  if (method == ContextMethod::ring) return zigzag(seq_len, ranks, rank);
  const int run = (seq_len + ranks - 1) / ranks;
  return neighbours(run, run * rank);
}

// The tokens of a text whose keys and values a rank caches, where ranks share the cache: its share of the prompt, then
// the tokens that fill its last runs behind the prompt, then every `ranks`th token. So of n tokens, a multiple of
// 2·ranks, no rank keeps more than n / ranks.
struct KeptTokens {
  Positions prompt;
  int ranks, rank;

  // The number of kept tokens before this position.
  int before(int position) const {
    const int later = position - prompt.length * ranks;  // than the last runs
    return prompt.before(position) + (later > 0 ? (later - rank + ranks - 1) / ranks : 0);
  }
};
