// What a search computes of a candidate: its memory, which is its largest rank's, and a lower bound of it. And how many
// candidates it tries per second.
#include <cstdio>
#include <random>

#include <doctest/doctest.h>

#include "runtime/planner/program.cuh"

namespace {

Options options_of(const ModelShape& shape, const char* dtype, int seq_len, int global_batch) {
  Options o;
  o.dtype = dtype, o.seq_len = seq_len, o.global_batch = global_batch, o.micro_batch = 1, o.plan = true, o.schedule.steps = 1;
  o.shape = shape, o.wanted.vocabulary = shape.vocabulary;
  return o;
}

void check_some(const ModelShape& shape, const char* dtype, int seq_len, int global_batch, int ranks, size_t sample_every, int some) {
  Options o = options_of(shape, dtype, seq_len, global_batch);
  o.sample_every = sample_every;
  std::vector<StepOptions> all;
  for_each_candidate(o, ranks, [&](const StepOptions& step) { all.push_back(step); });
  REQUIRE(!all.empty());
  std::mt19937 random(3);
  for (int i = 0; i < some; ++i) {
    StepOptions step = all[random() % all.size()];
    if (i % 3 == 1) step.moments = "bf16";
    if (i % 2 == 1) step.offload = step.recompute == "block" ? "optimizer,activations" : "optimizer";
    const Options chosen = options_with(o, step);
    CAPTURE(options_text(step));
    // The most of all ranks. Within a stage they differ only by what they gather for a checkpoint.
    size_t most = 0, checkpoint_buffer = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const RankPlan plan = planned(chosen, rank, false);
      most = std::max(most, plan.total());
      for (const auto& [name, bytes] : plan.memory)
        if (name == "checkpoint buffer") checkpoint_buffer = std::max(checkpoint_buffer, bytes);
    }
    const size_t largest = largest_bytes(chosen, false);
    CHECK(largest <= most);
    CHECK(largest + checkpoint_buffer >= most);
    CHECK(largest_bytes(chosen, false, largest - 1) > largest - 1);
    CHECK(least_bytes(step) <= most);
    CHECK(least_bytes(step) > 0);
  }
}

}  // namespace

TEST_CASE("a candidate's memory is its largest rank's, and never less than the bound") {
  const char* dtype = model_makers().begin()->first.c_str();
  check_some({13, 12, 204, 211, 96}, dtype, 96, 24, 24, 0, 100);
  check_some({9, 8, 136, 1000, 64}, dtype, 64, 16, 16, 2, 70);
  check_some({7, 4, 64, 50257, 64}, dtype, 64, 12, 6, 0, 50);  // a head that takes as long as 65 layers
}

TEST_CASE("the bound is near what large models take") {
  const ModelShape shape = {40, 40, 5120, 50257, 2048};
  Options o = options_of(shape, model_makers().begin()->first.c_str(), 2048, 512);
  for (const MeshShape& mesh : {MeshShape{8, 1, 16, 1}, MeshShape{4, 1, 4, 8}})
    for (int zero : {0, 1, 3})
      for (const char* recompute : {"none", "gelu", "block"}) {
        o.mesh = mesh, o.zero = zero, o.recompute = recompute, o.micro_batch = 4;
        const double most = double(largest_bytes(o, false));
        CAPTURE(options_text(o));
        CHECK(double(least_bytes(o)) <= most);
        CHECK(double(least_bytes(o)) > 0.4 * most);
      }
}

TEST_CASE("candidates a second") {
  const ModelShape shape = {40, 40, 5120, 50257, 2048};
  const Options o = options_of(shape, model_makers().begin()->first.c_str(), 2048, 512);
  const Cluster cluster = load_cluster("runtime/planner/clusters/16x8xh100.json");
  const Clock::time_point begin = Clock::now();
  const SearchResult result = search_meshes(o, device_of(cluster), parts_of(cluster));
  const double seconds = seconds_since(begin);
  MESSAGE(result.candidates, " candidates in ", seconds, " s: ", size_t(double(result.candidates) / seconds), " a second");
  CHECK(result.too_large < result.candidates);
  CHECK(result.fastest.size() == 10);
  for (const Candidate& c : result.fastest) CHECK(c.bytes <= device_of(cluster).room());
}
