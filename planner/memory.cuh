// What a rank takes of memory. A plan is made by the code that trains: it builds the model of each rank on a mesh that is only
// imagined (parallel/mesh.cuh). The model lays out its memory, as always, in an arena that counts, and stops there.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "planner/plan.h"
#include "runtime/checkpoint_writer.h"
#include "training/checkpoints.cuh"
#include "training/steps_in_flight.cuh"

// The layers of this rank: "1 to 3, 7 to 9".
inline std::string layers_text(const TensorList& list) {
  std::string text;
  for (const Layers& chunk : list.chunks())
    text += (text.empty() ? "" : ", ") + std::to_string(chunk.first + 1) +
            (chunk.count > 1 ? " to " + std::to_string(chunk.end()) : "");
  return text;
}

// batches: the device's memory of batch buffers; pinned_batches: the host's; snapshot: of checkpoints, 0: none.
inline RankPlan rank_plan(const Model& model, const Mesh& mesh, int rank, const std::vector<MemoryCategory>& batches,
                          size_t pinned_batches, size_t snapshot) {
  RankPlan plan = {rank, mesh.place(), layers_text(model.tensors()), model.options().slots, model.memory().categories(), {}};
  plan.memory.insert(plan.memory.end(), batches.begin(), batches.end());
  if (snapshot) plan.host.push_back({"snapshot", snapshot});
  plan.host.push_back({"batches", pinned_batches});
  plan.host.push_back({"results", StepsInFlight::pinned_bytes()});
  return plan;
}

// What this rank has allocated.
inline RankPlan allocated(const Model& model, const Mesh& mesh, int rank, const BatchBuffers& buffers, size_t snapshot) {
  return rank_plan(model, mesh, rank, buffers.memory().categories(), Batches::memory_for(model).pinned_bytes(), snapshot);
}

// What a rank would allocate. Options are complete (complete_options), for the number of ranks of this mesh.
inline RankPlan planned(const Options& o, const ModelShape& shape, const MeshShape& mesh_shape, int rank) {
  Mesh mesh(mesh_shape, rank);
  const std::unique_ptr<Model> model = build_model_to_train(o, shape, mesh, nullptr);
  const BatchMemory batches = Batches::memory_for(*model);
  DeviceMemory counted;
  counted.add("batches", [&](Arena& arena) { batches.lay_out(arena); });
  const size_t chunk = RankGroup::chunk_bytes_for(mesh_shape.ranks());
  const size_t floats = o.out.empty() ? 0 : CheckpointWriter::snapshot_floats(written_slices(*model, chunk));
  return rank_plan(*model, mesh, rank, counted.categories(), batches.pinned_bytes(), floats * sizeof(float));
}

// The device that this rank has, with what is free of it now.
inline PlannedDevice this_device(const std::string& name) {
  size_t free_bytes = 0, total_bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  return {name, free_bytes, memory_reserve()};
}

inline Plan plan_of_memory(const Options& o, const ModelShape& shape, const MeshShape& mesh_shape, const PlannedDevice& device) {
  Plan plan = {device, {}};
  for (int rank = 0; rank < mesh_shape.ranks(); ++rank) plan.ranks.push_back(planned(o, shape, mesh_shape, rank));
  return plan;
}

// What all ranks have allocated, on rank 0; on others only what this rank has. Collective.
inline Plan gathered_plan(Control& control, const PlannedDevice& device, const RankPlan& own) {
  const std::vector<std::string> all = control.gather(text_of(own));
  if (control.rank() > 0) return {device, {own}};
  Plan plan = {device, {}};
  for (const std::string& text : all) plan.ranks.push_back(rank_plan_of(text));
  return plan;
}
