// What a search takes a candidate's memory for is what a plan finds, byte for byte; and how many candidates a second it tries.
#include <cstdio>
#include <random>

#include <doctest/doctest.h>

#include "kernels/library_attention.h"
#include "planner/candidate_memory.cuh"
#include "planner/search.h"

namespace {

Options options_of(const ModelShape& shape, const char* dtype, int seq_len, int global_batch) {
  Options o;
  o.dtype = dtype, o.seq_len = seq_len, o.global_batch = global_batch, o.micro_batch = 1, o.plan = true, o.schedule.steps = 1;
  o.vocabulary = shape.vocabulary;
  return o;
}

// Of all ranks.
size_t planned_bytes(const Options& o, const PlannedStep& step, bool is_here) {
  size_t most = 0;
  for (int stage = 0; stage < step.mesh.pp; ++stage)
    most = std::max(most, planned(options_with(o, step), step.shape, step.mesh, stage * step.mesh.ranks() / step.mesh.pp, is_here).total());
  return most;
}

void check_some(const ModelShape& shape, const char* dtype, int seq_len, int global_batch, int ranks, size_t sample_every, bool is_here, int some) {
  Options o = options_of(shape, dtype, seq_len, global_batch);
  o.sample_every = sample_every;
  CandidateMemory memory(o, shape, is_here);
  std::vector<PlannedStep> all;
  for_each_candidate(planned_step(o, shape, {}), ranks, [&](const PlannedStep& step) { all.push_back(step); });
  REQUIRE(!all.empty());
  std::mt19937 random(3);
  for (int i = 0; i < some; ++i) {
    const PlannedStep& step = all[random() % all.size()];
    CAPTURE(step.mesh.tp);
    CAPTURE(step.mesh.cp);
    CAPTURE(step.mesh.dp);
    CAPTURE(step.mesh.pp);
    CAPTURE(step.pp_schedule);
    CAPTURE(step.pp_chunks);
    CAPTURE(step.zero);
    CAPTURE(step.micro_batch);
    CAPTURE(step.recompute);
    CAPTURE(step.cp_method);
    CHECK(memory(step) == planned_bytes(o, step, is_here));
  }
}

}  // namespace

TEST_CASE("a candidate's memory is its plan's, byte for byte") {
  const char* dtype = model_makers().begin()->first.c_str();
  check_some({13, 12, 204, 211, 96}, dtype, 96, 24, 24, 0, false, 150);
  check_some({9, 8, 136, 1000, 64}, dtype, 64, 16, 16, 2, false, 100);
  check_some({7, 4, 64, 50257, 64}, dtype, 64, 12, 6, 0, !has_library_attention, 50);  // a head that takes as long as 65 layers
}

TEST_CASE("candidates a second") {
  const ModelShape shape = {40, 40, 5120, 50257, 2048};
  const Options o = options_of(shape, model_makers().begin()->first.c_str(), 2048, 512);
  Cluster cluster;
  cluster.device = load_cluster("data/clusters/8xh100.json").device;
  cluster.devices_per_host = 8, cluster.hosts = 16;
  cluster.inside = {"NVLink", 450e9, 3e-6}, cluster.between = {"InfiniBand", 400e9, 5e-6};
  CandidateMemory memory(o, shape, false);
  SearchResult result;
  const Clock::time_point begin = Clock::now();
  search(result, planned_step(o, shape, {}), cluster, 128, size_t(78) << 30, std::ref(memory));
  const double seconds = seconds_since(begin);
  MESSAGE(result.candidates, " candidates in ", seconds, " s: ", size_t(double(result.candidates) / seconds), " a second");
  CHECK(result.too_large < result.candidates);
  CHECK(result.fastest.size() == 10);
}
