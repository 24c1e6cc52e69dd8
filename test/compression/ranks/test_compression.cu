// Gradients that travel as codes of a few bits (extensions/compression/compressed_reduction.cuh): the sums that ranks get, what becomes of
// what is left out, bytes, and checkpoints.
#include "extensions/compression/options.h"
#include "test/ranks/errors.cuh"

namespace {

// The same on the host for all ranks, of one message after another. Those who send are ranks, or hosts of several.
struct Reference {
  const Shards& shards;
  int zero, bits;
  std::vector<std::vector<Values>> errors;  // by sender and unit

  Reference(const Shards& shards, int zero, int bits)
      : shards(shards), zero(zero), bits(bits), errors(size_t(dp().size() / shards.inside())) {
    for (auto& of_sender : errors)
      for (int unit = 0; unit < shards.units(); ++unit) of_sender.emplace_back(shards.whole(unit));
  }

  // What is received of one message.
  Values received(const Values& values, float* left, Feedback feedback) const {
    Buffer<float> in(values), out(values.size()), kept(Values(left, left + values.size())), unit(Values{1});
    Buffer<uint8_t> message(message_bytes(values.size(), bits));
    quantize(message, in, kept, {1, values.size()}, bits, unit, feedback, test_stream());
    dequantize(out.data(), message, {1, values.size()}, 1, bits, false, test_stream());
    std::ranges::copy(kept.get(), left);
    return out.get();
  }

  // What all ranks have of a unit after one reduction. gradients: by rank. (A sum of two is the same in any order.)
  Values reduce(int unit, const std::vector<Values>& gradients) {
    const size_t piece = shards.piece(unit), inside = size_t(shards.inside());
    Values sums(shards.whole(unit));
    for (size_t owner = 0; owner < gradients.size(); ++owner) {
      const size_t begin = owner * piece;
      Values sum(piece);
      for (size_t sender = 0; sender < errors.size(); ++sender) {
        Values part(piece);
        for (size_t rank = sender * inside; rank < (sender + 1) * inside; ++rank)
          for (size_t i = 0; i < piece; ++i) part[i] += gradients[rank][begin + i];
        const Values sent = received(part, &errors[sender][size_t(unit)][begin], Feedback::add);
        for (size_t i = 0; i < piece; ++i) sum[i] += sent[i];
      }
      if (zero == 0) sum = received(sum, &errors[owner / inside][size_t(unit)][begin], Feedback::keep);
      std::ranges::copy(sum, sums.begin() + long(begin));
    }
    return sums;
  }
};

// Meshes of all ranks that say, as the program's does, that codes will be sent: ranks connect at a first send, and they do that
// when the mesh is made, not in the middle of a step. (GPT_CPU_NCCL=ring refuses the latter.)
std::unique_ptr<Mesh> make_mesh(int ranks_inside) {
  const MeshOptions options = {.sms = {.margin = 0}, .compresses = true, .ranks_inside = ranks_inside};
  return std::make_unique<Mesh>(ranks().all, MeshShape{.dp = dp().size()}, ranks().mesh.device(), options);
}
Mesh& mesh_of_codes() {
  static const std::unique_ptr<Mesh> mesh = make_mesh(1);
  return *mesh;
}
// As if neighbouring pairs of ranks were hosts of their own.
Mesh& mesh_of_hosts() {
  static const std::unique_ptr<Mesh> mesh = make_mesh(2);
  return *mesh;
}

// Two steps of two micro-steps, so that errors of a step, and of a micro-step, come back.
void check_sums(Mesh& mesh) {
  for (int bits : {8, 4})
    for (int zero : {0, 1, 2, 3}) {
      CAPTURE(bits);
      CAPTURE(zero);
      Store s({.zero = zero, .rooms = CompressionOptions{.bits = bits}}, mesh);
      const Shards& shards = s.shards();
      Reference reference(shards, zero, bits);
      for (int first : {0, 2}) {
        const std::vector<Values> sums = step(s, first, 2, zero < 2);
        std::vector<Values> wanted;
        for (int unit = 0; unit < shards.units(); ++unit) {
          std::vector<Values> gradients[2];
          for (int rank = 0; rank < dp().size(); ++rank)
            for (int i : {0, 1}) gradients[i].push_back(gradient_of(shards, unit, rank, first + i));
          if (zero >= 2 && s.list.is_block(unit)) {  // one message each
            wanted.push_back(reference.reduce(unit, gradients[0]));
            const Values more = reference.reduce(unit, gradients[1]);
            for (size_t i = 0; i < more.size(); ++i) wanted.back()[i] += more[i];
          } else {
            for (size_t rank = 0; rank < gradients[0].size(); ++rank)
              for (size_t i = 0; i < gradients[0][rank].size(); ++i) gradients[0][rank][i] = gradients[1][rank][i] + gradients[0][rank][i];
            wanted.push_back(reference.reduce(unit, gradients[0]));
          }
        }
        size_t number = 0;
        for (const Slice& slice : s.store.kept_slices()) {
          const Values& whole = wanted[size_t(slice.tensor->unit)];
          const Values expected(whole.begin() + long(slice.in_unit), whole.begin() + long(slice.in_unit + slice.count));
          CHECK(same_bits(sums[number++], expected));
        }
        Values errors;
        for (const Slice& slice : error_slices(shards)) {
          const Values& whole = reference.errors[size_t(dp().rank() / shards.inside())][size_t(slice.tensor->unit)];
          errors.insert(errors.end(), whole.begin() + long(slice.in_unit), whole.begin() + long(slice.in_unit + slice.count));
        }
        CHECK(same_bits(errors_of(s.store), errors));
      }
    }
}

}  // namespace

TEST_CASE("ranks get the sum of what messages say, in the order of ranks, bit for bit") { check_sums(mesh_of_codes()); }

TEST_CASE("between hosts only: the sum of what hosts say, whose ranks add up theirs before, bit for bit") {
  if (dp().size() % 4 != 0) return skip("there are no two hosts of two ranks");
  check_sums(mesh_of_hosts());
}

TEST_CASE("between hosts only: bytes by group, and weights") {
  if (dp().size() % 4 != 0) return skip("there are no two hosts of two ranks");
  Mesh& hosts = mesh_of_hosts();
  const double N = dp().size(), H = N / 2;
  for (int stage = 0; stage <= 3; ++stage) {
    CAPTURE(stage);
    const TensorList list(odd);
    const Shards shards(list, dp().size(), dp().rank(), 2);
    const StoreOptions store = {.zero = stage, .rooms = CompressionOptions{.bits = 8, .weights = stage > 0}};
    const Curve curve = train<float>(odd, hosts, global_batch() / dp().size(), store, 2);  // one micro-step
    // A rank's share of its host's sums, for each host; and codes of one piece for each other host.
    double plain = 0, codes = 0;
    for (int unit = 0; unit < shards.units(); ++unit) {
      plain += H * double(shards.piece(unit)) * sizeof(float);
      codes += (H - 1) * double(message_bytes(shards.piece(unit), 8));
    }
    BytesSent wanted = {{"inside", {{"reduce_scatter", plain}, {"all_gather", plain}}},
                        {"between", {{"all_to_all", codes}, {"all_gather", codes}}}};
    wanted["world"]["all_reduce"] = (N - 1) / N * 2 * (sizeof(StepSums) + sizeof(double));
    const auto errors = std::ranges::find(curve.memory, "errors", &MemoryCategory::name);
    CHECK(errors->bytes == round_up(4 * shards.all_whole() / 2, size_t(256)));
    check_bytes(curve, wanted);  // two layers: ZeRO 3 gathers them once
  }
}

// All that was given = all that was applied + the errors of all ranks, but for roundings of sums: some 2^-24 of the largest
// for each addition of a rank, a micro-step and the error. So the mean of what is applied comes as close as errors / steps.
TEST_CASE("what is applied adds up to the gradients, less the errors that ranks keep now") {
  constexpr int steps = 20, micro_steps = 2;
  for (int bits : {8, 4})
    for (int zero : {0, 1, 2, 3}) {
      CAPTURE(bits);
      CAPTURE(zero);
      Store s({.zero = zero, .rooms = CompressionOptions{.bits = bits}}, mesh_of_codes());
      const Shards& shards = s.shards();
      const std::vector<Slice> kept = s.store.kept_slices();
      std::vector<std::vector<double>> applied;
      for (const Slice& slice : kept) applied.emplace_back(slice.count);
      for (int i = 0; i < steps; ++i) {
        const std::vector<Values> sums = step(s, 0, micro_steps, zero < 2);  // the same gradients again and again
        for (size_t k = 0; k < kept.size(); ++k)
          for (size_t j = 0; j < kept[k].count; ++j) applied[k][j] += sums[k][j];
      }
      std::vector<Values> all_errors(size_t(shards.units()));
      for (int unit = 0; unit < shards.units(); ++unit) {
        Values mine(shards.whole(unit));
        for (const Slice& slice : shards.slices(unit, 0, mine.size()))
          std::ranges::copy(values_of(s.store, slice, State::error), mine.begin() + long(slice.in_unit));
        all_errors[size_t(unit)] = all_values(mine);
      }
      double worst = 0, farthest = 0, largest_error = 0;
      for (size_t k = 0; k < kept.size(); ++k) {
        const int unit = kept[k].tensor->unit;
        std::vector<double> given(shards.whole(unit)), errors(given.size());
        double largest = 0;
        for (int rank = 0; rank < dp().size(); ++rank) {
          for (int m = 0; m < micro_steps; ++m) {
            const Values values = gradient_of(shards, unit, rank, m);
            for (size_t i = 0; i < given.size(); ++i) given[i] += values[i], largest = std::max(largest, std::abs(double(values[i])));
          }
          for (size_t i = 0; i < errors.size(); ++i) errors[i] += all_errors[size_t(unit)][size_t(rank) * errors.size() + i];
        }
        for (size_t j = 0; j < kept[k].count; ++j) {
          const size_t i = kept[k].in_unit + j;
          worst = std::max(worst, std::abs(steps * given[i] - applied[k][j] - errors[i]) / largest);
          farthest = std::max(farthest, std::abs(applied[k][j] / steps - given[i]) / largest);
          largest_error = std::max(largest_error, std::abs(errors[i]) / largest);
        }
      }
      const double additions = double(steps) * (dp().size() * (micro_steps + 2) + 2);
      CHECK_WITHIN("sums", worst, additions * dp().size() * 0x1p-24);
      CHECK_WITHIN("mean", farthest, largest_error / steps + additions * dp().size() * 0x1p-24);
      CHECK(largest_error > 0.2 / ((1 << (bits - 1)) - 1));  // a message is off by half a scale
    }
}

TEST_CASE_TEMPLATE("the formulas give the bytes sent and allocated", T, float, __nv_bfloat16) {
  if (!model_makers().contains(dtype_name<T>)) return skip("this build leaves the type out");
  for (int layers : {1, 3})
    for (int stage = 0; stage <= 3; ++stage)
      for (int bits : {8, 4}) {
        CAPTURE(layers);
        CAPTURE(stage);
        CAPTURE(bits);
        const ModelShape shape = {layers, 3, 51, 211, 8};
        const TensorList list(shape);
        const Shards shards(list, dp().size(), dp().rank());
        const bool weights = stage > 0 && bits == 8;
        const StoreOptions store = {.zero = stage, .rooms = CompressionOptions{.bits = bits, .weights = weights}};
        const Curve curve = train<T>(shape, mesh_of_codes(), global_batch() / dp().size() / 2, store, 2);
        check_bytes(curve, bytes_of_step<T>(mesh_of_codes(), shards, stage, 2, bits, weights));
        const Curve plain = train<T>(shape, mesh_of_codes(), global_batch() / dp().size() / 2, {.zero = stage}, 2);
        const auto bytes = [](const Curve& of, const std::string& name) {
          const auto found = std::ranges::find(of.memory, name, &MemoryCategory::name);
          return found == of.memory.end() ? 0 : double(found->bytes);
        };
        CHECK(bytes(curve, "errors") == round_up(4 * shards.all_whole(), size_t(256)));
        const double message = double(message_bytes(shards.largest() / size_t(dp().size()), bits));
        const double buffers = bytes(curve, "unit buffers") - bytes(plain, "unit buffers");
        CHECK(buffers >= (weights ? 3 : 2) * dp().size() * message);
        CHECK(buffers <= (weights ? 3 : 2) * dp().size() * message + 3 * 256);
        const double masters = std::is_same_v<T, float> && weights && stage < 3 ? 4.0 * double(shards.all_pieces()) : 0;
        CHECK(std::abs(bytes(curve, "optimizer") - bytes(plain, "optimizer") - masters) <= 256);
      }
}

TEST_CASE("an update that is left out leaves out the errors; none of them is NaN") {
  for (int stage : {0, 1, 2, 3}) {
    CAPTURE(stage);
    const std::unique_ptr<Model> owner = model_of<float>(odd, mesh_of_codes(), 2, {.zero = stage, .rooms = CompressionOptions{.bits = 8}});
    Model& model = *owner;
    const auto errors = [&] { return errors_of(model.trained_store()); };
    const auto is_zero = [](float x) { return x == 0; };
    train_step(model, mesh_of_codes(), 0);
    CHECK(was_applied(model));
    CHECK(!std::ranges::all_of(errors(), is_zero));
    train_step(model, mesh_of_codes(), 1, [&] {
      const float bad = dp().size() % 2 ? NAN : INFINITY;
      if (dp().rank() == dp().size() - 1) copy_and_wait(model.trained_store().gradients(0).data + 77, &bad, 1, cudaMemcpyHostToDevice, test_stream());
    });
    CHECK(std::isnan(model.gradient_summary().norm));
    CHECK(!was_applied(model));
    CHECK(std::ranges::all_of(errors(), is_zero));
    train_step(model, mesh_of_codes(), 2);
    CHECK(was_applied(model));
    CHECK(std::isfinite(model.gradient_summary().norm));
    CHECK(!std::ranges::all_of(errors(), is_zero));
  }
}

// The exact weights are what a checkpoint holds: masters, or with ZeRO 3 in fp32 the pieces.
TEST_CASE_TEMPLATE("weights that are gathered in eight bits: all ranks have what codes of the exact ones say", T, float, __nv_bfloat16) {
  for (int zero : {1, 2, 3, 4, 5}) {  // the last two: between hosts only
    if (zero > 3 && dp().size() % 4 != 0) continue;
    CAPTURE(zero);
    StoreOf<T> s({.zero = zero > 3 ? zero - 2 : zero, .rooms = CompressionOptions{.weights = true}}, zero > 3 ? mesh_of_hosts() : mesh_of_codes());
    s.store.initialize();
    for (int unit = 0; unit <= s.last_unit(); ++unit) {
      CAPTURE(unit);
      const size_t piece = s.shards().piece(unit), begin = s.shards().begin(unit);
      Values exact(piece);
      for (const Slice& slice : s.shards().slices(unit, begin, piece))
        std::ranges::copy(values_of(s.store, slice, State::weight), exact.begin() + long(slice.in_unit - begin));
      const auto gathered = [&] {
        std::vector<T> whole(s.shards().whole(unit));
        copy_and_wait(whole.data(), s.store.acquire(unit), whole.size(), cudaMemcpyDeviceToHost, test_stream());
        Values values;
        for (T x : whole) values.push_back(to_float(x));
        return values;
      };
      Buffer<float> in(exact);
      Buffer<T> out(piece);
      Buffer<uint8_t> message(message_bytes(piece, 8));
      quantize(message, in, nullptr, {1, piece}, 8, nullptr, Feedback::add, test_stream());
      dequantize(out.data(), message, {1, piece}, 1, 8, false, test_stream());
      Values wanted;
      for (T x : out.get()) wanted.push_back(to_float(x));
      const Values whole = gathered();
      CHECK(same_bits(whole, all_values(wanted)));
      s.store.forget_passes();  // what has been gathered is no longer known, and in its place are rounded weights
      CHECK(same_bits(whole, gathered()));
      for (const Slice& slice : s.shards().slices(unit, begin, piece)) {  // the exact ones have stayed
        const Values kept = values_of(s.store, slice, State::weight);
        CHECK(same_bits(kept, Values(exact.begin() + long(slice.in_unit - begin), exact.begin() + long(slice.in_unit - begin + kept.size()))));
      }
    }
  }
}

// Errors are those of gradients without the loss scale, and a power of two changes no bit of these.
TEST_CASE("errors do not depend on the loss scale") {
  check_loss_scale({.zero = 1, .rooms = CompressionOptions{.bits = 8}}, mesh_of_codes());
}

namespace {

// Meshes of all ranks with at least two data-parallel ones (cp counts, where 2·N parts of a sample are equal), and the two last
// with fewer.
std::vector<Way> ways(int bits) {
  const int N = dp().size();
  std::vector<Way> all(4, Way{{.dp = N}});
  if (Way().options.shape.positions % (2 * N) == 0) all.back().mesh = {.cp = N};
  for (size_t stage = 0; stage <= 3; ++stage) all[stage].options.store.zero = int(stage);
  for (size_t stage : {size_t(2), size_t(3)}) all[stage].options.store.rooms.of<CompressionOptions>().weights = true;
  if (N % 4 == 0) {
    for (int stage : {0, 2}) all.push_back({{.tp = 2, .dp = N / 2}}), all.back().options.store.zero = stage;
    for (const char* schedule : {"1f1b", "zb"}) all.push_back({{.dp = N / 2, .pp = 2}, {}, schedule}), all.back().options = Way().options;
    all.push_back({{.tp = 2, .cp = N / 2}});
    all.back().options.store.zero = 3;
    all.back().options.recompute = Recompute::block;
  }
  for (int stage : {1, 2}) {
    all.push_back({{.dp = N}});
    all.back().options.store.zero = stage, all.back().options.lora = {6, 18, {"attn.c_attn", "mlp.c_fc"}};
  }
  for (Way& way : all) way.options.store.rooms.of<CompressionOptions>().bits = bits, way.options.store.random_biases = true;
  return all;
}

}  // namespace

// Of 256 values the largest is three standard deviations or so, and roundings to steps of s have one of s/√12: 0.7 % of
// the values for int8, 12 % for int4. Sums of ranks keep the ratio, with ZeRO 0 sums are rounded once more, and runs that
// mix tensors are worse: twice √2 times that is allowed for the whole gradient, and so for its norm. An update's sign is
// open where a gradient is smaller than its error, for 0.8 times that share of elements (runtime/checks/mesh_check.cuh),
// and counts twice, so losses may be off by 1.6 of it of what has been learned.
TEST_CASE("on every kind of mesh the curve is near the one of full precision") {
  for (Way way : ways(8)) {
    const auto train_with = [&](int bits) {
      way.options.store.rooms.of<CompressionOptions>().bits = bits;
      Mesh mesh(mesh_of_codes(), way.mesh);
      pipeline_schedule = way.schedule;
      const Curve curve = train<float>(way.options, mesh, some_steps);
      pipeline_schedule = "1f1b";
      return curve;
    };
    CAPTURE(way.mesh.tp);
    CAPTURE(way.mesh.cp);
    CAPTURE(way.mesh.pp);
    CAPTURE(way.options.store.zero);
    CAPTURE(way.options.lora.rank);
    const Curve plain = train_with(0);
    for (int bits : {8, 4}) {
      CAPTURE(bits);
      const double of_gradient = (bits == 8 ? 0.007 : 0.12) * 2 * std::sqrt(2);
      const Curve curve = train_with(bits);
      CHECK(curve.losses[0] == plain.losses[0]);
      CHECK(curve.norms[0] != plain.norms[0]);
      CHECK_WITHIN("norm", curve.norms[0] / plain.norms[0] - 1, of_gradient);
      CHECK_WITHIN("loss", (curve.losses.back() - plain.losses.back()) / (plain.losses[0] - plain.losses.back()), 1.6 * of_gradient);
    }
  }
}

// ---- checkpoints

TEST_CASE("each rank gets its errors back; on another mesh their sum is kept") {
  static TemporaryFolder mine;
  const std::filesystem::path folder = ranks().all.all_gather(mine.path())[0];
  std::vector<Way> all = ways(8);
  all.resize(all.size() - 2);  // adapters are other tensors
  std::vector<double> before;
  for (size_t i = 0; i < all.size(); ++i) {
    CAPTURE(i);
    Mesh plain(mesh_of_codes(), all[i].mesh);
    Mesh& mesh = i == 0 && dp().size() % 4 == 0 ? mesh_of_hosts() : plain;
    const std::unique_ptr<Model> model = model_of<float>(all[i].options, mesh), loaded = model_of<float>(all[i].options, mesh);
    if (i > 0) {  // what the mesh before has saved
      load_errors(folder / formatted("step_%08zu", i), model->trained_store(), i % 2 ? 1000 : most_at_once);
      const std::vector<double> after = sum_of_errors(model->trained_store());
      CHECK(before == after);
    }
    fill_errors(model->trained_store());
    before = sum_of_errors(model->trained_store());
    const RankGroup group = {ranks().all, mesh.tp().size(), 1000 * sizeof(float)};
    CheckpointWriter writer(folder, size_t(300'000), group, [](size_t floats) {  // several files
      return ranks().all.rank() == 1 ? nullptr : allocate_zeros(floats);
    });
    const CheckpointContent content = {model->trained_store(), written_blocks(*model, group.chunk_bytes), "{}"};
    CHECK(writer.begin(i + 1, content) == "");
    CHECK(writer.complete() == "");
    load_errors(folder / formatted("step_%08zu", i + 1), loaded->trained_store());
    CHECK(same_bits(errors_of(loaded->trained_store()), errors_of(model->trained_store())));
  }
  ranks().all.all_gather("");
}

TEST_CASE("a checkpoint of one data-parallel rank has no errors: they begin at zero") {
  static TemporaryFolder mine;
  const std::filesystem::path folder = ranks().all.all_gather(mine.path())[0];
  const ModelOptions options = ways(8)[0].options;
  Mesh alone;
  const std::unique_ptr<Model> one = model_of<float>(options, alone), many = model_of<float>(options, mesh_of_codes());
  CHECK(!one->trained_store().has_errors());
  if (ranks().all.rank() == 0) save_checkpoint(folder, 1, {one->trained_store(), written_blocks(*one, most_at_once), "{}"});
  ranks().all.all_gather("");
  fill_errors(many->trained_store());
  load_errors(folder / "step_00000001", many->trained_store());
  CHECK(std::ranges::all_of(errors_of(many->trained_store()), [](float x) { return x == 0; }));
  ranks().all.all_gather("");
}
