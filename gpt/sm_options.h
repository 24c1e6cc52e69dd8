// How many multiprocessors (SMs) collectives may take, and how many the kernels leave to them
// (kernels/device/multiprocessors.h says why). CTAs are CUDA blocks, as NCCL calls them: each takes an SM.
#pragma once

#include "gpt/shapes.h"

struct SmOptions {
  static constexpr int for_layers = 16;  // most CTAs of a collective of tp or cp, which share a stream; and of the ends
  static constexpr int for_data = 8;     // of the data group, and of the islands
  static constexpr int for_lane = 2, lanes = 4;
  static constexpr int for_world = 4;    // sums of a few numbers
  static constexpr int nccl_takes = 24;  // where NCCL chooses on H100 and H200

  int ctas = -1;    // --ctas: for_layers and for_data; −1: the numbers above, 0: NCCL chooses
  int margin = -1;  // --sm-margin; −1: the most SMs that the groups may take
  bool beside_islands = false;  // --outer-delay: islands exchange messages in every pass

  // 0: NCCL chooses.
  int of_layers() const { return ctas < 0 ? for_layers : ctas; }
  int of_data() const { return ctas < 0 ? for_data : ctas; }

  // The SMs that a limit of CTAs stands for.
  static int taken(int most) { return most == 0 ? nccl_takes : most; }

  // The SMs that kernels leave free in a pass. sends_data: weights or gradients may travel meanwhile.
  int margin_in_pass(const MeshShape& mesh, bool sends_data) const {
    int sum = mesh.tp * mesh.cp > 1 ? taken(of_layers()) : 0;
    if (mesh.cp * mesh.dp > 1 && sends_data) sum += taken(of_data());
    if (mesh.islands > 1 && beside_islands) sum += taken(of_data());
    if (mesh.pp > 1) sum += lanes * for_lane;
    return margin < 0 || sum == 0 ? sum : margin;
  }
};
