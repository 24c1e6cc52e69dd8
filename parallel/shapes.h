// The sizes of a model and of a mesh.
#pragma once

struct ModelShape {
  // Upper limits: far larger than any model in use, and small enough that no number of bytes reaches 2^64.
  static constexpr int most_layers = 1000, most_channels = 100'000, most_vocabulary = 10'000'000,
                       most_positions = 1 << 24;
  int layers, heads, channels, vocabulary, positions;
  bool operator==(const ModelShape&) const = default;

  int head_size() const { return channels / heads; }
};

// Layers [first, first + count) of a model.
struct Layers {
  int first, count;
  int end() const { return first + count; }
};

// How many ranks each kind of parallelism has. Order of the axes, fastest first: tp, cp, dp, pp (tensor, context, data
// and pipeline parallelism), so that tensor-parallel ranks are neighbours on one node.
struct MeshShape {
  int tp = 1, cp = 1, dp = 1, pp = 1;
  int ranks() const { return tp * cp * dp * pp; }
};

// Where a rank stands among them.
struct MeshPlace {
  int tp, cp, dp, pp;
};

inline MeshPlace place_of(int rank, const MeshShape& shape) {
  return {rank % shape.tp, rank / shape.tp % shape.cp, rank / (shape.tp * shape.cp) % shape.dp,
          rank / (shape.tp * shape.cp * shape.dp)};
}
