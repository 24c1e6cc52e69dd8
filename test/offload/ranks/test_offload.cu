// Offload on meshes of all kinds (extensions/offload/offload.cuh): it changes where arrays lie and when they are copied, and no bit
// of any result.
// For remove_events.sh: 2 ranks, *rank alone,gradients: the same bits
#include "test/ranks/formulas.cuh"
#include "test/turns.h"

namespace {

constexpr ModelShape narrow = {5, 2, 32, 700, 8};  // the embedding is larger than a block
constexpr size_t steps = 4;

[[maybe_unused]] const bool all_random = files_with_random_tensors().insert(__FILE__).second;
int rank_count() { return ranks().all.size(); }

// Meshes of all ranks, and what else their runs differ in.
struct Way {
  MeshShape mesh;
  int zero = 0;
  std::string schedule = "1f1b";
  int chunks = 1;
};
std::vector<Way> ways() {
  const int N = rank_count();
  std::vector<Way> all;
  for (int zero : {0, 1, 2, 3}) all.push_back({{.dp = N}, zero});
  if (N % 2) return all;
  all.push_back({{.tp = 2, .dp = N / 2}, 1});
  all.push_back({{.cp = 2, .dp = N / 2}, 3});
  for (const char* schedule : {"1f1b", "gpipe"}) all.push_back({{.dp = N / 2, .pp = 2}, schedule[0] == 'g' ? 0 : 2, schedule});
  all.push_back({{.dp = N / 2, .pp = 2}, 1, "interleaved", 2});
  return all;
}

template <class Work>
void for_ways(Work work) {
  const std::vector<Way> all = ways();
  for (size_t i = 0; i < all.size(); ++i) {
    if (!has_turn(int(i))) continue;
    const Way& way = all[i];
    CAPTURE(way.mesh.tp);
    CAPTURE(way.mesh.cp);
    CAPTURE(way.mesh.pp);
    CAPTURE(way.zero);
    CAPTURE(way.schedule);
    Mesh mesh(ranks().mesh, way.mesh);
    pipeline_schedule = way.schedule;
    const ModelOptions options = {.shape = narrow, .micro_batch = 1, .recompute = Recompute::block, .chunks = way.chunks,
                                  .store = {.zero = way.zero, .narrow_moments = i % 2 == 1}};
    work(mesh, options);
  }
  pipeline_schedule = "1f1b";
}

constexpr OffloadOptions everything = {.optimizer = true, .activations = true}, gradients_too = {true, true, true};
ModelOptions with(ModelOptions options, const OffloadOptions& offload) { return options.store.offload = offload, options; }

// What this rank keeps after some steps, and the last norm. In between other moments are loaded, as a rollback does, when
// what was there is on its way to the next update already.
template <class T>
std::vector<float> state_after(const ModelOptions& options, Mesh& mesh) {
  const std::unique_ptr<Model> model = model_of<T>(options, mesh);
  for (size_t step = 0; step < steps; ++step) {
    train_step(*model, mesh, step);
    if (step == 1) validation_loss(*model, mesh);  // whose passes take the same buffers
    const TensorDescriptor& wte = model->tensors().tensors()[0];
    if (step == 2) model->trained_store().copy_in({&wte, 0, wte.count()}, State::first_moment, std::vector<float>(wte.count(), 0.01f));
  }
  // What was updated last, before anything else has waited for it.
  std::vector<float> all = values_of(model->trained_store(), model->trained_store().kept_slices().back(), State::second_moment);
  const std::vector<float> state = own_state(model->trained_store());
  all.insert(all.end(), state.begin(), state.end());
  all.push_back(model->gradient_summary().norm);
  return all;
}

size_t bytes_of(const CategorizedMemory& memory, const std::string& name) {
  for (const auto& category : memory.categories())
    if (category.name == name) return category.bytes;
  return 0;
}

}  // namespace

TEST_CASE_TEMPLATE("the same bits as without offload", T, float, __nv_bfloat16) {
  for_ways([](Mesh& mesh, const ModelOptions& options) {
    const std::vector<float> wanted = state_after<T>(options, mesh);
    CHECK(std::isfinite(wanted.back()));
    CHECK(state_after<T>(with(options, everything), mesh) == wanted);
  });
}

TEST_CASE("the same bits on each rank alone") {
  Mesh alone;
  const ModelOptions options = {.shape = narrow, .micro_batch = global_batch() / 3, .recompute = Recompute::block};
  CHECK(state_after<float>(with(options, everything), alone) == state_after<float>(options, alone));
}

// With ZeRO 3 the sums over micro-steps are made in windows that come from the host. On one rank they are added as there: a kernel
// that adds to earlier gradients itself may round otherwise, so there the bits are the same with one micro-batch only.
TEST_CASE("gradients: the same bits") {
  Mesh mesh(ranks().mesh, {.dp = rank_count()}), alone;
  for (int micro_batch : {1, 2}) {
    const ModelOptions options = {.shape = narrow, .micro_batch = micro_batch, .recompute = Recompute::block, .store = {.zero = 3}};
    CHECK(state_after<float>(with(options, gradients_too), mesh) == state_after<float>(options, mesh));
  }
  const ModelOptions once = {.shape = narrow, .micro_batch = global_batch(), .recompute = Recompute::block};
  CHECK(state_after<float>(with(once, gradients_too), alone) == state_after<float>(once, alone));
}

TEST_CASE_TEMPLATE("gradients: every storage type, ranks of cp, and gradients that travel in 16 bits", T, float, __nv_bfloat16) {
  std::vector<MeshShape> shapes = {{.dp = rank_count()}};
  if (rank_count() % 2 == 0) shapes.push_back({.cp = 2, .dp = rank_count() / 2});
  for (const MeshShape& shape : shapes)
    for (bool casts : {false, true}) {
      if (!has_turn(int(casts) + int(shape.cp == 2))) continue;
      Mesh mesh(ranks().mesh, shape);
      const ModelOptions options = {.shape = narrow, .micro_batch = 1, .recompute = Recompute::block,
                                    .store = {.zero = 3, .narrow_moments = casts, .cast_gradients = casts}};
      CHECK(state_after<T>(with(options, gradients_too), mesh) == state_after<T>(options, mesh));
    }
}

TEST_CASE("gradients: one rank's curve with several micro-batches; bytes of both memories") {
  Mesh alone, many(ranks().mesh, {.dp = rank_count()});
  const ModelOptions plain = {.shape = narrow, .micro_batch = global_batch() / 4, .recompute = Recompute::block, .store = {.zero = 3}};
  const Curve wanted = train<float>(plain, alone), curve = train<float>(with(plain, gradients_too), alone);
  CHECK_WITHIN("losses", largest_difference(curve.losses, wanted.losses), 1e-5);
  CHECK_WITHIN("norms", largest_difference(curve.norms, wanted.norms), 1e-5);
  for (Mesh* mesh : {&alone, &many}) {
    const int micro_batch = global_batch() / 2 / mesh->data().size();
    ModelOptions options = plain;
    options.micro_batch = micro_batch;
    const std::unique_ptr<Model> one = model_of<float>(with(options, everything), *mesh), all = model_of<float>(with(options, gradients_too), *mesh);
    const Shards& shards = all->trained_store().shards();
    CHECK(bytes_of(all->host_memory(), "gradients") == round_up(4 * shards.all_pieces(), size_t(256)));
    const size_t windows = 2 * round_up(4 * shards.piece(1), size_t(256)), kept = round_up(4 * shards.all_pieces(), size_t(256));
    CHECK(bytes_of(all->memory(), "gradients") - windows == bytes_of(one->memory(), "gradients") - kept);
    CHECK(bytes_of(all->memory(), "optimizer") == bytes_of(one->memory(), "optimizer"));
  }
}

TEST_CASE("the same bits: weights without masters, fp16, and each kind of offload alone") {
  Mesh mesh(ranks().mesh, {.dp = rank_count()});
  for (const OffloadOptions& offload : {OffloadOptions{.optimizer = true}, OffloadOptions{.activations = true}})
    for (bool narrow_moments : {false, true}) {
      CAPTURE(offload.optimizer);
      CAPTURE(narrow_moments);
      ModelOptions options = {.shape = narrow, .micro_batch = 2, .recompute = Recompute::block,
                              .store = {.zero = 1, .narrow_moments = narrow_moments, .loss_scale = {.value = 1024}}};
      CHECK(state_after<__half>(with(options, offload), mesh) == state_after<__half>(options, mesh));
      options.store.stochastic_rounding = true;
      CHECK(state_after<__nv_bfloat16>(with(options, offload), mesh) == state_after<__nv_bfloat16>(options, mesh));
    }
}

TEST_CASE_TEMPLATE("memory: two windows and two inputs on the device, all of it on the host", T, float, __nv_bfloat16) {
  for_ways([](Mesh& mesh, const ModelOptions& options) {
    const std::unique_ptr<Model> plain = model_of<T>(options, mesh), model = model_of<T>(with(options, everything), mesh);
    const Shards& shards = model->trained_store().shards();
    const bool is_piece = options.store.zero > 0 && mesh.data().size() > 1;
    const auto kept = [&](int unit) { return is_piece ? shards.piece(unit) : shards.whole(unit); };
    size_t all = 0, window = 0;
    for (int unit = 0; unit < shards.units(); ++unit) {
      all += kept(unit);
      if (unit > 0) window = std::max(window, kept(unit));
    }
    const size_t masters = std::is_same_v<T, float> ? 0 : 4, moment = options.store.narrow_moments ? 2 : 4;
    const auto rounded = [&](size_t count) {  // arrays begin on multiples of 256 bytes
      return round_up(count * masters, size_t(256)) + 2 * round_up(count * moment, size_t(256));
    };
    CHECK(bytes_of(model->memory(), "optimizer") == 2 * rounded(window));
    CHECK(bytes_of(model->host_memory(), "optimizer") == rounded(all));
    CHECK(bytes_of(plain->memory(), "optimizer") == rounded(all));
    CHECK(plain->host_memory().categories().empty());
    size_t layers = 0;
    for (const Layers& chunk : model->tensors().chunks()) layers = std::max(layers, size_t(chunk.count));
    const size_t inputs = size_t(model->options().slots) * layers;
    const size_t rows = size_t(options.micro_batch) * narrow.positions / mesh.shape().cp / mesh.shape().tp;
    const size_t input = rows * narrow.channels * sizeof(T);
    CHECK(bytes_of(model->host_memory(), "activations") == round_up(inputs * input, size_t(256)));
    const size_t rest = bytes_of(plain->memory(), "activations") - inputs * round_up(input, size_t(256));
    CHECK(bytes_of(model->memory(), "activations") == rest + 2 * round_up(input, size_t(256)));
  });
}

#ifndef __NVCC__
TEST_CASE("a step copies the state once each way, and each input once out and once back") {
  Mesh alone;
  const auto copied = [&](const OffloadOptions& offload) {
    const ModelOptions options = {.shape = narrow, .micro_batch = global_batch() / 4, .recompute = Recompute::block};
    const std::unique_ptr<Model> model = model_of<__nv_bfloat16>(with(options, offload), alone);
    train_step(*model, alone, 0);
    const size_t before = cpu::counts.copied_bytes;
    train_step(*model, alone, 1);
    return cpu::counts.copied_bytes - before;
  };
  const size_t plain = copied({}), state = 12 * Shards(TensorList(narrow), 1, 0).all_whole();
  const size_t input = size_t(global_batch() / 4 * narrow.positions * narrow.channels) * 2, micro_batches = 4;
  CHECK(copied({.optimizer = true}) == plain + 2 * state);
  // The last two are still on the device when backward begins.
  CHECK(copied({.activations = true}) == plain + micro_batches * (5 + 3) * input);
}
#endif

TEST_CASE("a NaN in a weight, or a gradient, of any rank: all ranks leave the update out, and go on") {
  Mesh mesh(ranks().mesh, {.dp = rank_count()});
  for (bool narrow_moments : {false, true}) {
    const std::unique_ptr<Model> model = model_of<__nv_bfloat16>(
        {.shape = narrow, .micro_batch = 1, .recompute = Recompute::block,
         .store = {.zero = 1, .narrow_moments = narrow_moments, .offload = everything}}, mesh);
    check_nan_on_each_rank(*model, mesh, 2, 2, [](int rank) { return rank % 2 == 0; });
  }
}

TEST_CASE("too little memory of the host is refused with what is needed and what there is") {
  PinnedMemory memory;
  memory.add("optimizer", [](Arena& arena) { arena.take<float>(size_t(3) << 20); });
  std::string text;
  try {
    memory.allocate(memory_reserve() + (size_t(8) << 20));
  } catch (const std::exception& error) {
    text = error.what();
  }
  CHECK(text.find("12.0 MiB needed (optimizer 12.0 MiB), " + bytes_text(memory_reserve() + (size_t(8) << 20)) + " free for this rank, of which " +
                  bytes_text(memory_reserve()) + " stay free") != text.npos);
}
