// Gradients that travel as factors of low rank (extensions/compression/low_rank.cuh): what ranks get, what becomes of what is left out,
// bytes, and checkpoints. The kernels are in test_low_rank.cu.
#include "extensions/compression/options.h"
#include "test/ranks/errors.cuh"

namespace {

using Doubles = std::vector<double>;

// One matrix of the model in float64, on all ranks. The sums of ranks are all that factors depend on.
struct Matrix {
  const TensorDescriptor& tensor;
  LowRankShape shape;
  Doubles q;                    // (R, columns)
  std::vector<Doubles> errors;  // by rank

  Matrix(const TensorDescriptor& tensor, const LowRankShape& shape, const Values& first_q)
      : tensor(tensor), shape(shape), q(first_q.begin(), first_q.end()), errors(size_t(dp().size()), Doubles(tensor.local)) {}

  // given: the gradients, by rank. Returns what all ranks get, and replaces Q.
  Doubles reduce(const std::vector<Values>& given) {
    const size_t m = size_t(shape.columns), n = tensor.local / m, R = size_t(shape.rank);
    Doubles sum(n * m), p(R * n), received(n * m);
    for (size_t rank = 0; rank < given.size(); ++rank)
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += errors[rank][i] += given[rank][i];
    for (size_t k = 0; k < R; ++k) {
      for (size_t i = 0; i < n; ++i)
        for (size_t j = 0; j < m; ++j) p[k * n + i] += q[k * m + j] * sum[i * m + j];
      for (size_t turn = 0; turn < 2 * k; ++turn) {
        double along = 0;
        for (size_t i = 0; i < n; ++i) along += p[k * n + i] * p[turn % k * n + i];
        for (size_t i = 0; i < n; ++i) p[k * n + i] -= along * p[turn % k * n + i];
      }
      double square = 0;
      for (size_t i = 0; i < n; ++i) square += p[k * n + i] * p[k * n + i];
      for (size_t i = 0; i < n; ++i) p[k * n + i] /= std::sqrt(square);
      for (size_t j = 0; j < m; ++j) {
        q[k * m + j] = 0;
        for (size_t i = 0; i < n; ++i) q[k * m + j] += p[k * n + i] * sum[i * m + j];
      }
      for (size_t i = 0; i < n * m; ++i) received[i] += p[k * n + i / m] * q[k * m + i % m];
    }
    for (Doubles& error : errors)
      for (size_t i = 0; i < error.size(); ++i) error[i] -= received[i] / double(given.size());
    return received;
  }
};

std::vector<Values> factors_of(const Parameters& store) {
  std::vector<Values> all;
  for (const TensorDescriptor& factor : store.factors())
    if (factor.local > 0) all.push_back(values_of(store, Slice{&factor, 0, factor.local, 0}, State::factor));
  return all;
}
Values joined_factors(const Parameters& store) {
  Values all;
  for (const Values& factor : factors_of(store)) all.insert(all.end(), factor.begin(), factor.end());
  return all;
}

double largest(const auto& values) {
  double most = 0;
  for (double x : values) most = std::max(most, std::abs(x));
  return most;
}
double farthest(const auto& a, const auto& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(double(a[i]) - double(b[i])));
  return most;
}

// The values of a tensor in a unit.
Values of_tensor(const Values& unit, const TensorDescriptor& tensor) {
  return {unit.begin() + long(tensor.offset), unit.begin() + long(tensor.offset + tensor.local)};
}

}  // namespace

// P is off by some 2^-24·√columns of itself, and what that does to its directions grows with its condition, which of random
// matrices is below ten: 2^-24 · √204 · 10 = 8.5e-6 for each step, in which Q starts from the last one's. What is no matrix
// is a plain sum of N.
TEST_CASE("ranks get the projection of the sum, and keep what it leaves out: as in float64, and the same bits on all ranks") {
  constexpr int steps = 3;
  const int N = dp().size();
  for (int rank : {1, 3, 9}) {
    CAPTURE(rank);
    Store s({.zero = 0, .rooms = CompressionOptions{.low_rank = rank}}), of_pieces({.zero = 1, .rooms = CompressionOptions{.low_rank = rank}});
    const Shards& shards = s.shards();
    const std::vector<Values> first_q = factors_of(s.store);
    std::vector<Matrix> matrices;
    for (const TensorDescriptor& tensor : s.list.tensors())
      if (const LowRankShape shape = low_rank_shape(tensor, s.list, rank); shape.rank > 0) matrices.emplace_back(tensor, shape, first_q.at(matrices.size()));
    CHECK(matrices.size() == first_q.size());
    CHECK(matrices.size() == 2 + 4 * 2);
    for (int number = 0; number < steps; ++number) {
      const std::vector<Values> sums = step(s, 2 * number, 1, true), pieces = step(of_pieces, 2 * number, 1, true);
      const std::vector<Values> next_q = factors_of(s.store);
      size_t matrix = 0;
      for (size_t i = 0; i < sums.size(); ++i) {  // ZeRO 0 keeps whole tensors
        const TensorDescriptor& tensor = s.list.tensors()[i];
        std::vector<Values> given;
        for (int r = 0; r < N; ++r) given.push_back(of_tensor(gradient_of(shards, tensor.unit, r, 2 * number), tensor));
        CAPTURE(tensor.name);
        CAPTURE(number);
        if (matrix < matrices.size() && &matrices[matrix].tensor == &tensor) {
          Matrix& wanted = matrices[matrix];
          const Doubles received = wanted.reduce(given);
          const double bound = (number + 1) * 0x1p-24 * std::sqrt(204) * 10;
          CHECK_WITHIN("received", farthest(sums[i], received) / largest(received), bound);
          const Values errors = values_of(s.store, Slice{&tensor, 0, tensor.local, tensor.offset}, State::error);
          CHECK_WITHIN("errors", farthest(errors, wanted.errors[size_t(dp().rank())]) / largest(errors), bound);
          CHECK_WITHIN("Q", farthest(next_q[matrix], wanted.q) / largest(wanted.q), bound);
          CHECK(largest(received) > 0.01 * largest(given[0]));
          ++matrix;
        } else {
          Doubles wanted(tensor.local);
          for (const Values& each : given)
            for (size_t k = 0; k < wanted.size(); ++k) wanted[k] += each[k];
          CHECK_WITHIN("as they are", farthest(sums[i], wanted) / largest(wanted), N * 0x1p-23);
        }
        const Values everybody = all_values(sums[i]), all_q = all_values(next_q[0]);
        for (int r = 0; r < N; ++r) {
          CHECK(same_bits(Values(everybody.begin() + r * long(sums[i].size()), everybody.begin() + (r + 1) * long(sums[i].size())), sums[i]));
          CHECK(same_bits(Values(all_q.begin() + r * long(next_q[0].size()), all_q.begin() + (r + 1) * long(next_q[0].size())), next_q[0]));
        }
      }
      size_t piece = 0;  // with ZeRO 1 the same sums, of which a rank keeps its pieces
      for (const Slice& slice : of_pieces.store.kept_slices()) {
        const Values& whole = sums[size_t(slice.tensor - of_pieces.list.tensors().data())];
        CHECK(same_bits(pieces[piece++], Values(whole.begin() + long(slice.first), whole.begin() + long(slice.first + slice.count))));
      }
      CHECK(same_bits(errors_of(of_pieces.store), errors_of(s.store)));
    }
  }
}

// All that was given = all that was applied + the errors of all ranks, but for roundings of sums: 2^-24 of the largest number
// for each addition and rank, and some for M − x/N and for P and Q', of which each rank makes the same. The largest number is
// a sum of N gradients and errors, and errors are larger than gradients: they wait until their direction is sent.
TEST_CASE("what is applied adds up to the gradients, less the errors of all ranks") {
  constexpr int steps = 20, micro_steps = 2;
  for (int zero : {0, 1}) {
    CAPTURE(zero);
    Store s({.zero = zero, .rooms = CompressionOptions{.low_rank = 2}});
    const std::vector<Slice> kept = s.store.kept_slices();
    std::vector<Doubles> applied;
    for (const Slice& slice : kept) applied.emplace_back(slice.count);
    for (int i = 0; i < steps; ++i) {
      const std::vector<Values> sums = step(s, 0, micro_steps, true);  // the same gradients again and again
      for (size_t k = 0; k < kept.size(); ++k)
        for (size_t j = 0; j < kept[k].count; ++j) applied[k][j] += sums[k][j];
    }
    const Doubles all_errors = sum_of_errors(s.store);
    for (size_t k = 0; k < kept.size(); ++k) {
      const TensorDescriptor& tensor = *kept[k].tensor;
      Doubles given(tensor.local);
      for (int rank = 0; rank < dp().size(); ++rank)
        for (int m = 0; m < micro_steps; ++m) {
          const Values values = of_tensor(gradient_of(s.shards(), tensor.unit, rank, m), tensor);
          for (size_t i = 0; i < given.size(); ++i) given[i] += values[i];
        }
      const bool is_sent_as_factors = low_rank_shape(tensor, s.list, 2).rank > 0;
      double worst = 0, most = largest(given), most_error = 0;
      for (size_t j = 0; j < kept[k].count; ++j) {
        const size_t i = kept[k].first + j;
        const double error = all_errors[offset_of(s.list, tensor) + i];
        worst = std::max(worst, std::abs(steps * given[i] - applied[k][j] - error));
        most_error = std::max(most_error, std::abs(error));
      }
      CAPTURE(tensor.name);
      CHECK_WITHIN("sums", worst, steps * (dp().size() + 4) * (most + most_error) * 0x1p-23);
      if (kept[k].count > 100) CHECK((most_error > 0.5 * most) == is_sent_as_factors);
      if (!is_sent_as_factors) CHECK(most_error == 0);
    }
  }
}

TEST_CASE_TEMPLATE("the formulas give the bytes sent and allocated", T, float, __nv_bfloat16) {
  if (!model_makers().contains(dtype_name<T>)) return skip("this build leaves the type out");
  for (int stage : {0, 1})
    for (int rank : {1, 7}) {
      CAPTURE(stage);
      CAPTURE(rank);
      constexpr int layers = 3, C = 51, V = 256, P = 8;  // rows of wte are padded
      const ModelShape shape = {layers, 3, C, 211, P};
      const int micro_batch = global_batch() / dp().size() / 2;
      const Curve curve = train<T>(shape, mesh(), micro_batch, {.zero = stage, .rooms = CompressionOptions{.low_rank = rank}}, 2);
      const Curve plain = train<T>(shape, mesh(), micro_batch, {.zero = stage}, 2);
      // With rank 7 factors of wpe, (8 + 51) · 7, are no fewer numbers than its 408.
      const bool has_wpe = rank == 1;
      const double rows = C + C + C + 4 * C, columns = 3 * C + C + 4 * C + C, vectors = 3 * C + 4 * C + 6 * C;
      const double all_rows = layers * rows + V + has_wpe * P, all_columns = layers * columns + C + has_wpe * C;
      const double as_they_are = layers * vectors + 2 * C + !has_wpe * P * C;
      BytesSent wanted = plain.bytes_sent;
      const double others = double(dp().size() - 1) / dp().size();
      wanted["data"]["all_reduce"] = 2 * others * 4 * (rank * (all_rows + all_columns) + as_they_are);
      wanted["data"].erase("reduce_scatter");
      check_bytes(curve, wanted);
      const auto bytes = [&](const Curve& of, const std::string& name) {
        const auto found = std::ranges::find(of.memory, name, &MemoryCategory::name);
        return found == of.memory.end() ? 0 : double(found->bytes);
      };
      const TensorList list(shape);
      const Shards shards(list, dp().size(), dp().rank());
      CHECK(bytes(curve, "errors") == round_up(4 * shards.all_whole(), size_t(256)) + round_up(size_t(4 * rank * all_columns), size_t(256)));
      const double of_block = round_up(size_t(4 * rank * rows), size_t(256)) + round_up(size_t(4 * rank * columns), size_t(256));
      CHECK(bytes(curve, "unit buffers") - bytes(plain, "unit buffers") == of_block);
      CHECK(bytes(curve, "optimizer") == bytes(plain, "optimizer"));
    }
}

TEST_CASE("an update that is left out leaves out the errors, and factors stay finite") {
  for (int stage : {0, 1}) {
    CAPTURE(stage);
    const std::unique_ptr<Model> owner = model_of<float>(odd, mesh(), 2, {.zero = stage, .rooms = CompressionOptions{.low_rank = 2}});
    Model& model = *owner;
    const auto is_zero = [](float x) { return x == 0; };
    train_step(model, mesh(), 0);
    CHECK(was_applied(model));
    CHECK(!std::ranges::all_of(errors_of(model.trained_store()), is_zero));
    const Values before = joined_factors(model.trained_store());
    for (int unit : {0, 1}) {
      CAPTURE(unit);
      train_step(model, mesh(), 1, [&] {
        const float bad = dp().size() % 2 ? NAN : INFINITY;
        if (dp().rank() == dp().size() - 1) copy_and_wait(model.trained_store().gradients(unit).data + 77, &bad, 1, cudaMemcpyHostToDevice, test_stream());
      });
      CHECK(!was_applied(model));
      CHECK(std::ranges::all_of(errors_of(model.trained_store()), is_zero));
      const Values after = joined_factors(model.trained_store());
      CHECK(std::ranges::all_of(after, [](float x) { return std::isfinite(x) && x != 0; }));
      CHECK(!same_bits(after, before));
    }
    train_step(model, mesh(), 2);
    CHECK(was_applied(model));
    CHECK(std::isfinite(model.gradient_summary().norm));
    CHECK(!std::ranges::all_of(errors_of(model.trained_store()), is_zero));
  }
}

// A power of two changes no bit: neither of directions, nor of errors, which are kept without it.
TEST_CASE("errors do not depend on the loss scale") {
  check_loss_scale({.zero = 1, .rooms = CompressionOptions{.low_rank = 3}}, mesh());
}

namespace {

constexpr int some_rank = 4;

// The first ones have whole matrices on each rank: samples, or tokens, are shared, and only the order of sums differs.
std::vector<Way> ways() {
  const int N = dp().size();
  std::vector<Way> all = {{{.dp = N}}, {{.dp = N}}, {{.dp = N}}};
  for (size_t i : {size_t(1), size_t(2)}) all[i].options.store.zero = 1;
  all[2].options.store.offload = {.optimizer = true};
  if (N % 2 == 0) all.push_back({{.cp = N}});
  if (N % 4 == 0) {
    all.push_back({{.tp = 2, .dp = N / 2}});
    all.push_back({{.tp = 2, .cp = N / 2}}), all.back().options.store.zero = 1, all.back().options.recompute = Recompute::block;
    for (const char* schedule : {"1f1b", "zb"}) all.push_back({{.dp = N / 2, .pp = 2}, {}, schedule}), all.back().options = Way().options;
    all.push_back({{.tp = 2, .dp = N / 2}}), all.back().options.lora = {16, 32, {"attn.c_attn", "mlp.c_fc"}};
    all.push_back({{.dp = N / 2, .pp = 2}}), all.back().options.lora = {16, 32, {"attn.c_attn", "mlp.c_fc"}};
  }
  for (Way& way : all) way.options.store.rooms.of<CompressionOptions>().low_rank = some_rank, way.options.store.random_biases = true;
  return all;
}

}  // namespace

// Sums in another order change losses by less than 1e-5, as on all meshes (test/README.md, Curves), of what is learned in
// three steps. A loss has roundings of its own, which are no part of what is learned: it is a sum in float, of A micro-batches
// on each of N ranks, then of the ranks. Each addition rounds by 2^-24 of what has been added up so far, at most. On all ranks
// together that is Σ a/A·2^-24 of the loss, a from 1 to A, then Σ n/N·2^-24, n from 2 to N: less than (A + N + 2)/2·2^-24. In a
// ring each loss is added up from another rank on, so two of them differ by the sum of both. (Here a last bit of the loss,
// 4.8e-7, is 1.1e-5 of what is learned.) With ZeRO 1 and with offload gradients have the same bits, and so have the losses.
// Where other parts of matrices are sent, another curve comes out: M̂ is a projection, so its norm is at most the sum's, and
// with errors that come back most of what is learned is learned.
TEST_CASE("on every kind of mesh gradients are projected, and what is learned is learned") {
  std::optional<Curve> first;
  double first_rounds_by = 0;
  const std::vector<Way> all = ways();
  for (size_t i = 0; i < all.size(); ++i) {
    Way way = all[i];
    CAPTURE(i);
    Mesh mesh(ranks().mesh, way.mesh);
    pipeline_schedule = way.schedule;
    const Curve curve = train<float>(way.options, mesh, some_steps);
    way.options.store.rooms.of<CompressionOptions>().low_rank = 0;
    const Curve plain = train<float>(way.options, mesh, some_steps);
    pipeline_schedule = "1f1b";
    const double learned = plain.losses[0] - plain.losses.back();
    CHECK(curve.losses[0] == plain.losses[0]);
    CHECK(curve.norms[0] < plain.norms[0] * (1 + 1e-5));
    CHECK(curve.norms[0] > plain.norms[0] * 0.3);
    CHECK(curve.losses[0] - curve.losses.back() > learned / 2);
    const double rounds_by = (micro_batches(way.options, mesh) + dp().size() + 2) / 2.0 * 0x1p-24 * curve.losses.back();
    if (!first) first = curve, first_rounds_by = rounds_by;
    if (i < 3) CHECK(curve.losses == first->losses);
    if (i == 3) CHECK_WITHIN("loss", (curve.losses.back() - first->losses.back()) / learned, 1e-5 + (first_rounds_by + rounds_by) / learned);
    if (i < 4) CHECK_WITHIN("norm", curve.norms.back() / first->norms.back() - 1, 1e-5);
  }
}

TEST_CASE("an element of a whole matrix's first Q has the same value on every mesh") {
  if (dp().size() % 2 != 0) return skip("the ranks are no pairs");
  const ModelOptions options = ways()[0].options;
  Mesh pairs(ranks().mesh, {.tp = 2, .dp = dp().size() / 2});
  const std::unique_ptr<Model> whole = model_of<float>(options, mesh()), split = model_of<float>(options, pairs);
  const std::vector<Values> of_whole = factors_of(whole->trained_store()), of_parts = factors_of(split->trained_store());
  if (pairs.data().size() == 1) return skip("a single data-parallel rank sends nothing");
  size_t i = 0;
  for (const TensorDescriptor& tensor : split->tensors().tensors()) {
    const LowRankShape shape = low_rank_shape(tensor, split->tensors(), some_rank);
    if (shape.rank == 0) continue;
    CAPTURE(tensor.name);
    const Part part = tensor.split.axis == 1 ? tensor.part : Part();
    for (size_t k = 0; k < shape.q(); ++k) CHECK(of_parts[i][k] == of_whole[i][part.in_whole(k)]);
    CHECK(of_whole[i][0] != of_whole[i][1]);
    ++i;
  }
  CHECK(i == of_whole.size());
}

// ---- checkpoints

TEST_CASE("each rank gets its errors and factors back; another mesh keeps the sum of errors, and factors if they have the same parts") {
  static TemporaryFolder mine;
  const std::filesystem::path folder = ranks().all.all_gather(mine.path())[0];
  const std::vector<Way> all = ways();
  std::vector<double> before;
  Values factors_before;
  for (size_t i = 0; i < all.size(); ++i) {
    CAPTURE(i);
    const bool has_adapters = all[i].options.lora.is_on();
    Mesh mesh(ranks().mesh, all[i].mesh);
    pipeline_schedule = all[i].schedule;
    const std::unique_ptr<Model> model = model_of<float>(all[i].options, mesh), loaded = model_of<float>(all[i].options, mesh);
    pipeline_schedule = "1f1b";
    Parameters& store = model->trained_store();
    if (i > 0 && !has_adapters) {  // what the mesh before has saved
      const Values drawn = joined_factors(store);
      load_errors(folder / formatted("step_%08zu", i), store, i % 2 ? 1000 : most_at_once);
      CHECK(before == sum_of_errors(store));
      const MeshShape &now = all[i].mesh, &then = all[i - 1].mesh;
      const bool is_same = now.tp == then.tp && now.pp == then.pp, has_as_many = now.tp * now.pp == then.tp * then.pp;
      if (is_same || !has_as_many) CHECK(same_bits(joined_factors(store), is_same ? factors_before : drawn));
    }
    if (!has_adapters) fill_errors(store);
    if (!has_adapters) before = sum_of_errors(store);
    for (const TensorDescriptor& factor : store.factors()) {  // each tensor-parallel rank and stage has its own, the same on data-parallel ones
      Values values(factor.local);
      for (size_t k = 0; k < values.size(); ++k) values[k] = float(1 + k + factor.offset + 7 * i) + 0.25f * float(mesh.place().tp + 2 * mesh.place().pp);
      if (factor.local > 0) store.copy_in({&factor, 0, factor.local}, State::factor, values);
    }
    factors_before = joined_factors(store);
    const RankGroup group = {ranks().all, mesh.tp().size(), 1000 * sizeof(float)};
    CheckpointWriter writer(folder, size_t(300'000), group, [](size_t floats) {  // several files
      return ranks().all.rank() == 1 ? nullptr : allocate_zeros(floats);
    });
    const CheckpointContent content = {store, written_blocks(*model, group.chunk_bytes), "{}"};
    CHECK(writer.begin(i + 1, content) == "");
    CHECK(writer.complete() == "");
    load_errors(folder / formatted("step_%08zu", i + 1), loaded->trained_store());
    CHECK(same_bits(errors_of(loaded->trained_store()), errors_of(store)));
    CHECK(same_bits(joined_factors(loaded->trained_store()), factors_before));
    CHECK(factors_before.size() > 0);
  }
  ranks().all.all_gather("");
}
