// How many ranks each kind of parallelism has, and where a rank stands among them.
//
// Order of the axes, fastest first: tp, cp, dp, pp (tensor, context, data and pipeline parallelism), so that tensor
// parallel ranks are neighbours on one node.
#pragma once

struct MeshShape {
  int tp = 1, cp = 1, dp = 1, pp = 1;
  int ranks() const { return tp * cp * dp * pp; }
};

struct MeshPlace {
  int tp, cp, dp, pp;
};

inline MeshPlace place_of(int rank, const MeshShape& shape) {
  return {rank % shape.tp, rank / shape.tp % shape.cp, rank / (shape.tp * shape.cp) % shape.dp,
          rank / (shape.tp * shape.cp * shape.dp)};
}
