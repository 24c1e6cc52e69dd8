// Products in eight bits on meshes of all kinds (extensions/fp8/fp8.cuh). A scale is of the rows and the part of a weight
// that a rank multiplies: data-parallel ranks and pipelines have the codes of one rank, tensor-parallel and
// context-parallel ranks have other ones, which are as good.
#include "test/ranks/formulas.cuh"
#include "test/turns.h"

namespace {

constexpr ModelShape wide = {4, 4, 64, 211, 32};  // two of its blocks in eight bits
const ModelOptions in_fp8 = {.shape = wide, .micro_batch = 2, .store = {.rooms = Fp8Options{.is_on = true}}};

[[maybe_unused]] const bool all_random = files_with_random_tensors().insert(__FILE__).second;
const char* const no_fp8 = "this GPU has no tensor cores for eight bits";
int rank_count() { return ranks().all.size(); }

ModelOptions with_zero(int zero) {
  ModelOptions options = in_fp8;
  options.store.zero = zero;
  return options;
}

// Meshes of all ranks, and what else their runs differ in.
struct Way {
  MeshShape mesh;
  ModelOptions options;
  std::string schedule = "1f1b";
};
std::vector<Way> ways() {
  const int N = rank_count();
  std::vector<Way> all;
  for (int zero : {0, 1, 2, 3}) {
    all.push_back({{.dp = N}, with_zero(zero)});
    // Other maxima are known in backward then; the codes are the same.
    all.back().options.recompute = zero == 1 ? Recompute::gelu : zero == 2 ? Recompute::block : Recompute::none;
  }
  for (int pieces : {1, 2}) {
    all.push_back({{.tp = 2, .dp = N / 2}, with_zero(pieces == 1 ? 0 : 3)});
    all.back().options.tp_pieces = pieces;
    all.push_back({{.cp = 2, .dp = N / 2}, with_zero(pieces)});
    all.back().options.recompute = pieces == 1 ? Recompute::gelu : Recompute::block;
    if (pieces == 2) method_of(all.back().options) = ContextMethod::ulysses;
  }
  for (const char* schedule : {"1f1b", "zb"}) all.push_back({{.dp = N / 2, .pp = 2}, in_fp8, schedule});
  if (N >= 4) all.push_back({{.tp = 2, .dp = N / 4, .pp = 2}, with_zero(1), "zb"});
  return all;
}

// Calls work(mesh, options) with each way whose turn it is.
template <class Work>
void for_ways(Work work) {
  for (const Way& way : in_turn(ways())) {
    CAPTURE(way.mesh.tp);
    CAPTURE(way.mesh.cp);
    CAPTURE(way.mesh.dp);
    CAPTURE(way.mesh.pp);
    CAPTURE(way.options.store.zero);
    CAPTURE(way.options.tp_pieces);
    Mesh mesh(ranks().mesh, way.mesh);
    pipeline_schedule = way.schedule;
    work(mesh, way.options);
  }
  pipeline_schedule = "1f1b";
}

// ‖gradients of a first step − wanted‖ / ‖wanted‖, of all tensors together.
double first_gradients_off_by(Model& model, const std::vector<float>& wanted) {
  double squares = 0, norm = 0;
  for (const Difference& tensor : differences(model, wanted)) squares += tensor.squares, norm += tensor.wanted;
  return std::sqrt(squares / norm);
}

}  // namespace

// With the codes of one rank only the order of float sums over micro-batches differs: 24 additions of 3e-8, at random
// 1.5e-7. With other codes gradients are another approximation of fp32's, as near to them as one rank's: the bound is
// twice that.
TEST_CASE("the gradients of a first step: one rank's where it has its codes, else as near to fp32's") {
  if (!has_fp8()) return skip(no_fp8);
  for (const int kind : {0, 1, 2}) {
    if (kind == 2 && !has_fp8_tiles()) continue;
    const Fp8Options fp8 = {.is_on = true, .gradients = kind == 1 ? Fp8Format::e4m3 : Fp8Format::e5m2, .tiles = kind == 2};
    const auto with_fp8 = [&](ModelOptions options) { return options.store.rooms = fp8, options; };
    CAPTURE(kind);
    const std::vector<float> wide_ones = first_step_of_one_rank<float>(wide, State::gradient);
    const std::vector<float> bf16_ones = first_step_of_one_rank<__nv_bfloat16>(wide, State::gradient);
    const std::vector<float> wanted = first_step_of_one_rank<__nv_bfloat16>(wide, State::gradient, with_fp8(with_zero(0)).store);
    double squares = 0, bf16_squares = 0, norm = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      squares += std::pow(double(wanted[i]) - wide_ones[i], 2), norm += std::pow(double(wide_ones[i]), 2);
      bf16_squares += std::pow(double(bf16_ones[i]) - wide_ones[i], 2);
    }
    const double own = std::sqrt(squares / norm), bf16 = std::sqrt(bf16_squares / norm);
    CHECK(own > 2 * bf16);  // eight bits were used
    for_ways([&](Mesh& mesh, const ModelOptions& options) {
      const std::unique_ptr<Model> model = model_of<__nv_bfloat16>(with_fp8(options), mesh);
      train_step(*model, mesh, 0);
      const bool same_codes = mesh.shape().tp == 1 && mesh.shape().cp == 1;
      if (same_codes) CHECK_WITHIN("same codes", first_gradients_off_by(*model, wanted), 5e-7);
      else CHECK_WITHIN("other codes", first_gradients_off_by(*model, wide_ones), 2 * own);
    });
  }
}

// As check_bf16_curves: twice one rank's distance from fp32's curves. From one rank's own curves meshes are no further
// than bf16's are from fp32's, also doubled. And one rank in eight bits is at most four times as far from fp32 as one
// in bf16: half of the blocks round operands by 2.6 % (the root-mean-square), where bf16 rounds them by 0.17 %, but
// beside roundings of all tensors; codes of weights that an update has changed would be further off.
//
// Without masters (--stochastic-rounding) codes are cast from weights in bf16, which all meshes round alike.
TEST_CASE("curves are as near to fp32's as one rank's, and near to one rank's within what bf16 is off") {
  if (!has_fp8()) return skip(no_fp8);
  constexpr int seeds = 12;
  std::vector<Curve> wanted(seeds), bf16(seeds), own(seeds), own_without_masters(seeds), found, found_without_masters;
  Mesh alone;
  const auto seeded = [](ModelOptions options, int seed) { return options.store.seed = uint64_t(seed), options; };
  const auto without_masters = [](ModelOptions options) { return options.store.stochastic_rounding = true, options; };
  for (int seed = ranks().all.rank(); seed < seeds; seed += rank_count()) {  // the ranks share the work
    ModelOptions plain = seeded(in_fp8, seed);
    plain.store.rooms = {};
    wanted[size_t(seed)] = train<float>(plain, alone, some_steps);
    bf16[size_t(seed)] = train<__nv_bfloat16>(plain, alone, some_steps);
    own[size_t(seed)] = train<__nv_bfloat16>(seeded(in_fp8, seed), alone, some_steps);
    own_without_masters[size_t(seed)] = train<__nv_bfloat16>(without_masters(seeded(in_fp8, seed)), alone, some_steps);
  }
  const std::vector<Way> all = ways();
  for (int seed = 0; seed < seeds; ++seed) {
    const Way& way = all[size_t(seed) % all.size()];
    Mesh mesh(ranks().mesh, way.mesh);
    pipeline_schedule = way.schedule;
    found.push_back(train<__nv_bfloat16>(seeded(way.options, seed), mesh, some_steps));
    found_without_masters.push_back(train<__nv_bfloat16>(without_masters(seeded(way.options, seed)), mesh, some_steps));
  }
  pipeline_schedule = "1f1b";
  for (std::vector<Curve>* curves : {&wanted, &bf16, &own, &own_without_masters})
    for (Curve& curve : *curves)
      for (std::vector<float>* values : {&curve.losses, &curve.norms}) *values = all_values(*values);
  for (auto part : {&Curve::losses, &Curve::norms}) {
    const std::string name = part == &Curve::losses ? "losses" : "norms";
    CHECK_WITHIN(name, distance(found, part, wanted), 2 * distance(own, part, wanted));
    CHECK_WITHIN(name + " beside one rank's", distance(found, part, own), 2 * distance(bf16, part, wanted));
    CHECK(distance(own_without_masters, part, own) > 0);
    CHECK_WITHIN(name + " without masters", distance(found_without_masters, part, own_without_masters), 2 * distance(bf16, part, wanted));
    CHECK_WITHIN(name + " beside bf16's", distance(own, part, wanted), 4 * distance(bf16, part, wanted));
  }
}

TEST_CASE("one rank launches graphs, which cast the weights of their step") {
  if (!has_fp8()) return skip(no_fp8);
  std::vector<float> both = from_rank_0([] {
    Mesh alone;
    const Curve recorded = train<__nv_bfloat16>(in_fp8, alone);
    Profiler::instance().enabled = true;
    const Curve launched = train<__nv_bfloat16>(in_fp8, alone);
    Profiler::instance().enabled = false;
    Profiler::instance().collect();
    std::vector<float> all = recorded.losses;
    all.insert(all.end(), launched.losses.begin(), launched.losses.end());
    all.push_back(float(recorded.graphs));
    return all;
  });
  const auto half = both.begin() + long(both.size() / 2);
  CHECK(std::equal(both.begin(), half, half));
#ifndef __NVCC__
  CHECK(both.back() > 0);
#endif
}

// What the profiler has counted in a first step of one rank.
template <class Count>
std::vector<float> counted_in_a_step(const ModelOptions& options, Count count) {
  return from_rank_0([&] {
    Mesh alone;
    const std::unique_ptr<Model> model = model_of<__nv_bfloat16>(options, alone);
    Profiler::instance().enabled = true;
    train_step(*model, alone, 0);
    Profiler::instance().enabled = false;
    auto totals = Profiler::instance().collect();
    std::vector<float> all = count(totals);
    for (const char* name : {"fp8_maximum", "cast_fp8", "cast_transpose_fp8"}) all.push_back(float(totals[name].calls));
    return all;
  });
}

// A block of a micro-batch casts four inputs forward, and four gradients and the inputs again backward, transposed. Nothing is
// read for a maximum alone but the block's four weights, once before the first step, and after each.
TEST_CASE("launches: no maximum is looked for where the launch that wrote a tensor has left it") {
  if (!has_fp8()) return skip(no_fp8);
  for (const Recompute recompute : {Recompute::none, Recompute::gelu, Recompute::block}) {
    ModelOptions options = in_fp8;
    options.recompute = recompute;
    const std::vector<float> counts = counted_in_a_step(options, [](auto& totals) {
      return std::vector{float(totals["attention_backward"].calls), float(totals["fp8_maximum"].bytes)};
    });
    const float micro_steps = counts[0] / 4, C = wide.channels, again = recompute == Recompute::block;
    CHECK(counts[1] == 2 * (2 * 2 * 12 * C * C));
    CHECK(counts[2] == 2 * 2 * 4);
    CHECK(counts[3] == micro_steps * 2 * (4 + 3 * again));
    CHECK(counts[4] == micro_steps * 2 * 8 + 2 * 2 * 4);
  }
}

TEST_CASE("launches with tiles: a cast for each tensor and nothing else") {
  if (!has_fp8_tiles()) return skip("this GPU has no products by tiles");
  ModelOptions options = in_fp8;
  options.store.rooms.of<Fp8Options>().tiles = true;
  const std::vector<float> counts = counted_in_a_step(options, [](auto& totals) {
    return std::vector{float(totals["attention_backward"].calls), float(totals["cast_tiles_fp8"].calls)};
  });
  const float micro_steps = counts[0] / 4;
  CHECK(counts[1] == micro_steps * 2 * (4 + 8) + 2 * 2 * 4);
  for (size_t i = 2; i < 5; ++i) CHECK(counts[i] == 0);
}

TEST_CASE("ZeRO 3 gathers codes where a matrix has one scale: the bits of ZeRO 2, the bytes of the formula") {
  if (!has_fp8()) return skip(no_fp8);
  const int N = rank_count();
  for (const MeshShape& shape : {MeshShape{.dp = N}, MeshShape{.tp = 2, .dp = N / 2}, MeshShape{.cp = 2, .dp = N / 2}, MeshShape{.dp = N / 2, .pp = 2}})
    for (const int kept : {0, 1})
      for (const bool tiles : {false, true}) {
        if (tiles && !has_fp8_tiles()) continue;
        if (shape.dp < N && (tiles || kept == (shape.pp == 2))) continue;  // one kind of each mesh is enough
        CAPTURE(shape.tp);
        CAPTURE(shape.pp);
        CAPTURE(kept);
        CAPTURE(tiles);
        Mesh mesh(ranks().mesh, shape);
        const auto trained = [&](int zero) {
          ModelOptions options = with_zero(zero);
          options.store.rooms = Fp8Options{.is_on = true, .kept = kept, .tiles = tiles};
          options.recompute = kept == 1 ? Recompute::block : Recompute::none;  // which transposes in backward, too
          return std::pair(train<__nv_bfloat16>(options, mesh, some_steps), options);
        };
        const auto [wanted, _] = trained(2);
        const auto [found, options] = trained(3);
        CHECK(found.losses == wanted.losses);
        CHECK(found.norms == wanted.norms);
        const std::unique_ptr<Model> model = model_of<__nv_bfloat16>(options, mesh);
        const TensorList& list = model->tensors();
        const Shards& shards = model->trained_store().shards();
        check_bytes(found, bytes_of_mesh<__nv_bfloat16>(options, mesh, list, shards));
        // A ring of gradients, and one of weights, whose blocks have half the memory if all are gathered as codes.
        const double rest = double(shards.whole(0) + shards.whole(list.final_norm_unit()));
        const double block = double(shards.whole(list.chunks()[0].first + 1));
        check_memory(found, {{"unit buffers", rest * (4 + 2) + 2 * block * (4 + (kept == 0 && !tiles ? 1 : 2))}}, 8);
      }
}

TEST_CASE("memory: two bytes for each parameter of the blocks in eight bits, with ZeRO 3 one of one; and two matrices of rows") {
  if (!has_fp8()) return skip(no_fp8);
  for_ways([&](Mesh& mesh, const ModelOptions& options) {
    const std::unique_ptr<Model> model = model_of<__nv_bfloat16>(options, mesh);
    const double C = wide.channels, tp = mesh.shape().tp, rows = double(options.micro_batch) * wide.positions / mesh.shape().cp;
    const bool is_ring = options.store.zero == 3 && mesh.data().size() > 1;
    const double blocks = is_ring ? 0.5 : mesh.shape().pp == 2 ? 1 : 2;
    size_t weights = 0, operands = 0;
    for (const auto& [name, bytes] : model->memory().categories()) {
      if (name == "fp8 weights") weights = bytes;
      if (name == "fp8 operands") operands = bytes;
    }
    const size_t scales = size_t(shared_with_codes<__nv_bfloat16>(model->tensors(), 2));
    CHECK(weights == 2 * blocks * 12 * C * C / tp + double(is_ring ? 2 * round_up(scales, size_t(256)) : 256));  // and four scales of a block
    const double maxima = operands - 2 * rows * std::max(4 * C / tp, C);
    CHECK(maxima > 0);
    CHECK(maxima <= 4096);
  });
}

TEST_CASE("a NaN in a weight, or a gradient, of any rank: all ranks leave the update out, and go on") {
  if (!has_fp8()) return skip(no_fp8);
  Mesh mesh(ranks().mesh, {.tp = 2, .dp = rank_count() / 2});
  const std::unique_ptr<Model> model = model_of<__nv_bfloat16>(with_zero(1), mesh);
  check_nan_on_each_rank(*model, mesh, 2, 2, [](int rank) { return rank % 2 == 0; });
}

TEST_CASE("a NaN in a weight of any rank's piece: all ranks gather codes of it, leave the update out, and go on") {
  if (!has_fp8()) return skip(no_fp8);
  Mesh mesh(ranks().mesh, {.dp = rank_count()});
  const std::unique_ptr<Model> model = model_of<__nv_bfloat16>(with_zero(3), mesh);
  check_nan_on_each_rank(*model, mesh, 2, 2, [](int) { return true; });
}

TEST_CASE("the same mesh gives the same bits") {
  if (!has_fp8()) return skip(no_fp8);
  for_ways([&](Mesh& mesh, const ModelOptions& options) {
    if (mesh.shape().tp == 1 && options.store.zero < 3) return;
    const Curve one = train<__nv_bfloat16>(options, mesh, some_steps), other = train<__nv_bfloat16>(options, mesh, some_steps);
    CHECK(one.losses == other.losses);
    CHECK(one.norms == other.norms);
  });
}
