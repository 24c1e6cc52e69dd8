// Islands on every mesh, with and without a delay: the curves and weights of islands that one process imagines, and outer
// steps on the host in float64; the bytes of the formulas, sent and allocated.
// For remove_events.sh: 4 ranks, an outer step under way*<float>
#include "extensions/islands/kernels/outer_step.cuh"
#include "test/ranks/formulas.cuh"

namespace {

// Biases of zero would leave the norms of some steps to rounding alone.
[[maybe_unused]] const bool all_random = files_with_random_tensors().insert(__FILE__).second;

constexpr OuterOptions outer = {.local_steps = 3, .lr = 0.7, .momentum = 0.9};

std::vector<float> weights_of(Model& model) {
  std::vector<float> all;
  for (const Slice& slice : model.trained_store().kept_slices()) {
    const std::vector<float> values = values_of(model.trained_store(), slice, State::weight);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

void set_weights(Model& model, const std::vector<double>& values) {
  size_t before = 0;
  for (const TensorDescriptor& tensor : model.tensors().tensors()) {
    const auto first = values.begin() + long(before);
    model.trained_store().copy_in({&tensor, 0, tensor.count()}, State::weight, {first, first + long(tensor.count())});
    before += tensor.count();
  }
}

// What islands of `dp` data-parallel ranks each compute.
struct Imagined {
  std::vector<std::vector<float>> losses, norms;  // by island and step
  std::vector<float> initial, weights;            // before and after all steps
  float validation;
};

Imagined imagine(const ModelShape& shape, int islands, int dp, size_t steps, int delay) {
  Mesh alone;
  std::vector<std::unique_ptr<Model>> models;
  for (int island = 0; island < islands; ++island) models.push_back(model_of<float>(shape, alone, 2));
  Imagined result;
  result.losses.resize(size_t(islands)), result.norms.resize(size_t(islands));
  result.initial = weights_of(*models[0]);
  std::vector<double> start(result.initial.begin(), result.initial.end()), momentum(start.size());
  std::vector<std::vector<float>> taken;  // for the outer step under way, by island
  // What an island has learned since then it adds to what the outer step has made of all islands' weights.
  const auto end_outer_step = [&] {
    for (size_t island = 0; island < taken.size(); ++island) {
      std::vector<double> weights = start;
      const std::vector<float> own = weights_of(*models[island]);
      for (size_t i = 0; i < weights.size(); ++i) weights[i] += double(own[i]) - taken[island][i];
      set_weights(*models[island], weights);
    }
    taken.clear();
  };
  for (size_t step = 0; step < steps; ++step) {
    for (int island = 0; island < islands; ++island) {
      imagined_island = {dp, island, islands};
      train_step(*models[size_t(island)], alone, step);
      result.losses[size_t(island)].push_back(models[size_t(island)]->loss());
      result.norms[size_t(island)].push_back(models[size_t(island)]->gradient_summary().norm);
    }
    const bool is_last = step + 1 == steps;
    const int behind = int(step + 1) % outer.local_steps;
    if (behind == delay || is_last) end_outer_step();
    if (behind != 0 && !is_last) continue;
    std::vector<double> mean(start.size());
    for (const auto& model : models) {
      const std::vector<float> own = weights_of(*model);
      for (size_t i = 0; i < mean.size(); ++i) mean[i] += double(own[i]) / islands;
    }
    for (size_t i = 0; i < mean.size(); ++i) {  // as PyTorch's SGD writes it
      const double g = start[i] - mean[i];
      momentum[i] = outer.momentum * momentum[i] + g;
      start[i] -= outer.lr * (g + outer.momentum * momentum[i]);
    }
    for (const auto& model : models) taken.push_back(weights_of(*model));
    if (delay == 0 || is_last) end_outer_step();
  }
  imagined_island = {};
  result.weights = weights_of(*models[0]);
  result.validation = validation_loss(*models[0], alone);
  return result;
}

// The meshes of an island of so many ranks.
std::vector<MeshShape> meshes_of(int ranks) {
  if (ranks == 1) return {{}};
  std::vector<MeshShape> shapes = {{.dp = ranks}};
  if (ranks == 2) shapes.insert(shapes.end(), {{.tp = 2}, {.cp = 2}, {.pp = 2}});
  if (ranks == 4) shapes.insert(shapes.end(), {{.tp = 2, .dp = 2}, {.tp = 2, .pp = 2}, {.cp = 2, .dp = 2}});
  return shapes;
}

// Calls check(shape, stage) for all of them that these ranks allow, in turns where each has four stages. One island: its meshes
// are other tests' business.
template <class Check>
void on_every_mesh(Check check) {
  const int all = ranks().all.size();
  for (int islands = 1; islands <= all; ++islands) {
    if (all % islands > 0) continue;
    for (MeshShape shape : islands == 1 ? std::vector<MeshShape>{{.dp = all}} : meshes_of(all / islands)) {
      shape.islands = islands;
      const int stages = shape.dp * shape.cp > 1 && islands > 1 ? 4 : 1;
      for (int stage = 0; stage < stages; ++stage) {
        if (stages > 1 && !has_turn(stage + islands)) continue;
        INFO("islands ", islands, ", tp ", shape.tp, ", cp ", shape.cp, ", dp ", shape.dp, ", pp ", shape.pp, ", ZeRO ", stage);
        check(shape, stage);
      }
    }
  }
}

// Have the ranks with this place in all islands the same bits?
bool alike_in_islands(const std::vector<float>& mine, const MeshShape& shape) {
  const std::vector<std::string> all =
      ranks().all.all_gather({reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(float)});
  for (int rank = ranks().all.rank() % shape.of_an_island(); rank < int(all.size()); rank += shape.of_an_island())
    if (all[size_t(rank)] != all[size_t(ranks().all.rank())]) return false;
  return true;
}

// Of one rank's float64 start, momentum and mean.
struct HostStep {
  double weight, momentum;
};
HostStep host_step(double start, double momentum, double mean, double lr, double mu) {
  const double g = start - mean, v = mu * momentum + g;
  return {start - lr * (g + mu * v), v};
}

}  // namespace

// Roundings: of g, v (2), (1 − lr)·g, lr·µ·v (2) and of two sums; each of a number of at most |w₀| + |mean| + |v|.
TEST_CASE("an outer step is Nesterov's on the host") {
  for (const auto& [lr, mu] : {std::pair(0.7, 0.9), {1.0, 0.0}, {1.0, 0.9}, {0.3, 0.5}}) {
    CAPTURE(lr);
    const size_t count = 256;
    std::vector<float> start(count), momentum(count), values(3 * count);
    for (size_t i = 0; i < count; ++i) start[i] = random_of("start", i), momentum[i] = random_of("momentum", i);
    for (size_t i = 0; i < values.size(); ++i) values[i] = random_of("values", i);
    Buffer<float> w(std::vector<float>(count, NAN)), w0(start), v(momentum), all(values), mean(std::vector<float>(count, NAN));
    mean_over_islands(mean.data(), all.data(), 3, count, test_stream());
    outer_step(w.data(), w0.data(), v.data(), mean.data(), count, float(lr), float(mu), test_stream());
    const std::vector<float> means = mean.get(), after = w.get(), new_momentum = v.get();
    CHECK(w0.get() == after);
    double worst_mean = 0, worst = 0;
    for (size_t i = 0; i < count; ++i) {
      const double exact = (double(values[i]) + values[count + i] + values[2 * count + i]) / 3;
      worst_mean = std::max(worst_mean, std::abs(means[i] - exact));
      const HostStep wanted = host_step(start[i], momentum[i], means[i], float(lr), float(mu));
      const double magnitude = std::abs(start[i]) + std::abs(means[i]) + std::abs(momentum[i]) + std::abs(wanted.momentum);
      worst = std::max({worst, std::abs(after[i] - wanted.weight) / magnitude, std::abs(new_momentum[i] - wanted.momentum) / magnitude});
    }
    CHECK_WITHIN("mean of islands", worst_mean, 3 * rounding<float> * 0.6);
    CHECK_WITHIN("outer step", worst, 7 * rounding<float>);
    if (lr == 1 && mu == 0) CHECK(after == means);  // bit for bit
  }
}

// Of codes: a change is off by half a unit of its run's scale, the largest change of the run over 127 or 7, rounded up to bf16
// by at most 2^-7; the sum of G islands' by half a unit of the sum's scale, of at most G such changes. A change is no more than
// the steps of AdamW, 3·lr each: with lr 3e-3 and 3 steps 0.027 and decay.
TEST_CASE_TEMPLATE("changes as codes: the mean of islands within their scales, and the same bits on all of them", T, float, __nv_bfloat16) {
  on_every_mesh([&](const MeshShape& shape, int stage) {
    if (shape.islands == 1) return;
    Mesh mesh(ranks().mesh, shape);
    for (const std::string dtype : {"int8", "int4"}) {
      CAPTURE(dtype);
      // Two runs of the same steps, whose outer steps are means: of weights, and of changes as codes.
      std::vector<float> before, means[2];
      for (const bool coded : {false, true}) {
        const OuterOptions mean = {.local_steps = 3, .lr = 1, .momentum = 0, .dtype = coded ? dtype : "fp32"};
        const std::unique_ptr<Model> owner = model_of<T>(even, mesh, 2, {.zero = stage, .rooms = mean});
        const auto masters = [&] {
          std::vector<float> mine;
          for (const Slice& slice : owner->trained_store().kept_slices()) {
            const std::vector<float> more = values_of(owner->trained_store(), slice, State::weight);
            mine.insert(mine.end(), more.begin(), more.end());
          }
          return mine;
        };
        before = masters();
        for (size_t step = 0; step < 3; ++step) train_step(*owner, mesh, step);
        owner->trained_store().outer_step(false);
        means[coded] = masters();
      }
      // In all islands; what other places keep lies between.
      const std::vector<std::string> all = ranks().all.all_gather({reinterpret_cast<const char*>(means[1].data()), means[1].size() * sizeof(float)});
      for (int rank = ranks().all.rank() % shape.of_an_island(); rank < int(all.size()); rank += shape.of_an_island())
        CHECK(all[size_t(rank)] == all[size_t(ranks().all.rank())]);
      double largest = 0, worst = 0, squares = 0;
      for (size_t i = 0; i < before.size(); ++i) {
        largest = std::max(largest, std::abs(double(means[0][i]) - before[i]));
        worst = std::max(worst, std::abs(double(means[1][i]) - means[0][i]));
        squares += std::pow(double(means[1][i]) - means[0][i], 2);
      }
      CHECK(largest > 1e-4);
      CHECK(squares > 0);
      const double scale = 0.03 / (dtype == "int8" ? 127 : 7) * (1 + 1 / 128.0);
      CHECK_WITHIN(dtype, worst, 0.5 * scale + 0.5 * scale + 1e-6);
    }
  });
}

// The bound of a curve in fp32 (test/README.md, Curves). Weights, in root-mean-square over a tensor: a hundredth of what
// training has changed. Only weights whose gradient is all noise differ by more than 1e-5 of that, and those are few:
// 0.03 % is the most that was seen. Left out is the key third of c_attn.bias. Without momentum, or with it at the wrong
// weights, it is more than a tenth.
TEST_CASE("islands on every mesh give the curves of islands that are imagined") {
  std::map<std::tuple<int, int, int>, Imagined> known;
  const auto check = [&](const MeshShape& shape, int stage, int delay) {
    CAPTURE(delay);
    Mesh mesh(ranks().mesh, shape);
    const auto [imagined, is_new] = known.try_emplace({shape.islands, shape.dp, delay});
    if (is_new) imagined->second = imagine(even, shape.islands, shape.dp, all_steps, delay);
    const Imagined& wanted = imagined->second;
    OuterOptions options = outer;
    options.delay = delay;
    const std::unique_ptr<Model> owner = model_of<float>(even, mesh, 2, {.zero = stage, .rooms = options});
    Model& model = *owner;
    StepsInFlight in_flight(model, mesh);
    OuterSteps outer_steps(options, model);
    std::vector<float> losses, norms;
    for (size_t step = 0; step < all_steps; ++step) {
      in_flight.begin(false, false);
      const StepSums votes = {.stop = mesh.place().island == shape.islands - 1 ? 1.0f : 0.0f, .saved = 1};  // of all its ranks
      train_step(model, mesh, step, [] {}, &votes);
      const bool is_last = step + 1 == all_steps, is_outer = (step + 1) % size_t(outer.local_steps) == 0 || is_last;
      outer_steps.after_update(step + 1, is_outer, is_last);
      in_flight.end(step + 1, 0, {}, 0, is_outer);
      const FinishedStep finished = in_flight.finish();
      losses.push_back(float(finished.result.loss));
      norms.push_back(float(finished.result.norm));
      // Between outer steps nothing of the other islands is known.
      const bool meets = is_outer || shape.islands == 1;
      CHECK(finished.meets == meets);
      CHECK(finished.stop == meets);
      CHECK(finished.saved == meets);
      if (!is_outer) continue;
      double loss = 0, norm = 0;
      for (int island = 0; island < shape.islands; ++island) {
        loss += wanted.losses[size_t(island)][step] / shape.islands;
        norm += wanted.norms[size_t(island)][step] / shape.islands;
      }
      CHECK_WITHIN("mean loss", finished.reported.loss / loss - 1, 1e-5);
      CHECK_WITHIN("mean norm", finished.reported.norm / norm - 1, 1e-5);
    }
    const size_t island = size_t(mesh.place().island);
    CHECK_WITHIN("losses", largest_difference(losses, wanted.losses[island]), 1e-5);
    CHECK_WITHIN("norms", largest_difference(norms, wanted.norms[island]), 1e-5);
    CHECK_WITHIN("validation", validation_loss(model, mesh) / wanted.validation - 1, 1e-5);
    for (const Slice& slice : model.trained_store().kept_slices()) {
      const TensorDescriptor& tensor = *slice.tensor;
      const std::vector<float> own = values_of(model.trained_store(), slice, State::weight);
      double squares = 0, changes = 0;
      for (size_t i = 0; i < own.size(); ++i) {
        const size_t whole = tensor.part.in_whole(slice.first + i), at = offset_of(model.tensors(), tensor) + whole;
        if (tensor.name.ends_with("c_attn.bias") && whole * 3 / tensor.count() == 1) continue;
        squares += std::pow(double(own[i]) - wanted.weights[at], 2);
        changes += std::pow(double(wanted.weights[at]) - wanted.initial[at], 2);
      }
      CAPTURE(tensor.name);
      if (changes > 0) CHECK_WITHIN("weights", std::sqrt(squares / changes), 0.01);
      else CHECK(squares == 0);  // a piece that begins or ends in the key third
    }
  };
  on_every_mesh([&](const MeshShape& shape, int stage) {
    for (int delay = 0; delay < outer.local_steps; ++delay)
      if (stage == 0 || stage % outer.local_steps == delay) check(shape, stage, delay);
  });
}

TEST_CASE_TEMPLATE("after an outer step all islands have the same bits, and their own moments", T, float, __nv_bfloat16) {
  on_every_mesh([&](const MeshShape& shape, int stage) {
    Mesh mesh(ranks().mesh, shape);
    const std::unique_ptr<Model> owner = model_of<T>(even, mesh, 2, {.zero = stage, .rooms = outer});
    Model& model = *owner;
    const auto values = [&](State state) {
      std::vector<float> mine;
      for (const Slice& slice : model.trained_store().kept_slices()) {
        const std::vector<float> more = values_of(model.trained_store(), slice, state);
        mine.insert(mine.end(), more.begin(), more.end());
      }
      return mine;
    };
    const auto is_alike = [&](const std::vector<float>& mine) { return alike_in_islands(mine, shape); };
    for (size_t step = 0; step < 3; ++step) train_step(model, mesh, step);
    CHECK(is_alike(values(State::weight)) == (shape.islands == 1));
    model.trained_store().outer_step(false);
    CHECK(is_alike(values(State::weight)));
    CHECK(is_alike(values(State::first_moment)) == (shape.islands == 1));
    // What the model computes with are these weights.
    const float loss = validation_loss(model, mesh);
    for (const Slice& slice : model.trained_store().kept_slices())
      for (const CheckpointBlock& run : runs(*slice.tensor, slice.first, slice.first + slice.count)) {
        const size_t local = local_before(*slice.tensor, run.first);
        model.trained_store().copy_in(run, State::weight, values_of(model.trained_store(), {slice.tensor, local, run.count, slice.tensor->offset + local}, State::weight));
      }
    CHECK(validation_loss(model, mesh) == loss);
  });
}

// w₀ is the same in all islands, if the outer step after it brings them together again.
TEST_CASE_TEMPLATE("an outer step under way: at once it has the bits of one that nobody delays, and later islands differ by what they learned",
                   T, float, __nv_bfloat16) {
  on_every_mesh([&](const MeshShape& shape, int stage) {
    Mesh mesh(ranks().mesh, shape);
    OuterOptions options = outer;
    options.dtype = stage % 2 == 0 ? "fp32" : "int8";
    const auto three_steps = [&](int delay) {
      options.delay = delay;
      std::unique_ptr<Model> model = model_of<T>(even, mesh, 2, {.zero = stage, .rooms = options});
      for (size_t step = 0; step < 3; ++step) train_step(*model, mesh, step);
      if (delay) model->trained_store().start_outer_step();
      model->trained_store().outer_step(delay > 0);
      return model;
    };
    const std::unique_ptr<Model> at_once = three_steps(0), delayed = three_steps(2);
    CHECK(weights_of(*delayed) == weights_of(*at_once));
    train_step(*delayed, mesh, 3);
    delayed->trained_store().start_outer_step();
    train_step(*delayed, mesh, 4);
    const std::vector<float> before = weights_of(*delayed);
    delayed->trained_store().outer_step(true);
    CHECK(weights_of(*delayed) != before);
    CHECK(alike_in_islands(weights_of(*delayed), shape) == (shape.islands == 1));
    delayed->trained_store().outer_step(false);
    CHECK(alike_in_islands(weights_of(*delayed), shape));
  });
}

TEST_CASE_TEMPLATE("outer steps send and take the bytes of the formulas", T, float, __nv_bfloat16) {
  on_every_mesh([&](const MeshShape& shape, int stage) {
    Mesh mesh(ranks().mesh, shape);
    ModelOptions options = {.shape = even, .micro_batch = 2, .store = {.zero = stage, .rooms = outer}};
    OuterOptions& of_islands = options.store.rooms.of<OuterOptions>();
    of_islands.dtype = (shape.tp + stage) % 3 == 0 ? "fp32" : (shape.tp + stage) % 3 == 1 ? "int8" : "int4";
    const int delay = of_islands.delay = (shape.cp + stage) % 3;
    const Curve curve = train<T>(options, mesh);  // of the last step, which comes after an outer step and is one; with a delay it ends both
    options.seq_len = even.positions;
    const TensorList list(even, shape.tp, mesh.place().tp, layers_of(even, mesh.stage(1)));
    const Shards shards(list, mesh.data().size(), mesh.data().rank());
    BytesSent wanted = bytes_of_mesh<T>(options, mesh, list, shards);
    const double G = shape.islands, others = mesh.data().size() - 1;
    const auto share = [&](int unit) { return double(round_up(ceil_div(shards.piece(unit), size_t(G)), list.alignment())); };
    const int bits = of_islands.bits();
    const auto message = [&](int unit) {  // codes, a scale of two bytes for each 256, up to 16 bytes
      return bits == 0 ? 4 * share(unit) : 16 * std::ceil((share(unit) * bits / 8 + 2 * std::ceil(share(unit) / 256)) / 16);
    };
    double bytes = 0, largest = 0;
    for (int unit = 0; unit < shards.units(); ++unit)
      if (list.has(unit)) bytes += message(unit), largest = std::max(largest, G * (4 * share(unit) + (bits == 0 ? 1 : 2) * message(unit)));
    for (const char* collective : {"all_to_all", "all_gather"}) wanted["islands"][collective] = (G - 1) * bytes;
    wanted["islands"]["all_reduce"] = 2 * (G - 1) / G * 20;
    const double first = double(shards.piece(0) + shards.piece(list.final_norm_unit()) + shards.piece(list.chunks()[0].first + 1));
    const double ended = delay ? 2 : 1;
    if (others > 0) wanted["data"]["all_gather"] += others * (stage == 0 ? 4 * ended * double(shards.all_pieces()) : delay ? 0 : first * sizeof(T));
    check_bytes(curve, wanted);
    check_memory(curve, {{"islands", (delay ? 12 : 8) * double(shards.all_pieces()) + (G > 1 ? largest : 0)}}, 5);
  });
}
