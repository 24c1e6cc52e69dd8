// Tensor parallelism beside one rank: exchanged rows exactly, training within the rounding of sums in another order.
// For remove_events.sh: 4 ranks, rows are*,the gradients*,*few tokens*
#include "test/ranks/formulas.cuh"
#include "test/ranks/recorded_calls.cuh"

#include <numeric>

#include "extensions/tensor_parallel/tensor_parallel.cuh"

namespace {

// Heads that many numbers of ranks divide; head sizes that nothing divides. Of 211 tokens four ranks have 128, 83, 0, 0, of
// 129 two have 128 and 1: shards that end early, and shards of padding only.
constexpr ModelShape eight_heads = {8, 8, 40, 211, 32}, six_heads = {3, 6, 54, 211, 36}, few_tokens = {3, 8, 48, 129, 16};

// Zeros and ones would hide a bias that is added twice.
[[maybe_unused]] const bool all_random = files_with_random_tensors().insert(__FILE__).second;

int rank_count() { return ranks().all.size(); }
const ModelShape& shape_for_ranks() { return rank_count() % 3 ? eight_heads : six_heads; }
const ModelShape& small_shape() { return rank_count() % 3 ? few_tokens : six_heads; }
ModelShape with_layers(ModelShape shape, int layers) {
  shape.layers = layers;
  return shape;
}

// Meshes of all ranks with tp ranks that share layers, for every tp > 1 that divides both their number and the heads.
std::vector<MeshShape> mesh_shapes(const ModelShape& shape) {
  std::vector<MeshShape> shapes;
  for (int tp = 2; tp <= rank_count(); ++tp)
    if (rank_count() % tp == 0 && shape.heads % tp == 0) shapes.push_back({.tp = tp, .dp = rank_count() / tp});
  return shapes;
}

// Calls work(mesh) with each of these meshes.
template <class Work>
void for_meshes(const ModelShape& shape, Work work) {
  for (const MeshShape& mesh_shape : mesh_shapes(shape)) {
    CAPTURE(shape.heads);
    CAPTURE(mesh_shape.tp);
    Mesh mesh(ranks().mesh, mesh_shape);
    work(mesh);
  }
}

// What runs may differ in, in rotation: four turns in a row have every ZeRO stage and number of pieces, twelve turns
// each of these with every kind of recomputation. Steps have two and four micro-batches.
ModelOptions options_on(const ModelShape& shape, Mesh& mesh, int turn) {
  const int micro_steps = turn / 2 % 2 ? 4 : 2;
  return {.shape = shape, .micro_batch = global_batch() / (mesh.shape().dp * micro_steps),
          .recompute = Recompute(turn % 3), .tp_pieces = 1 + (turn + turn / 4) % 4, .logit_chunks = turn % 2 ? 3 : 1, .store = {.zero = turn % 4}};
}

}  // namespace

TEST_CASE("pieces of rows cover them, and every rank has as many of each") {
  for (int ranks : {1, 2, 3, 8})
    for (int own : {1, 2, 5, 64})
      for (int pieces : {1, 2, 4, 7}) {
        int next = 0;
        for (const Rows& piece : cut_rows(own * ranks, ranks, pieces)) {
          CHECK(piece.first == next);
          CHECK(piece.count > 0);
          CHECK(piece.count % ranks == 0);
          next += piece.count;
        }
        CHECK(next == own * ranks);
      }
}

// What travels in small pieces at the end of a step travels together: the gradients of all LayerNorms, and loss and norm.
TEST_CASE("a step adds up once over tp, and once over the world") {
  for_meshes(small_shape(), [&](Mesh& mesh) {
    for (int stage : {0, 1}) {
      CAPTURE(stage);
      const std::unique_ptr<Model> model = model_of<float>(small_shape(), mesh, 2, {.zero = stage});
      train_step(*model, mesh, 0);
      const uint64_t before = recorded_calls().back().sequence;
      const double operations = nccl_operations();
      train_step(*model, mesh, 1);
      std::map<std::string, int> sums;
      for (const FlightRecorder::Entry& entry : recorded_calls())
        if (entry.sequence > before && entry.name == std::string("all_reduce")) ++sums[entry.group];
      CHECK(sums["world"] == 1);
      if (stage == 0) CHECK(sums["tp"] == 1);
      else CHECK(sums["tp"] <= 1);  // a rank's pieces may have no LayerNorm
      const uint64_t recorded = recorded_calls().back().sequence - before;
      if (operations > 0) CHECK(nccl_operations() - operations == double(recorded));
    }
  });
}

TEST_CASE("rows are gathered in their natural order, and scattered sums are exact") {
  const int columns = 5, n = rank_count(), rows = 12 * n;
  Mesh mesh(ranks().mesh, {.tp = n});
  for (int pieces : {1, 2, 3, 4, 50}) {
    CAPTURE(pieces);
    TensorParallel<float> tp(mesh.tp(), pieces, test_stream());
    DeviceMemory memory;
    memory.add("exchange", [&](Arena& arena) { tp.lay_out(arena, rows, columns); });
    memory.allocate();
    tp.clear();
    // Element (row, column) of the gathered matrix is row·100 + column; own rows lie piece after piece.
    std::vector<float> mine;
    for (const Rows& piece : cut_rows(rows, n, pieces))
      for (int i = 0; i < piece.count / n; ++i)
        for (int column = 0; column < columns; ++column)
          mine.push_back(float((piece.first + tp.rank() * piece.count / n + i) * 100 + column));
    Buffer<float> own(mine), buffer(size_t(rows) * columns), copy(size_t(rows) * columns), sums(mine.size());
    const float* gathered = tp.gather_then(buffer, own, rows, columns, [&](const float* all, Rows piece) {
      CUDA_CHECK(cudaMemcpyAsync(piece.of(copy.data(), columns), piece.of(all, columns),
                                 size_t(piece.count) * columns * sizeof(float), cudaMemcpyDeviceToDevice, test_stream()));
    });
    CHECK(gathered == buffer.data());
    std::vector<float> wanted;
    for (int row = 0; row < rows; ++row)
      for (int column = 0; column < columns; ++column) wanted.push_back(float(row * 100 + column));
    CHECK(copy.get() == wanted);

    // Each rank's term is (rank + 1) times the matrix.
    Buffer<float> again(size_t(rows) * columns), late(mine.size());
    CUDA_CHECK(cudaMemcpyAsync(late, own, mine.size() * sizeof(float), cudaMemcpyDeviceToDevice, test_stream()));
    tp.start_gather(again, late, rows, columns);
    tp.start_scatter(sums, rows, columns, [&](float* out, Rows piece) {
      std::vector<float> term(piece.of(wanted.data(), columns), piece.of(wanted.data(), columns) + piece.count * columns);
      for (float& x : term) x *= float(tp.rank() + 1);
      copy_and_wait(piece.of(out, columns), term.data(), term.size(), cudaMemcpyHostToDevice, test_stream());
    });
    // What was gathered is there while the sums travel.
    CUDA_CHECK(cudaMemcpyAsync(copy, again, mine.size() * sizeof(float), cudaMemcpyDeviceToDevice, test_stream()));
    tp.finish_scatter();
    for (float& x : mine) x *= float(n * (n + 1) / 2);
    CHECK(sums.get() == mine);
    const std::vector<float> copied = copy.get();
    CHECK(std::equal(wanted.begin(), wanted.begin() + long(mine.size()), copied.begin()));
  }
}

// Eight layers for three steps, three layers for more: ten steps, and a validation, on the first mesh of each shape.
TEST_CASE("losses and norms equal one rank's, on every mesh") {
  int turn = rank_count();
  for (const ModelShape& shape : {shape_for_ranks(), few_tokens}) {
    const size_t most = shape.layers == 8 ? some_steps : all_steps;
    size_t steps = most;
    for_meshes(shape, [&](Mesh& mesh) {
      for (int run = 0; run < (shape.layers == 8 ? 1 : mesh.shape().dp > 1 ? 4 : 2); ++run, ++turn) {
        CAPTURE(turn);
        const Curve curve = train<float>(options_on(shape, mesh, turn), mesh, std::exchange(steps, some_steps));
        check_fp32_curve(curve, shape, most);
      }
    });
  }
}

// ---- gradients

TEST_CASE("the gradients of a first step equal one rank's, tensor by tensor") {
  const ModelShape& shape = shape_for_ranks();
  const std::vector<float> wanted = first_step_of_one_rank<float>(shape, State::gradient);
  const double wanted_norm = std::sqrt(std::inner_product(wanted.begin(), wanted.end(), wanted.begin(), 0.0));
  int turn = rank_count();
  for_meshes(shape, [&](Mesh& mesh) {
    for (int stage : {0, 3}) {
      ModelOptions options = options_on(shape, mesh, turn++);
      options.store.zero = stage;
      CAPTURE(stage);
      const std::unique_ptr<Model> model = model_of<float>(options, mesh);
      train_step(*model, mesh, 0);
      // Norms differ by no more than the norm of the difference, which of each tensor is within the bound.
      CHECK_WITHIN("norm", std::abs(model->gradient_summary().norm - wanted_norm), gradient_bound(shape) * wanted_norm);
      const std::vector<Difference> found = differences(*model, wanted);
      for (size_t i = 0; i < found.size(); ++i) {
        CAPTURE(model->tensors().tensors()[i].name);
        const double norm = std::sqrt(found[i].wanted);
        CHECK_WITHIN("gradients", std::sqrt(found[i].squares), gradient_bound(shape) * norm);
        CHECK_WITHIN("key third", std::sqrt(found[i].noise), gradient_bound(shape) * norm);
      }
    }
  });
}

// ---- logits

namespace {

// Logits of a whole batch; then, as in sampling, logits of a last token whose rows the ranks do not divide.
std::vector<std::vector<float>> logits_on(Mesh& mesh, int pieces) {
  const ModelShape& shape = small_shape();
  const ModelOptions options = {.shape = shape, .micro_batch = 2, .tp_pieces = pieces, .logit_chunks = 3};
  const std::unique_ptr<Model> model = model_of<float>(options, mesh);
  std::vector<int> tokens = sample_tokens(shape, 1);
  const std::vector<int> more = sample_tokens(shape, 2);
  tokens.insert(tokens.begin() + shape.positions, more.begin(), more.end());
  std::vector<std::vector<float>> logits = {batch_logits(*model, tokens.data())};
  BatchBuffers buffers(64, test_stream());
  for (int count : {5, 1}) {
    model->forward(buffers.send(tokens.data(), nullptr, 1, count, neighbours(count), round_up(count, mesh.tp().size())));
    logits.push_back(model->logits(count - 1, 1));
  }
  return logits;
}

}  // namespace

TEST_CASE("logits of a batch, and of a few tokens, equal one rank's") {
  Mesh alone;
  std::vector<std::vector<float>> wanted = logits_on(alone, 1);
  int pieces = 1;
  for_meshes(small_shape(), [&](Mesh& mesh) {
    const std::vector<std::vector<float>> actual = logits_on(mesh, pieces++);
    for (size_t i = 0; i < wanted.size(); ++i) {
      CAPTURE(i);
      check_logits(actual[i], wanted[i], logit_bound(small_shape()));
    }
  });
}

// ---- 16 bits

TEST_CASE("bf16: curves are as near to fp32's as one rank's") {
  const ModelShape shape = with_layers(shape_for_ranks(), 2);
  check_bf16_curves(shape, mesh_shapes(shape), options_on);
}

TEST_CASE("fp16: all ranks leave the same updates out, and have one loss scale") {
  int turn = rank_count();
  for_meshes(small_shape(), [&](Mesh& mesh) {
    CAPTURE(turn);
    check_loss_scale(options_on(small_shape(), mesh, turn++), mesh);
  });
}

// ---- decisions and copies

TEST_CASE("the same mesh gives the same bits") {
  int turn = rank_count();
  for_meshes(small_shape(), [&](Mesh& mesh) {
    const ModelOptions options = options_on(small_shape(), mesh, turn++);
    const Curve first = train<float>(options, mesh, some_steps), again = train<float>(options, mesh, some_steps);
    CHECK(again.losses == first.losses);
    CHECK(again.norms == first.norms);
  });
}

TEST_CASE_TEMPLATE("a NaN in a weight, or a gradient, of any rank: all ranks leave the update out, and go on", T, float,
                   __nv_bfloat16) {
  int turn = rank_count() + std::is_same_v<T, float>;
  const ModelShape shape = with_layers(small_shape(), 1);
  for_meshes(shape, [&](Mesh& mesh) {
    CAPTURE(turn);
    const std::unique_ptr<Model> owner = model_of<T>(options_on(shape, mesh, turn++), mesh);
    check_nan_on_each_rank(*owner, mesh, 1, 0, [&](int rank) { return (rank + turn) % 2; });
  });
}

// Each rank updates what it has of these tensors by itself, by gradients that are the same on all of them.
TEST_CASE_TEMPLATE("what all ranks have stays the same, bit by bit, with stochastic rounding too", T, float,
                   __nv_bfloat16) {
  int turn = rank_count();
  const ModelShape shape = with_layers(small_shape(), 1);
  for_meshes(shape, [&](Mesh& mesh) {
    CAPTURE(turn);
    ModelOptions options = options_on(shape, mesh, turn++);
    options.store.stochastic_rounding = !std::is_same_v<T, float>;
    const std::unique_ptr<Model> model = model_of<T>(options, mesh);
    for (size_t step = 0; step < some_steps; ++step) train_step(*model, mesh, step);
    std::vector<float> copies;
    for (const Slice& slice : model->trained_store().kept_slices()) {
      if (slice.tensor->split.axis >= 0) continue;
      for (State state : {State::weight, State::first_moment, State::second_moment}) {
        const std::vector<float> values = values_of(model->trained_store(), slice, state);
        copies.insert(copies.end(), values.begin(), values.end());
      }
    }
    Buffer<float> mine(copies), all(copies.size() * size_t(mesh.tp().size()));
    mesh.tp().after(test_stream());
    mesh.tp().all_gather(all.data(), mine.data(), copies.size());
    mesh.tp().wait_for_all(test_stream());
    const std::vector<float> values = all.get();
    REQUIRE(copies.size() > 0);
    for (int rank = 0; rank < mesh.tp().size(); ++rank)
      CHECK(std::equal(copies.begin(), copies.end(), values.begin() + rank * long(copies.size())));
  });
}

// As in test_zero: a weight is rounded the other way where its gradient's sign is open. Here gradients differ by their
// roundings to bf16, some 2 %, so that about 1 % of all signs are open. Random numbers that depend on the mesh would
// round a third of all weights to the other side.
TEST_CASE("masters left out: stochastic rounding does not depend on the mesh") {
  const ModelShape shape = with_layers(small_shape(), 1);
  const StoreOptions store = {.stochastic_rounding = true};
  const std::vector<float> wanted = first_step_of_one_rank<__nv_bfloat16>(shape, State::weight, store);
  int turn = rank_count();
  for_meshes(shape, [&](Mesh& mesh) {
    CAPTURE(turn);
    ModelOptions options = options_on(shape, mesh, turn++);
    options.store.stochastic_rounding = true;
    const std::unique_ptr<Model> model = model_of<__nv_bfloat16>(options, mesh);
    train_step(*model, mesh, 0);
    for (const Slice& slice : model->trained_store().kept_slices()) {
      if (slice.count < 1000) continue;
      CAPTURE(slice.tensor->name);
      const std::vector<float> actual = values_of(model->trained_store(), slice, State::weight);
      const float* const expected = &wanted[offset_of(model->tensors(), *slice.tensor)];
      size_t different = 0;
      for (size_t i = 0; i < actual.size(); ++i)
        different += actual[i] != expected[slice.tensor->part.in_whole(slice.first + i)];
      CHECK_WITHIN("share of weights", double(different) / double(actual.size()), 0.05);
    }
  });
}

// ---- bytes and memory

TEST_CASE_TEMPLATE("the formulas give the bytes sent and allocated", T, float, __nv_bfloat16) {
  const ModelShape shape = with_layers(small_shape(), 3);
  int turn = 0;
  for_meshes(shape, [&](Mesh& mesh) {
    for (int stage = std::is_same_v<T, float>; stage < 4; stage += 2, ++turn) {
      if (mesh.shape().dp == 1 && stage > 1) continue;
      ModelOptions options = options_on(shape, mesh, turn);
      options.micro_batch = global_batch() / (mesh.shape().dp * 2);
      options.store.zero = mesh.shape().dp > 1 ? stage : 0;
      CAPTURE(stage);
      CAPTURE(turn);
      const TensorList list(shape, mesh.tp().size(), mesh.tp().rank());
      const Shards shards(list, mesh.data().size(), mesh.data().rank());
      const Curve curve = train<T>(options, mesh, 2);
      auto wanted = bytes_of_step<T>(mesh, shards, options.store.zero, 2);
      wanted["tp"] = bytes_of_layers<T>(options, list, shards, 2);
      check_bytes(curve, wanted);
      check_memory(curve, bytes_of_activations<T>(options, list), 13 * (shape.layers + 1));
    }
  });
}

TEST_CASE("N ranks have an Nth of gpt2-medium's activations each") {
  check_share_of_activations({.tp = rank_count()});
}

#if !defined(__CUDACC__)  // the CPU device counts what it is asked for

namespace {

// What the host asks of CUDA's runtime in the second step on tp 2, with ZeRO 1 over the other ranks.
cpu::Counts calls_of_step(Mesh& mesh, int layers, int micro_batches, int pieces, bool timed) {
  const ModelShape shape = {layers, 4, 64, 256, 16};
  chosen_global_batch = 2 * micro_batches * mesh.shape().dp;
  const std::unique_ptr<Model> model =
      model_of<float>({.shape = shape, .micro_batch = 2, .tp_pieces = pieces, .store = {.zero = 1}}, mesh);
  train_step(*model, mesh, 0);
  CUDA_CHECK(cudaDeviceSynchronize());
  mesh.take_traffic(mesh.begin_traffic(timed) - 1);
  const cpu::Counts before = cpu::counts;
  train_step(*model, mesh, 1);
  chosen_global_batch = 0;
  return cpu::counts - before;
}

// The same of one layer in one micro-batch, neither the first nor the last.
cpu::Counts calls_of_layer(Mesh& mesh, int pieces, bool timed) {
  const auto of_layer = [&](int micro_batches) {
    const cpu::Counts two = calls_of_step(mesh, 2, micro_batches, pieces, timed);
    return calls_of_step(mesh, 3, micro_batches, pieces, timed) - two;
  };
  const cpu::Counts of_two = of_layer(2);
  return of_layer(3) - of_two;
}

}  // namespace

// Forward gathers rows twice and scatters sums twice. Backward gathers rows four times and scatters sums twice. With K
// pieces these are 10·K collectives. Each of them records when it ends. It starts after what the stream has done so far:
// a record and a wait, once for a gather, K times for a scatter. The stream waits for each piece of the four gathers that
// products follow, and once for all pieces of the others. It need not wait for a collective that the mesh's own thread has
// seen finish. So these are the most calls, and they are counted where nothing runs before the host waits for it.
TEST_CASE("what a layer asks of CUDA's runtime besides its kernels") {
  if (rank_count() % 2) return skip("needs an even number of ranks");
  if (!cpu::streams_are_deferred()) return skip("needs GPT_CPU_SCHEDULE=reverse");
  Mesh mesh(ranks().mesh, {.tp = 2, .dp = rank_count() / 2});
  for (size_t K : {1, 2}) {
    CAPTURE(K);
    const size_t collectives = 10 * K, orders = 6 + 4 * K, waits = 4 * K + 2 + 4;
    const cpu::Counts calls = calls_of_layer(mesh, int(K), false);
    CHECK(calls.records == collectives + orders);
    CHECK(calls.event_waits == orders + waits);
    for (size_t others : {calls.queries, calls.copies, calls.memsets, calls.waits, calls.events}) CHECK(others == 0);
    // When all were timed, a collective and a wait had two records each, a query and a reading of the time. Besides, a
    // wait had an event of its own.
    const size_t launched = calls.launches + calls.products, before = 4 * collectives + 2 * orders + 6 * waits;
    CHECK(double(launched + calls.records + calls.event_waits) < 0.6 * double(launched + before));

    const cpu::Counts timed = calls_of_layer(mesh, int(K), true);
    CHECK(timed.records == 2 * collectives + orders + 2 * waits);
    CHECK(timed.event_waits == calls.event_waits);
  }
}

TEST_CASE("rows that no product follows are waited for once") {
  Mesh mesh(ranks().mesh, {.tp = rank_count()});
  TensorParallel<float> tp(mesh.tp(), 3, test_stream());
  const int rows = 6 * rank_count();
  Buffer<float> own(6), all{size_t(rows)};
  const cpu::Counts before = cpu::counts;
  tp.gather(all, own, rows, 1);
  const cpu::Counts calls = cpu::counts - before;
  CHECK(calls.records == 1 + 3);
  CHECK(calls.event_waits <= 1 + 1);  // the first starts the collectives
  CUDA_CHECK(cudaStreamSynchronize(test_stream()));
}
#endif
