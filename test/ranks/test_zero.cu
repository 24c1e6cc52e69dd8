// The heart of data parallelism: whatever the ranks, the ZeRO stage and the micro-batch, training gives the curve of
// one rank, sends the bytes of the formulas and allocates the bytes of the formulas.
#include <functional>

#include "kernels/norm.cuh"
#include "model.cuh"
#include "parallel/mesh.cuh"
#include "parallel/sync_check.cuh"
#include "runtime/schedule.h"
#include "test/ranks/ranks.cuh"
#include "test/temporary_folder.h"

namespace {

constexpr int global_batch = 48, steps = 10;
constexpr ModelShape even = {2, 4, 64, 256, 16};
constexpr ModelShape odd = {2, 3, 51, 211, 48};  // nothing divides anything
constexpr ModelShape deep = {5, 1, 16, 61, 8};   // more blocks than the ring has slots

// Learnable, and different for each sample.
std::vector<int> sample_tokens(const ModelShape& shape, size_t sample) {
  std::vector<int> tokens(size_t(shape.positions) + 1);
  for (size_t t = 0; t < tokens.size(); ++t)
    tokens[t] = int((sample * 31 + t * (1 + sample % 5) + sample * sample % 7) % size_t(shape.vocabulary));
  return tokens;
}

// Losses of ten steps and of a validation, gradient norms, and the bytes of the last step.
struct Curve {
  std::vector<float> losses, norms;
  std::map<std::string, double> bytes_sent;
  double really_sent = 0;  // as the device's transport counts it
  size_t graphs = 0;       // in the last step
  std::vector<DeviceMemory::Category> memory;
};

// Bytes that left this rank so far; 0 where nobody counts them.
double transport_bytes() {
#ifdef __NVCC__
  return 0;
#else
  return double(cpu::nccl_bytes_sent());
#endif
}

// Launched so far; 0 where nobody counts them.
size_t graphs() {
#ifdef __NVCC__
  return 0;
#else
  return cpu::counts.graphs;
#endif
}

// Calls work(inputs, targets, first, last) with each micro-batch of this rank.
template <class Work>
void for_micro_batches(const Model& model, const Communicator& dp, size_t step, Work work) {
  const int B = model.options().micro_batch;
  const size_t micro_steps = size_t(global_batch / (B * dp.size()));
  for (size_t a = 0; a < micro_steps; ++a) {
    std::vector<int> inputs, targets;
    for (int b = 0; b < B; ++b) {
      const size_t number = (a * size_t(dp.size()) + size_t(dp.rank())) * size_t(B) + size_t(b);
      const std::vector<int> tokens = sample_tokens(model.tensors().shape(), step * global_batch + number);
      inputs.insert(inputs.end(), tokens.begin(), tokens.end() - 1);
      targets.insert(targets.end(), tokens.begin() + 1, tokens.end());
    }
    work(inputs.data(), targets.data(), a == 0, a + 1 == micro_steps);
  }
}

void train_step(Model& model, Communicator& dp, size_t step, const std::function<void()>& after_first = [] {}) {
  for_micro_batches(model, dp, step, [&](const int* inputs, const int* targets, bool first, bool last) {
    model.train_micro_step(inputs, targets, double(global_batch) * model.options().seq_len, first, last);
    if (first) after_first();
  });
  const Schedule schedule{"cosine", 3e-3, 3e-4, steps, 3, 0};
  const AdamW options = {float(learning_rate(schedule, step)), 0.9f, 0.95f, 1e-8f, 0.1f};
  model.update(options, 1.0f);
}

float validation_loss(Model& model, Communicator& dp) {
  for_micro_batches(model, dp, steps, [&](const int* inputs, const int* targets, bool first, bool last) {
    model.evaluate_micro_step(inputs, targets, double(global_batch) * model.options().seq_len, first, last);
  });
  return model.loss();
}

template <class T>
std::unique_ptr<Model> model_of(const ModelShape& shape, Communicator& dp, int micro_batch, const StoreOptions& store) {
  const ModelOptions options = {.shape = shape, .micro_batch = micro_batch, .seq_len = shape.positions, .store = store};
  std::unique_ptr<Model> model = make_model(dtype_name<T>, options, dp, test_stream());
  model->store().initialize();
  return model;
}

template <class T>
Curve train(const ModelShape& shape, Communicator& dp, int micro_batch, StoreOptions store) {
  const std::unique_ptr<Model> owner = model_of<T>(shape, dp, micro_batch, store);
  Model& model = *owner;
  Curve curve;
  const auto add = [&](const StepResults& results) {
    curve.losses.push_back(results.sums.loss);
    curve.norms.push_back(results.gradients.norm);
  };
  double before = 0;
  int number = 0, last_step = 0;
  for (size_t step = 0; step < steps; ++step) {  // the host runs one step ahead
    if (step + 1 == steps) {
      CUDA_CHECK(cudaDeviceSynchronize());
      last_step = dp.begin_traffic();
      before = transport_bytes();
      curve.graphs = graphs();
    }
    const int previous = number;
    number = model.begin_step({});
    train_step(model, dp, step);
    model.end_step();
    if (step > 0) add(model.results(previous));
  }
  add(model.results(number));
  CUDA_CHECK(cudaDeviceSynchronize());
  curve.really_sent = transport_bytes() - before;
  curve.graphs = graphs() - curve.graphs;
  curve.bytes_sent = dp.take_traffic(last_step).bytes_sent;
  curve.memory = model.memory().categories();
  curve.losses.push_back(validation_loss(model, dp));
  return curve;
}

// What one rank alone gives, by channels and micro-batch. The ranks share the work of finding out.
template <class T>
const Curve& of_one_rank(const ModelShape& shape, int micro_batch) {
  static std::map<std::pair<int, int>, Curve> known;
  if (!known.count({shape.channels, 1})) {
    Communicator alone;
    int owner = 0;
    for (int size : {1, 2, 4, 8}) {
      const bool mine = owner == ranks().control->rank();
      known[{shape.channels, size}] = mine ? train<T>(shape, alone, size, {}) : Curve{};
      owner = (owner + 1) % ranks().control->size();
    }
    for (int size : {1, 2, 4, 8}) {
      Curve& curve = known[{shape.channels, size}];
      curve.losses = all_values(curve.losses);  // the others have none
      curve.norms = all_values(curve.norms);
    }
  }
  return known.at({shape.channels, micro_batch});
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::abs(double(a[i]) - b[i]) / std::abs(b[i]);
    largest = std::isfinite(difference) ? std::max(largest, difference) : INFINITY;
  }
  return largest;
}

// fp32: within 1e-5. bf16: within 3 times the spread that other micro-batches make of one rank's curve.
template <class T>
void check_equal(const Curve& curve, const ModelShape& shape, int micro_batch) {
  const Curve& wanted = of_one_rank<T>(shape, micro_batch);
  double losses = 1e-5 / 3, norms = 1e-5 / 3;
  if (!std::is_same_v<T, float>)
    for (int other : {1, 2, 4, 8}) {
      losses = std::max(losses, largest_difference(of_one_rank<T>(shape, other).losses, wanted.losses));
      norms = std::max(norms, largest_difference(of_one_rank<T>(shape, other).norms, wanted.norms));
    }
  CHECK(largest_difference(curve.losses, wanted.losses) <= 3 * losses);
  CHECK(largest_difference(curve.norms, wanted.norms) <= 3 * norms);
}

Communicator& dp() { return ranks().mesh.dp(); }

template <class T>
void check_all_stages(const ModelShape& shape) {
  for (int stage = 0; stage <= (dp().size() > 1 ? 3 : 0); ++stage)  // one rank has one stage
    for (int micro_batch : {1, 2}) {
      CAPTURE(shape.channels);
      CAPTURE(stage);
      CAPTURE(micro_batch);
      check_equal<T>(train<T>(shape, dp(), micro_batch, {.stage = stage}), shape, micro_batch);
    }
}

// ---- what the design's section 6 says of bytes, for this model's units

// Bytes a step, by collective; a float, or a T, is `wide`, or `narrow`, bytes. Padding included: it travels too.
template <class T>
std::map<std::string, double> bytes_of_step(const Shards& shards, int layers, int stage, int micro_steps) {
  const double others = double(dp().size() - 1), wide = sizeof(float), narrow = sizeof(T);
  const double A = micro_steps, block = double(shards.piece(1)), rest = double(shards.piece(0) + shards.piece(layers + 1));
  const double all = rest + layers * block;
  std::map<std::string, double> bytes = {{"all_reduce", others / dp().size() * 2 * sizeof(StepSums)}};
  if (stage == 0) bytes["all_reduce"] += 2 * others * all * wide;
  else bytes["all_reduce"] += others / dp().size() * 2 * sizeof(double);  // the squares
  if (stage == 1) bytes["reduce_scatter"] = others * all * wide;
  if (stage >= 2) bytes["reduce_scatter"] = others * (rest + A * layers * block) * wide;
  if (stage == 1 || stage == 2) bytes["all_gather"] = others * all * narrow;
  // Forward and backward of each micro-step, but the two blocks that are still there when the direction turns.
  const double gathered = layers + (2 * A - 1) * std::max(layers - 2, 0);
  if (stage == 3) bytes["all_gather"] = others * (rest + gathered * block) * narrow;
  return bytes;
}

// Over the ranks: a sum of few elements does not travel in equal parts.
double all_added(double mine) {
  double sum = 0;
  for (const std::string& text : ranks().control->all_gather(std::to_string(mine))) sum += std::stod(text);
  return sum;
}

// Of the partial sums of the gradients' norm.
double norm_bytes(const TensorList& list, const Shards& shards, int stage) {
  size_t partials = 0;
  for (int unit = 0; unit < int(list.units().size()); ++unit)
    partials += norm_partials(stage ? shards.piece(unit) : shards.whole(unit));
  return double((partials + norm_workspace(partials)) * sizeof(float));
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

// test/remove_events.sh runs this one.
TEST_CASE("every stage and micro-batch gives the curve of one rank: blocks that take turns") {
  check_all_stages<float>(deep);
}

TEST_CASE_TEMPLATE("every stage and micro-batch gives the curve of one rank: even and odd sizes", T, float,
                   __nv_bfloat16) {
  for (const ModelShape& shape : {even, odd}) check_all_stages<T>(shape);
}

#ifndef __NVCC__
TEST_CASE("micro-steps without a collective are launched as graphs") {
  if (dp().size() == 1) return;
  const size_t micro_steps = size_t(global_batch / dp().size());
  // All but the last, which reduces the gradients, and in stage 1 the first, which gathers the new weights.
  const size_t expected[] = {micro_steps - 1, micro_steps - 2, 0, 0};
  for (int stage : {0, 1, 2, 3}) {
    CAPTURE(stage);
    CHECK(train<float>(deep, dp(), 1, {.stage = stage}).graphs == expected[stage]);
  }
}
#endif

TEST_CASE("gradients that travel in bf16") {
  for (int stage = 0; stage <= 3; ++stage) {
    CAPTURE(stage);
    const Curve curve = train<__nv_bfloat16>(odd, dp(), 2, {.stage = stage, .reduce_narrow = true});
    const Curve& wanted = of_one_rank<__nv_bfloat16>(odd, 2);
    // Each element of a gradient is rounded by up to 2^-9 = 0.2 %, at random; AdamW's update hardly more than that.
    CHECK(largest_difference(curve.losses, wanted.losses) <= 2e-3);
    CHECK(largest_difference(curve.norms, wanted.norms) <= 2e-2);
  }
}

TEST_CASE("the same mesh gives the same bits, and so do stages that add in the same order") {
  // One micro-step: every stage reduces the same sums. From stage 1 on the norm is added up in the same parts too.
  const int micro_batch = global_batch / dp().size();
  const Curve first = train<float>(odd, dp(), micro_batch, {.stage = 1});
  for (int stage : {1, 2, 3}) {
    CAPTURE(stage);
    const Curve again = train<float>(odd, dp(), micro_batch, {.stage = stage});
    CHECK(again.losses == first.losses);
    CHECK(again.norms == first.norms);
  }
}

TEST_CASE("masters left out: stochastic rounding does not depend on the mesh") {
  const StoreOptions store = {.stage = 3, .stochastic_rounding = true};
  const Curve curve = train<__nv_bfloat16>(even, dp(), 2, store);
  Communicator alone;
  const std::vector<float> losses = train<__nv_bfloat16>(even, alone, 2, {.stochastic_rounding = true}).losses;
  CHECK(largest_difference(curve.losses, losses) <= 0.01);  // a weight may be rounded the other way: 2^-9 of it
}

TEST_CASE_TEMPLATE("bytes sent and allocated are those of the formulas", T, float, __nv_bfloat16) {
  if (dp().size() == 1) return;
  for (int layers : {1, 2, 5})
    for (int stage = 0; stage <= 3; ++stage) {
      CAPTURE(layers);
      CAPTURE(stage);
      const ModelShape shape = {layers, 3, 51, 211, 8};
      const int micro_batch = global_batch / dp().size() / 2;
      const TensorList list(shape);
      const Shards shards(list, dp().size(), dp().rank());
      const Curve curve = train<T>(shape, dp(), micro_batch, {.stage = stage});
      for (const auto& [name, bytes] : bytes_of_step<T>(shards, layers, stage, 2)) {
        CAPTURE(name);
        CHECK(curve.bytes_sent.at(name) == doctest::Approx(bytes));
      }
      double counted = 0;
      for (const auto& [name, bytes] : curve.bytes_sent) counted += bytes;
      if (transport_bytes() > 0) CHECK(all_added(curve.really_sent) == doctest::Approx(all_added(counted)));
      const auto wanted = bytes_of_memory<T>(shards, layers, stage);
      for (const auto& category : curve.memory) {
        if (!wanted.count(category.name)) continue;
        CAPTURE(category.name);
        // Arrays start at multiples of 256 bytes; the partial sums of the norm lie with the gradients.
        const double slack = category.name == "gradients" ? norm_bytes(list, shards, stage) + 2048 : 2048;
        CHECK(double(category.bytes) >= wanted.at(category.name));
        CHECK(double(category.bytes) <= wanted.at(category.name) + slack);
      }
    }
}

TEST_CASE_TEMPLATE("--check-sync names the rank and the tensor that drifted", T, float, __nv_bfloat16) {
  if (dp().size() == 1) return;
  for (int stage : {0, 1, 2}) {
    CAPTURE(stage);
    const std::unique_ptr<Model> model = model_of<T>(odd, dp(), 2, {.stage = stage});
    train_step(*model, dp(), 0);
    const auto check = [&] { check_sync(*ranks().control, model->store(), 1, test_stream()); };
    CHECK_NOTHROW(check());

    T* weight = nullptr;
    model->store().visit_replicated([&](const TensorDescriptor& tensor, std::string what, const void* values, size_t) {
      if (tensor.name == "h.1.mlp.c_fc.weight" && what == "weights") weight = static_cast<T*>(const_cast<void*>(values)) + 1000;
    });
    if (dp().rank() == dp().size() - 1) {  // the sign of one weight
      T value;
      CUDA_CHECK(cudaMemcpy(&value, weight, sizeof value, cudaMemcpyDefault));
      value = from_float<T>(-to_float(value));
      CUDA_CHECK(cudaMemcpy(weight, &value, sizeof value, cudaMemcpyDefault));
    }
    std::string message;
    try {
      check();
    } catch (const std::exception& error) {
      message = error.what();
    }
    CAPTURE(message);
    CHECK(contains(message, "by step 1: h.1.mlp.c_fc.weight (weights) on "));
    CHECK(contains(message, "rank " + std::to_string(dp().size() - 1) + " ("));
    if (dp().size() > 2) CHECK(contains(message, ") differs from rank"));
  }
}

// Weights and moments that this rank keeps.
std::vector<float> own_state(const Parameters& store) {
  std::vector<float> all;
  for (const Slice& slice : store.own_slices())
    for (State state : {State::weight, State::first_moment, State::second_moment}) {
      std::vector<float> values(slice.count);
      store.copy_out(slice, state, values.data());
      CUDA_CHECK(cudaStreamSynchronize(test_stream()));
      all.insert(all.end(), values.begin(), values.end());
    }
  return all;
}

bool was_applied(Model& model) {
  return model.gradient_summary().factor >= 0;
}

TEST_CASE_TEMPLATE("a NaN in one gradient of one rank: all ranks leave the update out, and go on", T, float, __nv_bfloat16) {
  for (int stage : {0, 1, 2, 3})
    for (bool stochastic : {false, true}) {
      if (stochastic && std::is_same_v<T, float>) continue;
      CAPTURE(stage);
      const StoreOptions store = {.stage = stage, .stochastic_rounding = stochastic};
      const std::unique_ptr<Model> owner = model_of<T>(odd, dp(), 2, store);
      Model& model = *owner;
      train_step(model, dp(), 0);
      CHECK(was_applied(model));
      const std::vector<float> before = own_state(model.store());
      train_step(model, dp(), 1, [&] {
        const float nan = NAN;
        if (dp().rank() == dp().size() - 1)
          CUDA_CHECK(cudaMemcpyAsync(model.store().gradients(0).data + 77, &nan, sizeof nan, cudaMemcpyHostToDevice,
                                     test_stream()));
        CUDA_CHECK(cudaStreamSynchronize(test_stream()));
      });
      CHECK(std::isnan(model.gradient_summary().norm));
      CHECK(!was_applied(model));
      CHECK(own_state(model.store()) == before);
      train_step(model, dp(), 2);
      CHECK(was_applied(model));
      CHECK(std::isfinite(model.gradient_summary().norm));
      CHECK(own_state(model.store()) != before);
    }
}

TEST_CASE("fp16: all ranks have one loss scale, and the curve does not depend on it") {
  for (int stage : {0, 1, 2, 3}) {
    CAPTURE(stage);
    const LossScale scale = {.value = 0x1p40f, .window = 3};  // overflows at once, and is halved until it doesn't
    const StoreOptions store = {.stage = stage, .loss_scale = scale};
    const std::unique_ptr<Model> owner = model_of<__half>(odd, dp(), 2, store);
    Model& model = *owner;
    const std::vector<float> before = own_state(model.store());
    int left_out = 0;
    for (train_step(model, dp(), 0); !was_applied(model); train_step(model, dp(), 0)) {
      CHECK(own_state(model.store()) == before);
      CHECK(model.gradient_summary().scale.value == std::ldexp(scale.value, -++left_out));
      REQUIRE(left_out < 40);
    }
    CHECK(left_out > 0);
    std::vector<float> losses = {model.loss()};
    for (size_t step = 1; step < 4; ++step) {
      train_step(model, dp(), step);
      losses.push_back(model.loss());
    }
    const LossScale last = model.gradient_summary().scale;
    const std::vector<float> all = all_values({last.value, float(last.good_steps)});
    for (size_t i = 0; i < all.size(); ++i) CHECK(all[i] == all[i % 2]);
    const std::vector<float>& wanted = of_one_rank<float>(odd, 2).losses;
    for (size_t step = 0; step < 4; ++step) CHECK(std::abs(losses[step] / wanted[step] - 1) < 0.01 / 8);
  }
}

TEST_CASE("votes of the ranks are summed with the loss") {
  const std::unique_ptr<Model> owner = model_of<float>(deep, dp(), 2, {});
  Model& model = *owner;
  for (int step = 0; step < 3; ++step) {
    model.begin_step({.stop = step == 1 && dp().rank() == dp().size() - 1 ? 1.0f : 0.0f, .saved = float(step)});
    train_step(model, dp(), size_t(step));
    CHECK(model.sums().stop == float(step == 1));
    CHECK(model.sums().saved == float(step * dp().size()));
    CHECK(model.loss() > 1);
  }
}
