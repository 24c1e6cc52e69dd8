// The sizes of a tensor, of a model, and of a mesh.
#pragma once

#include <cstddef>
#include <functional>
#include <numeric>
#include <vector>

inline size_t element_count(const std::vector<size_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), size_t(1), std::multiplies());
}

struct ModelShape {
  // Upper limits: far larger than any model in use, and small enough that no number of bytes reaches 2^64.
  static constexpr int most_layers = 1000, most_channels = 100'000, most_vocabulary = 10'000'000,
                       most_positions = 1 << 24;
  int layers, heads, channels, vocabulary, positions;
  bool operator==(const ModelShape&) const = default;

  int head_size() const { return channels / heads; }
};

// FLOPs of a token, forward and backward: 6·Ψ + 6·L·C·T, Ψ the parameters that are trained (4 for frozen ones); of attention
// the causal half.
inline double flops_per_token(const ModelShape& s, double trained, double frozen, int seq_len) {
  return 4 * frozen + 6 * trained + 6.0 * s.layers * double(s.channels) * seq_len;
}

// Rows [first, first + count) of a matrix.
struct Rows {
  int first, count;
  // The first of these rows in a matrix (rows, columns).
  template <class E>
  E* of(E* matrix, int columns) const {
    return matrix + size_t(first) * size_t(columns);
  }
};

// Layers [first, first + count) of a model.
struct Layers {
  int first, count;
  int end() const { return first + count; }
};

// How many ranks each kind of parallelism has. Order of the axes, fastest first: tp, cp, dp, pp (tensor, context, data
// and pipeline parallelism), so that tensor-parallel ranks are neighbours on one node. Islands come last: each is a mesh
// of its own (islands.cuh), of neighbouring ranks.
struct MeshShape {
  int tp = 1, cp = 1, dp = 1, pp = 1, islands = 1;
  int ranks() const { return of_an_island() * islands; }
  int of_an_island() const { return tp * cp * dp * pp; }
  int batches() const { return dp * islands; }  // ranks, or groups of them, that train on samples of their own
};

// Where a rank stands among them.
struct MeshPlace {
  int tp, cp, dp, pp, island;
};

inline MeshPlace place_of(int rank, const MeshShape& shape) {
  return {rank % shape.tp, rank / shape.tp % shape.cp, rank / (shape.tp * shape.cp) % shape.dp,
          rank / (shape.tp * shape.cp * shape.dp) % shape.pp, rank / shape.of_an_island()};
}
