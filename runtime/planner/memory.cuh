// The memory of each rank. A plan is made by the code that trains: it builds the model of each rank on a mesh without
// processes (gpt/mesh.cuh). The model lays out its memory, as always, in an arena that only counts, and stops there.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "extensions/pipeline/pipeline.h"
#include "gpt/base/text.h"
#include "gpt/steps_in_flight.cuh"
#include "kernels/gemm/gemm_shape.h"
#include "runtime/checkpoints/checkpoint_writer.h"
#include "runtime/checkpoints/checkpoints.cuh"
#include "runtime/planner/plan.h"

// The layers of this rank: "1 to 3, 7 to 9".
inline std::string layers_text(const TensorList& list) {
  return joined(list.chunks(), [](const Layers& chunk) {
    return std::to_string(chunk.first + 1) + (chunk.count > 1 ? " to " + std::to_string(chunk.end()) : "");
  });
}

// others: other memory on the device; snapshot: bytes of the host's memory for checkpoints, 0: none.
inline RankPlan rank_plan(const Model& model, const Mesh& mesh, int rank, const std::vector<MemoryCategory>& others,
                          size_t snapshot) {
  RankPlan plan = {rank, mesh.place(), layers_text(model.tensors()), model.options().slots,
                   model.memory().categories(), model.host_memory().categories()};
  plan.memory.insert(plan.memory.end(), others.begin(), others.end());
  if (snapshot) plan.host.push_back({"snapshot", snapshot});
  plan.host.push_back({"batches", Batches::memory_for(model).pinned_bytes()});
  plan.host.push_back({"results", StepsInFlight::pinned_bytes()});
  return plan;
}

// Workspaces on a GPU that is not here. cuDNN reports its workspace for attention in 16 bits only after it has planned
// on its device; on Hopper it is 2·B·NH·T² bytes (dev/README.md), for the rows and heads that a rank has during
// attention.
inline LibraryWorkspaces workspaces_elsewhere(const StepOptions& o) {
  const bool is_ring = o.cp_method == "ring";
  const bool by_cudnn = o.dtype != "fp32" && (o.attention == "auto" || o.attention == "cudnn");
  const size_t B = size_t(o.micro_batch), NH = size_t(o.shape.heads / o.mesh.tp / (is_ring ? 1 : o.mesh.cp));
  const size_t T = size_t(o.seq_len / (is_ring ? o.mesh.cp : 1));
  return {gpu_gemm_workspace_bytes, by_cudnn ? 2 * B * NH * T * T : 0};
}

// NCCL's buffers on one GPU of several: for each group, for each block of its collectives (CTA) one for the ring and
// two for the tree, of 9.2 MiB each for NCCL's three protocols (4 MiB Simple, 4.7 LL128, 0.5 LL: NCCL 2.30's init.cc);
// for each rank that sends to it one more.
inline size_t nccl_bytes(const StepOptions& o) {
  const auto& [tp, cp, dp, pp, islands] = o.mesh;
  const int layers = SmOptions::taken(o.sms.of_layers()), data = SmOptions::taken(o.sms.of_data());
  const int lane = SmOptions::for_lane;
  int buffers = o.mesh.ranks() > 1 ? 3 * SmOptions::for_world : 0;
  if (const int N = cp * dp, inside = o.ranks_inside(); N > 1)  // inside hosts and between them there are two groups more
    buffers += ((inside > 1 ? 9 : 3) + (o.compressed_bits() ? N / inside - 1 : 0)) * data;
  if (islands > 1) buffers += (3 + islands - 1) * data;
  if (tp > 1) buffers += 3 * layers;
  if (cp > 1) buffers += (3 + (o.cp_method == "ring" ? 1 : cp - 1)) * layers;
  if (pp > 1) buffers += 3 * layers + SmOptions::lanes * 3 * lane + SmOptions::lanes / 2 * lane;
  return size_t(buffers * 9.2 * (1 << 20));
}

// These options with another step.
inline Options options_with(Options o, const StepOptions& step) {
  static_cast<StepOptions&>(o) = step;
  return o;
}

// The memory that a rank would allocate, on this device or elsewhere. Options are complete (complete_options,
// decide_shape).
inline RankPlan planned(const Options& o, int rank, bool is_here = true) {
  Mesh mesh(o.mesh, rank, o.sms, o.ranks_inside());
  const auto elsewhere = is_here ? std::nullopt : std::optional(workspaces_elsewhere(o));
  const std::unique_ptr<Model> model = build_model_to_train(o, mesh, nullptr, elsewhere);
  const size_t chunk = RankGroup::chunk_bytes_for(o.mesh.ranks());
  const size_t floats = o.out.empty() ? 0 : CheckpointWriter::snapshot_floats(written_blocks(*model, chunk), saved_states(o, mesh));
  DeviceMemory batches;
  batches.add("batches", [&](Arena& arena) { Batches::memory_for(*model).lay_out(arena); });
  std::vector<MemoryCategory> others = batches.categories();
  // On a device that is not here, libraries would have allocated this before the model reads the free memory. With
  // several ranks all of their kernels are loaded at the start, which takes one or two GiB.
  if (!is_here && o.mesh.ranks() > 1) others.insert(others.end(), {{"NCCL", nccl_bytes(o)}, {"modules", size_t(1) << 30}});
  return rank_plan(*model, mesh, rank, others, floats * sizeof(float));
}

// The bytes of the largest of all stages' first ranks; others of a stage gather some KiB more or less for a checkpoint.
// From the third stage on, a stage with the same layers as the one before is skipped (unless it is the last), because
// it holds no more micro-batches. Stops at the first that needs more than `enough`.
// host_room: bytes that a rank may offload; if they are too few, the result is more than any device has.
inline size_t largest_bytes(const Options& o, bool is_here, size_t enough = SIZE_MAX, size_t host_room = SIZE_MAX) {
  const MeshShape& mesh = o.mesh;
  const std::vector<Layers> dealt = deal_layers(o.shape, mesh.pp, o.pp_chunks);
  const auto same_layers = [&](int stage, int other) {
    for (size_t i = 0; i < dealt.size(); i += size_t(mesh.pp))
      if (dealt[i + size_t(stage)].count != dealt[i + size_t(other)].count) return false;
    return true;
  };
  size_t most = 0;
  for (int stage = 0; stage < mesh.pp && most <= enough; ++stage)
    if (stage < 2 || stage + 1 == mesh.pp || !same_layers(stage, stage - 1)) {
      const RankPlan plan = planned(o, stage * mesh.of_an_island() / mesh.pp, is_here);
      most = std::max(most, plan.offloaded() > host_room ? SIZE_MAX : plan.total());
    }
  return most;
}

// The bytes that the largest rank needs at least: the state of the blocks' parameters, averaged over all stages; whole
// blocks that ZeRO gathers and reduces; and the blocks' activations for backward on the first stage, which holds the
// most micro-batches.
inline size_t least_bytes(const StepOptions& s) {
  const auto& [tp, cp, dp, pp, islands] = s.mesh;
  const int A = s.micro_batches();
  const double w = s.dtype == "fp32" ? 4 : 2, C = s.shape.channels, layers = s.shape.layers / pp;
  const bool trained = !s.lora.is_on();  // adapters are few
  const double weights = w, gradients = !trained || s.offloads("gradients") ? 0 : 4 * (1 + s.delay);  // bytes a parameter
  const double errors = trained && s.compresses_gradients() && dp * cp > 1 ? 4 : 0;
  const double optimizer = !trained || s.offloads("optimizer") ? 0 : optimizer_bytes(s);
  const int pieces = dp * cp;
  const auto split_from = [&](int stage, double bytes) { return s.zero >= stage ? bytes / pieces : bytes; };
  const double state = errors + split_from(3, weights) + split_from(2, gradients) + split_from(1, optimizer);
  const double gathered = s.zero < 3 ? 0 : s.fp8 && s.fp8_scale == "tensor" ? 1 : weights;  // codes may be all that is gathered
  const double whole = (s.zero >= 2 || s.offloads("gradients") ? 4 * trained : 0) + gathered;
  const double slots = pp == 1 ? 1 : s.pp_schedule == "gpipe" ? A : std::min(A, pp);
  // of C elements for each row
  const double kept = s.recompute == "none" ? 16 : s.recompute == "gelu" ? 12 : s.offloads("activations") ? 0 : 1;
  const double rows = slots * layers * s.micro_batch * s.seq_len / cp;
  return size_t(12 * C * C * s.shape.layers / pp / tp * state + std::min(layers, 2.) * 12 * C * C / tp * whole +
                rows * kept * C * w / tp);
}

// This rank's device and its free memory. sharers: the ranks that will share a device that uses the host's memory; 1:
// they have divided it already, or are not on this host.
inline PlannedDevice this_device(const std::string& name, int sharers = 1) {
  size_t free_bytes = 0, total_bytes = 0;
  CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  const bool is_shared = device_attribute(cudaDevAttrIntegrated);
  const size_t host_room = is_shared ? 0 : host_memory_room(sharers);
  return {name, free_bytes / size_t(is_shared ? sharers : 1), memory_reserve(), true, host_room};
}

inline Plan plan_of_memory(const Options& o, const PlannedDevice& device) {
  Plan plan = {device, {}};
  for (int number = 0; number < o.mesh.ranks(); ++number) {
    RankPlan& rank = plan.ranks.emplace_back(planned(o, number, device.is_here));
    // Without room for a snapshot a checkpoint leaves the device chunk by chunk (runtime/checkpoints/checkpoint_writer.h).
    if (total_of(rank.host) > device.room_on_host()) std::erase_if(rank.host, [](auto& taken) { return taken.name == "snapshot"; });
  }
  return plan;
}

// On rank 0: the memory that all ranks have allocated; on others only this rank's own. Collective.
inline Plan gathered_plan(Ranks& ranks, const PlannedDevice& device, const RankPlan& own) {
  const std::vector<std::string> all = ranks.gather(text_of(own));
  if (ranks.rank() > 0) return {device, {own}};
  Plan plan = {device, {}};
  for (const std::string& text : all) plan.ranks.push_back(rank_plan_of(text));
  return plan;
}
