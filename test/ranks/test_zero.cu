// The heart of data parallelism: whatever the ranks, the ZeRO stage and the micro-batch, training gives the curve of
// one rank, sends the bytes of the formulas and allocates the bytes of the formulas.
// For remove_events.sh: 3 ranks, *take turns*
#include "kernels/norm.cuh"
#include "test/ranks/formulas.cuh"

namespace {

template <class T>
void check_all_stages(const ModelShape& shape, int micro_batch, size_t steps) {
  CAPTURE(shape.channels);
  CAPTURE(micro_batch);
  for (int stage = 0; stage <= (dp().size() > 1 ? 3 : 0); ++stage) {  // one rank has one stage
    CAPTURE(stage);
    const Curve curve = train<T>(shape, mesh(), micro_batch, {.zero = stage}, steps);
    if constexpr (std::is_same_v<T, float>) check_fp32_curve(curve, shape);
    else check_16_bit_curves<T>({curve}, shape);
  }
}

// ---- gradients beside what they are summed from

// The elements of a tensor's gradient, summed over all micro-batches of all ranks, and the sums of their magnitudes.
struct Terms {
  std::vector<double> sums, magnitudes;
};

void add_over_ranks(std::vector<double>& values) {
  Buffer<double> device(values);
  dp().after(test_stream());
  dp().all_reduce(device.data(), device.size());
  dp().wait_for_all(test_stream());
  values = device.get();
}

// The terms by tensor name. Each rank computes its own micro-batches one by one, without the others.
template <class T>
std::map<std::string, Terms> gradient_terms(const ModelShape& shape, int micro_batch) {
  Mesh alone;
  const std::unique_ptr<Model> owner = model_of<T>(shape, alone, micro_batch);
  Model& model = *owner;
  std::map<std::string, Terms> all;
  MicroBatches batches(model, mesh(), 0, true);
  for (int number = 0; number < micro_batches(model.options(), mesh()); ++number) {
    Batch batch = batches.batch({Work::forward, number});
    batch.first = batch.last = true;
    model.begin_sums();
    model.forward(batch);
    model.backward(batch);
    for (const Slice& slice : model.trained_store().kept_slices()) {
      const std::vector<float> gradient = values_of(model.trained_store(), slice, State::gradient);
      Terms& terms = all[slice.tensor->name];
      terms.sums.resize(slice.count);
      terms.magnitudes.resize(slice.count);
      for (size_t i = 0; i < slice.count; ++i) {
        terms.sums[i] += gradient[i];
        terms.magnitudes[i] += std::abs(gradient[i]);
      }
    }
  }
  for (auto& [name, terms] : all) {
    add_over_ranks(terms.sums);
    add_over_ranks(terms.magnitudes);
  }
  return all;
}

// The gradients of a first step are the sums of their terms. Each addition of floats rounds a sum that is no larger
// than the largest sum of magnitudes in the tensor. There is an addition for each micro-batch of all ranks, and one for
// each token of a micro-batch, as kernels add tokens to the sum of the micro-batches before. In bf16 each rank rounds
// what it sends, and each of the N − 1 additions rounds its result, by 2^-8 of the element's own magnitudes at most.
// The norm is off by no more than the norm of all these errors.
template <class T>
void check_gradients(const ModelShape& shape, int micro_batch, const std::map<std::string, Terms>& terms, StoreOptions store) {
  const std::unique_ptr<Model> owner = model_of<T>(shape, mesh(), micro_batch, store);
  Model& model = *owner;
  train_step(model, mesh(), 0);
  const double additions = global_batch() / micro_batch + micro_batch * shape.positions;
  const double of_element = store.cast_gradients ? dp().size() * rounding<T> : 0;
  double worst = 0, squares = 0, allowed_squares = 0;
  for (const Slice& slice : model.trained_store().kept_slices()) {
    const std::vector<float> actual = values_of(model.trained_store(), slice, State::gradient);
    const auto& [sums, magnitudes] = terms.at(slice.tensor->name);
    const double of_tensor = additions * rounding<float> * *std::max_element(magnitudes.begin(), magnitudes.end());
    for (size_t i = 0; i < slice.count; ++i) {
      const double wanted = sums[slice.first + i], allowed = of_element * magnitudes[slice.first + i] + of_tensor;
      const double share = std::abs(actual[i] - wanted) / allowed;
      if (!(share <= worst)) worst = std::isnan(share) ? INFINITY : share;
      squares += wanted * wanted;
      allowed_squares += allowed * allowed;
    }
  }
  CHECK_WITHIN(store.cast_gradients ? "sent in bf16" : "sent in fp32", worst, 1);
  std::vector<double> totals = {squares, allowed_squares};
  if (store.zero > 0) add_over_ranks(totals);  // each has its pieces
  const double norm = std::sqrt(totals[0]);
  CHECK_WITHIN("norm", model.gradient_summary().norm - norm, std::sqrt(totals[1]) + additions * rounding<float> * norm);
}

// ---- bytes by the formulas of gpt/README.md, for this model's units

// The bytes of the partial sums of the gradients' norm.
double norm_bytes(const Shards& shards) {
  size_t partials = 0;
  for (int unit = 0; unit < shards.units(); ++unit) partials += partial_sums<float>(shards.owned(unit).count);
  return double(partials * sizeof(float));
}

// Bytes of parameters' state, by category: the ZeRO paper's table with fp32 gradients, plus the working set.
template <class T>
std::map<std::string, double> bytes_of_memory(const Shards& shards, int layers, int stage) {
  const double piece = double(shards.all_pieces()), whole = double(shards.all_whole());
  const double ring = double(shards.whole(0) + shards.whole(layers + 1) + std::min(layers, 2) * shards.whole(1));
  const double states = std::is_same_v<T, float> ? 2 : 3;
  std::map<std::string, double> bytes = {{"weights", (stage == 3 ? piece : whole) * sizeof(T)},
                                         {"gradients", (stage >= 2 ? piece : whole) * sizeof(float)},
                                         {"optimizer", (stage >= 1 ? piece : whole) * sizeof(float) * states}};
  if (stage >= 2) bytes["unit buffers"] = ring * (sizeof(float) + (stage == 3 ? sizeof(T) : 0));
  return bytes;
}

}  // namespace

TEST_CASE("every stage and micro-batch gives the curve of one rank: blocks that take turns") {
  for (int micro_batch : {1, 2}) check_all_stages<float>(deep, micro_batch, all_steps);
}

TEST_CASE("every stage and micro-batch gives the curve of one rank: even sizes") {
  for (int micro_batch : {1, 2}) check_all_stages<float>(even, micro_batch, some_steps);
}

TEST_CASE_TEMPLATE("every stage and micro-batch gives the curve of one rank: odd sizes", T, float, __nv_bfloat16) {
  check_all_stages<T>(odd, 2, all_steps);
  check_all_stages<T>(odd, 1, some_steps);
}

TEST_CASE_TEMPLATE("gradients are summed over micro-batches and ranks", T, float, __nv_bfloat16) {
  for (const ModelShape& shape : {even, odd}) {
    CAPTURE(shape.channels);
    const std::map<std::string, Terms> terms = gradient_terms<T>(shape, 2);
    for (int stage = 0; stage <= 3; ++stage)
      for (bool narrow : {false, true}) {
        CAPTURE(stage);
        CAPTURE(narrow);
        if (!narrow || !std::is_same_v<T, float>) check_gradients<T>(shape, 2, terms, {.zero = stage, .cast_gradients = narrow});
      }
  }
}

#ifndef __NVCC__
TEST_CASE("passes without a collective are launched as graphs") {
  const size_t micro_steps = size_t(global_batch() / dp().size());
  // A graph for forward and one for backward, in all micro-steps but the last, which reduces the gradients. In stage 1
  // the first forward pass is no graph either: it gathers the new weights.
  const size_t expected[] = {2 * (micro_steps - 1), 2 * (micro_steps - 1) - 1, 0, 0};
  const size_t steps = 6;  // so that each of the three batch buffers has had a step's first micro-batch before
  for (int stage : {0, 1, 2, 3}) {
    CAPTURE(stage);
    CHECK(train<float>(deep, mesh(), 1, {.zero = stage}, steps).graphs == expected[stage]);
  }
}
#endif

// Stage 0 reduces whole units once, stage 3 pieces in each micro-step.
TEST_CASE("gradients that travel in bf16 give the curve of one rank") {
  std::vector<Curve> curves;
  for (int stage : {0, 3})
    curves.push_back(train<__nv_bfloat16>(odd, mesh(), 2, {.zero = stage, .cast_gradients = true}));
  check_16_bit_curves<__nv_bfloat16>(curves, odd);
}

TEST_CASE("the same mesh gives the same bits, and so do stages that add in the same order") {
  // One micro-step: every stage reduces the same sums. (Stage 0 reduces them by another collective, which may add in
  // another order on a GPU.)
  const int micro_batch = global_batch() / dp().size();
  const Curve first = train<float>(odd, mesh(), micro_batch, {.zero = 1}, some_steps);
  for (int stage : {1, 2, 3}) {
    CAPTURE(stage);
    const Curve again = train<float>(odd, mesh(), micro_batch, {.zero = stage}, some_steps);
    CHECK(again.losses == first.losses);
    CHECK(again.norms == first.norms);
  }
}

TEST_CASE_TEMPLATE("the formulas give the bytes sent and allocated", T, float, __nv_bfloat16) {
  for (int layers : {1, 2, 5})
    for (int stage = 0; stage <= 3; ++stage) {
      CAPTURE(layers);
      CAPTURE(stage);
      const ModelShape shape = {layers, 3, 51, 211, 8};
      const int micro_batch = global_batch() / dp().size() / 2;
      const TensorList list(shape);
      const Shards shards(list, dp().size(), dp().rank());
      const Curve curve = train<T>(shape, mesh(), micro_batch, {.zero = stage}, 2);
      check_bytes(curve, bytes_of_step<T>(mesh(), shards, stage, 2));
      const auto wanted = bytes_of_memory<T>(shards, layers, stage);
      for (const auto& category : curve.memory) {
        if (!wanted.count(category.name)) continue;
        CAPTURE(category.name);
        // Arrays start at multiples of 256 bytes; the partial sums of the norm lie with the gradients.
        const double slack = category.name == "gradients" ? norm_bytes(shards) + 2048 : 2048;
        CHECK(double(category.bytes) >= wanted.at(category.name));
        CHECK(double(category.bytes) <= wanted.at(category.name) + slack);
      }
    }
}

// The weights by tensor, after one step on `mesh`; elements in other ranks' pieces are NaN.
std::map<std::string, std::vector<float>> stochastically_rounded(Mesh& mesh, int stage) {
  const StoreOptions store = {.zero = stage, .stochastic_rounding = true};
  const std::unique_ptr<Model> owner = model_of<__nv_bfloat16>(even, mesh, 2, store);
  Model& model = *owner;
  train_step(model, mesh, 0);
  std::map<std::string, std::vector<float>> weights;
  for (const Slice& slice : model.trained_store().kept_slices()) {
    std::vector<float>& values = weights.try_emplace(slice.tensor->name, slice.tensor->count(), NAN).first->second;
    std::ranges::copy(values_of(model.trained_store(), slice, State::weight), values.begin() + long(slice.first));
  }
  return weights;
}

// A weight that is to become x is rounded the other way if sums in another order move x across its random number: with
// probability |δx| / ulp(x). AdamW's first update is ±lr whatever the size of the gradient. So δx is 0, unless a
// gradient is all noise and its sign is open: in the key third of c_attn.bias, which is 0.1 % of the weights, and in a
// few more. Random numbers that depend on the mesh would round a third of all weights to the other side: the mean of
// 2f(1 − f) over the fractions f of a unit.
TEST_CASE("masters left out: stochastic rounding does not depend on the mesh") {
  Mesh alone;
  const auto wanted = stochastically_rounded(alone, 0);
  for (int stage : {0, 1, 2, 3}) {
    CAPTURE(stage);
    size_t all = 0, different = 0;
    for (const auto& [name, weights] : stochastically_rounded(mesh(), stage))
      for (size_t i = 0; i < weights.size(); ++i) {
        all += !std::isnan(weights[i]);
        different += !std::isnan(weights[i]) && weights[i] != wanted.at(name)[i];
      }
    CHECK(all > 0);
    CHECK_WITHIN("share of weights", double(different) / double(all), 0.02);
  }
}

TEST_CASE_TEMPLATE("a NaN in one gradient of one rank: all ranks leave the update out, and go on", T, float, __nv_bfloat16) {
  for (int stage : {0, 1, 2, 3})
    for (bool stochastic : {false, true}) {
      if (stochastic && std::is_same_v<T, float>) continue;
      CAPTURE(stage);
      const StoreOptions store = {.zero = stage, .stochastic_rounding = stochastic};
      const std::unique_ptr<Model> owner = model_of<T>(odd, mesh(), 2, store);
      Model& model = *owner;
      train_step(model, mesh(), 0);
      CHECK(was_applied(model));
      const std::vector<float> before = own_state(model.trained_store());
      train_step(model, mesh(), 1, [&] {
        const float nan = NAN;
        if (dp().rank() == dp().size() - 1)
          copy_and_wait(model.trained_store().gradients(0).data + 77, &nan, 1, cudaMemcpyHostToDevice, test_stream());
      });
      CHECK(std::isnan(model.gradient_summary().norm));
      CHECK(!was_applied(model));
      CHECK(own_state(model.trained_store()) == before);
      train_step(model, mesh(), 2);
      CHECK(was_applied(model));
      CHECK(std::isfinite(model.gradient_summary().norm));
      CHECK(own_state(model.trained_store()) != before);
    }
}

TEST_CASE("fp16: all ranks have one loss scale, and the curve does not depend on it") {
  for (int stage : {0, 1, 2, 3}) {
    CAPTURE(stage);
    const LossScale scale = {.value = 0x1p28f, .window = 3};  // overflows at once, and is halved until it doesn't
    const StoreOptions store = {.zero = stage, .loss_scale = scale};
    const std::unique_ptr<Model> owner = model_of<__half>(odd, mesh(), 2, store);
    Model& model = *owner;
    const std::vector<float> before = own_state(model.trained_store());
    int left_out = 0;
    for (train_step(model, mesh(), 0); !was_applied(model); train_step(model, mesh(), 0)) {
      CHECK(own_state(model.trained_store()) == before);
      CHECK(model.gradient_summary().scale.value == std::ldexp(scale.value, -++left_out));
      REQUIRE(left_out < 20);
    }
    CHECK(left_out > 0);
    Curve curve;
    for (size_t step = 0; step < 4; ++step) {
      if (step > 0) train_step(model, mesh(), step);
      curve.losses.push_back(model.loss());
      curve.norms.push_back(model.gradient_summary().norm);
    }
    const LossScale last = model.gradient_summary().scale;
    const std::vector<float> all = all_values({last.value, float(last.good_steps)});
    for (size_t i = 0; i < all.size(); ++i) CHECK(all[i] == all[i % 2]);
    check_16_bit_curves<__half>({curve}, odd);
  }
}

TEST_CASE("votes of the ranks are summed with the loss") {
  const std::unique_ptr<Model> owner = model_of<float>(deep, mesh(), 2);
  Model& model = *owner;
  const HostMemory pinned(sizeof(StepSums));
  StepSums& votes = *static_cast<StepSums*>(pinned.data());
  for (int step = 0; step < 3; ++step) {
    votes = {.stop = step == 1 && dp().rank() == dp().size() - 1 ? 1.0f : 0.0f, .saved = float(step)};
    train_step(model, mesh(), size_t(step), [] {}, &votes);
    CHECK(model.sums().stop == float(step == 1));
    CHECK(model.sums().saved == float(step * dp().size()));
    CHECK(model.loss() > 1);
  }
}
