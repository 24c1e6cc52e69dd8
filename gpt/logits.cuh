// Logits for the host, which compares them with a reference, or draws text from them.
// Its events are tested by test_meshes, test_tensor_parallel.
#pragma once

#include <algorithm>
#include <iterator>
#include <vector>

#include "gpt/ends.cuh"
#include "gpt/mesh.cuh"

// Logits (count,V) of some rows of the last batch, the same on all ranks. x (r,C): the input of the head on this rank;
// null: it is not on the last stage. logit_row (N·Vs): memory for a row of all ranks' tokens. cp_rank: of the
// context-parallel rank that has the rows. Waits for the device.
template <class Float>
std::vector<float> logits_of_rows(Head<Float>& head, const LayerContext<Float>& on, Mesh& mesh, const Float* x,
                                  const Rows& rows, Float* logit_row, int cp_rank) {
  const size_t V = size_t(on.list.shape().vocabulary), Vs = size_t(on.list.vocabulary_rows());
  const int N = on.list.tp(), stages = mesh.shape().pp;
  std::vector<float> all;
  std::vector<Float> row(V);
  // The shards of all ranks lie one after another; padding comes last.
  const auto take = [&](Float* whole) {
    if (stages > 1 || mesh.cp().size() > 1) {  // broadcast from the first rank of the last stage
      Communicator& world = mesh.world();
      world.after(on.stream);
      world.broadcast(whole, size_t(N) * Vs, world.size() - world.size() / stages + cp_rank * N);
      world.wait_for_all(on.stream);
    }
    copy_and_wait(row.data(), whole, V, cudaMemcpyDeviceToHost, on.stream);
    std::ranges::transform(row, std::back_inserter(all), [](Float value) { return to_float(value); });
  };
  if (x) head.each_row_of_logits(x, rows, [&](Float* logits) { take(head.of_all_tokens(logit_row, logits)); });
  else for (int i = 0; i < rows.count; ++i) take(logit_row);
  return all;
}
