// --plan --cluster ONE,OTHER: training on two kinds of devices at once, the data-parallel ranks of ONE before those of OTHER.
// Ranks of a kind take equal numbers of micro-batches (--shares), and the step is as long as that of the kind that is done
// last. Collectives go over the slower of the links between hosts.
#pragma once

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "runtime/planner/program.cuh"

// Does --cluster name two?
inline bool is_mix(const Options& o) {
  return o.of<PlanOptions>().cluster.find(',') != o.of<PlanOptions>().cluster.npos && !std::filesystem::exists(o.of<PlanOptions>().cluster);
}

struct Kind {
  Cluster cluster;  // as if all ranks of the job had its devices
  int ranks;        // data-parallel ones, each of tp · cp devices

  // Seconds of a step in which each rank has `micro_batches`.
  double seconds(StepOptions step, int micro_batches) const {
    step.shares.clear();
    adapt(step, cluster);
    step.global_batch = step.micro_batch * step.mesh.dp * micro_batches;
    return forecast(step, cluster).seconds;
  }
};

inline std::array<Kind, 2> kinds_of(const Options& o, const std::array<Cluster, 2>& clusters) {
  Link between = clusters[0].between.bandwidth > 0 ? clusters[0].between : clusters[1].between;
  if (clusters[1].between.bandwidth > 0) between.bandwidth = std::min(between.bandwidth, clusters[1].between.bandwidth);
  between.latency = std::max(clusters[0].between.latency, clusters[1].between.latency);
  if (between.bandwidth == 0)
    usage_error("--cluster ", o.of<PlanOptions>().cluster, ": neither says what connects hosts: write links.between into one of the files");
  std::array<Kind, 2> kinds;
  for (size_t i = 0; i < 2; ++i) {
    const int together = o.mesh.tp * o.mesh.cp;
    if (clusters[i].is_shared() || clusters[i].devices() % together != 0)
      usage_error("--cluster ", o.of<PlanOptions>().cluster, ": the ", clusters[i].devices(), " devices of ", clusters[i].name, " must be GPUs, and a multiple of the ",
                  together, " ranks of --tp and --cp");
    kinds[i] = {clusters[i], clusters[i].devices() / together};
    kinds[i].cluster.hosts = ceil_div(o.mesh.ranks(), clusters[i].devices_per_host);
    kinds[i].cluster.between = between;
  }
  return kinds;
}

inline void print_mix(Options& o) {
  const size_t comma = o.of<PlanOptions>().cluster.find(',');
  const std::array clusters = {find_cluster(o.of<PlanOptions>().cluster.substr(0, comma)), find_cluster(o.of<PlanOptions>().cluster.substr(comma + 1))};
  if (!o.of<PlanOptions>().mesh.empty() || o.of<PlanOptions>().has_goal() || o.of<PlanOptions>().json || o.of<PlanOptions>().ranks || !o.of<PlanOptions>().recipe.empty())
    usage_error("--cluster ", o.of<PlanOptions>().cluster, ", two kinds of devices: without --mesh auto, --days, --budget, --json, --ranks and --recipe");
  if (o.mesh.pp > 1) usage_error("--cluster ", o.of<PlanOptions>().cluster, ", two kinds of devices: without --pp");
  for (const Cluster& cluster : clusters) require_fp8(o, cluster.device);
  complete_options(o, clusters[0].devices() + clusters[1].devices());
  decide_shape(o, o.init, false, open_data(o));
  const std::array<Kind, 2> kinds = kinds_of(o, clusters);
  if (o.measures_shares) {
    std::vector<double> seconds;  // of a micro-batch, by rank
    for (const Kind& kind : kinds)
      seconds.insert(seconds.end(), size_t(kind.ranks), kind.seconds(o, 2) - kind.seconds(o, 1));
    o.shares = fair_counts(seconds, o.global_batch / o.micro_batch);
  }
  describe_model(o);
  describe_mesh(o);
  describe_batch(o);
  const Deal deal = o.deal();
  double step = 0, even = 0;
  int rank = 0;
  for (const Kind& kind : kinds) {
    int most = 0;
    for (const int end = rank + kind.ranks; rank < end; ++rank)  // goes on from the kind before
      most = std::max(most, deal.of_rank(rank));
    const double seconds = kind.seconds(o, most);
    step = std::max(step, seconds);
    even = std::max(even, kind.seconds(o, ceil_div(deal.all(), o.mesh.dp)));
    Options of_kind = o;
    adapt(of_kind, kind.cluster);
    const Plan plan = plan_of_memory(of_kind, device_of(kind.cluster));
    std::printf("kind      %d x %s: %d micro-batch%s at most, %.1f ms; fits %s\n", kind.ranks * o.mesh.tp * o.mesh.cp,
                kind.cluster.device.name.c_str(), most, most == 1 ? "" : "es", 1e3 * seconds, fit_text(plan).c_str());
  }
  std::printf("step      %.1f ms, %s tokens/s; with equal shares %.1f ms, %.2f times as long\n", 1e3 * step,
              with_commas(o.tokens() / step).c_str(), 1e3 * even, even / step);
}
