// Products leave multiprocessors (SMs) to the collectives that are under way (gpt/sm_options.h). The cuBLASLt made for
// tests notes, whenever a product runs, how many SMs the product's kernel and the collectives that have begun take together.
#include "gpt/stage.cuh"
#include "test/ranks/training.cuh"

namespace {

constexpr int all_sms = 132;
[[maybe_unused]] const int an_h100 = setenv("GPT_CPU_MULTIPROCESSORS", "132", 1);  // read at the first CUDA call

[[maybe_unused]] const bool has_fp32 =
    model_makers().emplace("fp32", [](const ModelOptions& options, Mesh& mesh, cudaStream_t stream) -> std::unique_ptr<Model> {
      return std::make_unique<StageModel<float>>(options, mesh, stream);
    }).second;

struct Case {
  MeshShape mesh;
  int zero = 0, chunks = 1;  // several: interleaved
};
const std::vector<Case> cases_of_four = {
    {{.tp = 4}}, {{.cp = 4}}, {{.dp = 4}}, {{.dp = 4}, 1}, {{.dp = 4}, 2}, {{.dp = 4}, 3}, {{.pp = 4}},
    {{.tp = 2, .dp = 2}, 1}, {{.tp = 2, .pp = 2}}, {{.cp = 2, .pp = 2}, 3}, {{.dp = 2, .pp = 2}, 1}, {{.dp = 2, .pp = 2}, 1, 2},
    {{.dp = 2, .pp = 2}, 0, 2}};

// The most that were taken on any rank in these steps, and after all_steps of them in a validation.
int most_taken(const Case& c, const SmOptions& sms, size_t steps) {
  pipeline_schedule = c.chunks > 1 ? "interleaved" : "1f1b";
  Mesh mesh(ranks().all, c.mesh, ranks().mesh.device(), {.sms = sms});
  fake_library = {};
  train<float>({.shape = {4, 4, 32, 64, 8}, .micro_batch = 2, .tp_pieces = 2, .chunks = c.chunks, .store = {.zero = c.zero}}, mesh, steps);
  const std::vector<float> all = all_values({float(fake_library.most_taken)});
  return int(std::ranges::max(all));
}

}  // namespace

TEST_CASE("a product and the collectives under way never take more SMs than there are") {
  for (size_t number = 0; number < cases_of_four.size(); ++number)
    for (const int ctas : {-1, 0, 5}) {
      if (!has_turn(int(number))) continue;
      const Case& c = cases_of_four[number];
      const bool validates = ctas < 0 && has_turn(int(number), 4);
      INFO("tp ", c.mesh.tp, ", cp ", c.mesh.cp, ", pp ", c.mesh.pp, ", ZeRO ", c.zero, ", chunks ", c.chunks, ", CTAs ", ctas);
      CHECK(most_taken(c, {.ctas = ctas}, validates ? all_steps : 2) <= all_sms);
    }
}

TEST_CASE("without a margin they do") {
  for (const Case& c : in_turn(cases_of_four)) {
    INFO("tp ", c.mesh.tp, ", cp ", c.mesh.cp, ", pp ", c.mesh.pp, ", ZeRO ", c.zero, ", chunks ", c.chunks);
    CHECK(most_taken(c, {.margin = 0}, 2) > all_sms);
  }
}

TEST_CASE("the margin is the sum of what may be under way in a pass") {
  const auto margin = [](const MeshShape& mesh, bool sends_data, const SmOptions& sms = {}) {
    return sms.margin_in_pass(mesh, sends_data);
  };
  CHECK(margin({}, true) == 0);
  CHECK(margin({.tp = 8}, true) == 16);
  CHECK(margin({.tp = 2, .cp = 4}, false) == 16);  // they share a stream
  CHECK(margin({.tp = 2, .cp = 4}, true) == 24);   // ranks that split samples are data-parallel ones, too
  CHECK(margin({.dp = 8}, true) == 8);
  CHECK(margin({.dp = 8}, false) == 0);
  CHECK(margin({.tp = 2, .dp = 2, .pp = 4}, true) == 16 + 8 + 8);
  CHECK(margin({.tp = 2, .dp = 2}, true, {.ctas = 4}) == 8);
  CHECK(margin({.tp = 2, .dp = 2}, true, {.ctas = 0}) == 48);
  CHECK(margin({.dp = 8}, true, {.margin = 20}) == 20);
  CHECK(margin({.dp = 8}, false, {.margin = 20}) == 0);  // nothing travels
  CHECK(margin({.dp = 2, .islands = 4}, false) == 0);
  CHECK(margin({.dp = 2, .islands = 4}, false, {.beside_islands = true}) == 8);
  CHECK(margin({.dp = 2, .islands = 4}, true, {.beside_islands = true}) == 16);
  CHECK(margin({.dp = 2}, false, {.beside_islands = true}) == 0);
}
