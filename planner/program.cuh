// --plan, as the program does it.
#pragma once

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "planner/memory.cuh"
#include "training/telemetry.cuh"

inline MeshShape mesh_shape_of(const Options& o, int ranks) {
  MeshShape shape = {.tp = o.tp, .cp = o.cp, .pp = o.pp};
  shape.dp = ranks / shape.ranks();
  return shape;
}

inline PlannedStep planned_step(const Options& o, const ModelShape& shape, const MeshShape& mesh) {
  return {shape, mesh, o.seq_len, o.micro_batch, o.global_batch, o.dtype, o.reduce_dtype, o.recompute, o.zero, o.tp_pieces,
          o.cp_method, o.pp_schedule, o.pp_chunks};
}

// What is planned for: the device of each rank, and the cluster, if its rates are known.
struct Target {
  PlannedDevice device;
  std::optional<Cluster> cluster;
};

inline Target target_of(const Options& o, const std::optional<Cluster>& cluster, int ranks) {
  if (cluster) return {{cluster->device.name, size_t(cluster->device.memory), size_t(1) << 30, false}, cluster};
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
  Target target = {this_device(properties.name, ranks), {}};
  if (!o.ceilings.empty()) target.cluster = cluster_of(load_ceilings(o.ceilings, o.dtype, properties.name), ranks);
  return target;
}

// The bytes of the largest of all ranks. Those of a stage are alike.
inline size_t largest_bytes(const Options& o, const ModelShape& shape, const MeshShape& mesh, bool is_here) {
  size_t most = 0;
  for (int rank = 0; rank < mesh.ranks(); rank += mesh.ranks() / mesh.pp)
    most = std::max(most, planned(o, shape, mesh, rank, is_here).total());
  return most;
}

// Which change of one option saves the most, if a plan for so many ranks does not fit.
inline std::string advice(const Options& o, const ModelShape& shape, int ranks, const Plan& plan) {
  std::vector<std::pair<std::string, Options>> changes;
  const auto change = [&](const std::string& text, auto member, auto value) {
    changes.emplace_back(text, o);
    changes.back().second.*member = value;
  };
  if (o.micro_batch % 2 == 0) change("--micro-batch " + std::to_string(o.micro_batch / 2), &Options::micro_batch, o.micro_batch / 2);
  for (const char* kind : {"gelu", "block"}) change(std::string("--recompute ") + kind, &Options::recompute, std::string(kind));
  for (int stage = o.zero + 1; stage <= 3; ++stage) change("--zero " + std::to_string(stage), &Options::zero, stage);
  change("--tp " + std::to_string(2 * o.tp), &Options::tp, 2 * o.tp);
  change("--pp " + std::to_string(2 * o.pp), &Options::pp, 2 * o.pp);
  const size_t now = plan.largest().total(), room = plan.device.bytes - std::min(plan.device.bytes, plan.device.reserve);
  size_t least = now;
  std::string best;
  for (auto& [text, changed] : changes) {
    const std::string refused = attempt([&] { complete_options(changed, ranks), check_mesh(changed, shape); });
    if (!refused.empty()) continue;
    const size_t bytes = largest_bytes(changed, shape, mesh_shape_of(changed, ranks), plan.device.is_here);
    if (bytes < least) least = bytes, best = text;
  }
  if (best.empty()) return "; more ranks would help";
  return "; " + best + " would help most, by " + bytes_text(now - least) + (least <= room ? ", and it fits" : ", and not enough");
}

// Prints the plan of training with these options. ranks: those that were started.
inline void print_plan(Options& o, int ranks) {
  std::optional<Cluster> cluster;
  if (const std::string problem = attempt([&] { if (!o.cluster.empty()) cluster = find_cluster(o.cluster); }); !problem.empty())
    usage_error(problem);
  if (cluster && o.ranks > cluster->devices())
    usage_error("--ranks ", o.ranks, ": the cluster ", cluster->name, " has ", cluster->devices(), " devices; lower it");
  if (o.ranks || cluster) ranks = o.ranks ? o.ranks : cluster->devices();
  complete_options(o, ranks);
  const MeshShape mesh = mesh_shape_of(o, ranks);
  const ModelShape shape = decide_shape(o, o.init, false, o.train.empty() ? Datasets() : open_data(o));
  const Target target = target_of(o, cluster, ranks);
  Plan plan = plan_of_memory(o, shape, mesh, target.device);
  if (target.cluster) plan.time = planned_time(planned_step(o, shape, mesh), *target.cluster);
  if (!plan.fits()) plan.advice = advice(o, shape, ranks, plan);
  if (o.json) {
    std::printf("%s\n", text_of(plan).c_str());
    return;
  }
  describe_model(o, TensorList(shape));
  describe_mesh(o, mesh);
  describe_batch(o);
  std::printf("memory    %s\nfits      %s\n", memory_text(plan).c_str(), fit_text(plan).c_str());
  if (plan.time) std::printf("%s\n", time_text(*plan.time).c_str());
}
