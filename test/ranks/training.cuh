// A little training on some ranks, and its curve beside one rank's.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <set>

#include "extensions/context_parallel/sequence_split.h"
#include "extensions/islands/outer_steps.cuh"
#include "gpt/model.cuh"
#include "gpt/schedule.h"
#include "gpt/steps_in_flight.cuh"
#include "test/model_test.cuh"
#include "test/ranks/ranks.cuh"  // before other tests' headers: it brings main()

constexpr int all_steps = 10, some_steps = 3;
constexpr ModelShape even = {2, 4, 64, 256, 16};
constexpr ModelShape odd = {2, 3, 51, 211, 23};  // nothing divides anything
constexpr ModelShape deep = {5, 1, 16, 61, 8};   // more blocks than the ring has slots

inline Mesh& mesh() { return ranks().mesh; }
inline Communicator& dp() { return mesh().data(); }

// Samples of a step. Each of 1, 2, 3, 4 or 8 data-parallel ranks has at least two micro-batches of two samples.
inline int (*usual_global_batch)() = [] { return std::max(24, 4 * ranks().all.size()); };
inline int chosen_global_batch = 0;  // instead of that, if not 0
inline int global_batch() { return chosen_global_batch ? chosen_global_batch : usual_global_batch(); }

// Learnable, and different for each sample.
inline std::vector<int> sample_tokens(const ModelShape& shape, size_t sample) {
  std::vector<int> tokens(size_t(shape.positions) + 1);
  for (size_t t = 0; t < tokens.size(); ++t)
    tokens[t] = int((sample * 31 + t * (1 + sample % 5) + sample * sample % 7) % size_t(shape.vocabulary));
  return tokens;
}

// Losses of the steps and, after all of them, of a validation; gradient norms; the bytes of the last step.
struct Curve {
  std::vector<float> losses, norms;
  std::map<std::string, std::map<std::string, double>> bytes_sent;  // by group and collective
  double really_sent = 0;  // as the device's transport counts it
  size_t graphs = 0;       // launched in the last step
  std::vector<MemoryCategory> memory;
};

// How many graphs have been launched so far; 0 where nobody counts them.
inline size_t graphs() {
#ifdef __NVCC__
  return 0;
#else
  return cpu::counts.graphs;
#endif
}

// How ranks that split sequences compute attention.
inline ContextMethod& method_of(ModelOptions& options) { return options.store.rooms.of<ContextOptions>().method; }
inline ContextMethod method_of(const ModelOptions& options) { return options.store.rooms.of<ContextOptions>().method; }

// The schedule of pipelines from here on; with one stage all are the same.
inline std::string pipeline_schedule = "1f1b";

// One rank that trains on the samples of all ranks of an island, `dp` of which have samples of their own, instead of those
// of its mesh.
struct ImaginedIsland {
  int dp = 0, island = 0, islands = 1;  // dp 0: none
};
inline ImaginedIsland imagined_island;

// Micro-batches of a step on this rank.
inline int micro_batches(const ModelOptions& options, const Mesh& mesh) {
  return global_batch() / (options.micro_batch * (imagined_island.dp ? imagined_island.islands : mesh.shape().batches()));
}
// The number of one of them in the step.
inline int number_in_step(int micro_batch, const Mesh& mesh) {
  const auto& [dp, island, islands] = imagined_island;
  if (dp) return micro_batch / dp * dp * islands + dp * island + micro_batch % dp;
  return micro_batch * mesh.shape().batches() + mesh.shape().dp * mesh.place().island + mesh.place().dp;
}
inline Actions schedule_of(const ModelOptions& options, const Mesh& mesh) {
  return actions_of_step(pipeline_schedule, mesh.stage(options.chunks), micro_batches(options, mesh));
}

// The micro-batches of a step, as Batches has them for the program: forward sends one to the device, backward finds it there.
class MicroBatches {
 public:
  MicroBatches(const Model& model, const Mesh& mesh, size_t step, bool training)
      : model_(model), mesh_(mesh), step_(step), training_(training), sent_(size_t(model.options().slots)) {}

  Batch batch(const Action& action) {
    Batch& sent = sent_[size_t(action.slot)];
    if (action.work == Work::forward) sent = load(action);
    Batch batch = sent;
    batch.action = action;
    return batch;
  }

 private:
  Batch load(const Action& action) {
    Batch batch = {.batch_size = model_.options().micro_batch, .positions = model_.positions()};
    if (model_.tensors().needs_tokens(action.chunk)) batch = send(action.micro_batch);
    batch.first = action.micro_batch == 0;
    batch.last = action.micro_batch + 1 == micro_batches(model_.options(), mesh_);
    batch.training = training_;
    const int islands = training_ ? std::max(mesh_.shape().islands, imagined_island.islands) : 1;
    batch.loss_weight = float(islands / (double(global_batch()) * model_.options().seq_len));
    return batch;
  }

  Batch send(int micro_batch) {
    static std::map<int, BatchBuffers> buffers;  // by number of slots: as few as the program has
    const int B = model_.options().micro_batch, T = model_.options().seq_len;
    std::vector<int> inputs, targets;
    for (int b = 0; b < B; ++b) {
      const int number = number_in_step(micro_batch, mesh_) * B + b;
      const std::vector<int> tokens = sample_tokens(model_.tensors().shape(), step_ * size_t(global_batch()) + size_t(number));
      inputs.insert(inputs.end(), tokens.begin(), tokens.end() - 1);
      targets.insert(targets.end(), tokens.begin() + 1, tokens.end());
    }
    BatchBuffers& sender = buffers.try_emplace(int(sent_.size()), 1 << 12, test_stream(), int(sent_.size()) + 1).first->second;
    return sender.send(inputs.data(), targets.data(), B, T, model_.positions());
  }

  const Model& model_;
  const Mesh& mesh_;
  size_t step_;
  bool training_;
  std::vector<Batch> sent_;  // by slot
};

// Was the last update applied, or left out?
inline bool was_applied(Model& model) { return model.gradient_summary().factor >= 0; }

// What this rank keeps of weights and moments.
inline std::vector<float> own_state(const Parameters& store) {
  std::vector<float> all;
  for (const Slice& slice : store.kept_slices())
    for (State state : {State::weight, State::first_moment, State::second_moment}) {
      const std::vector<float> values = values_of(store, slice, state);
      all.insert(all.end(), values.begin(), values.end());
    }
  return all;
}

// after_first: called when the gradients of the first micro-batch are there.
inline void train_step(Model& model, Mesh& mesh, size_t step, const std::function<void()>& after_first = [] {},
                       const StepSums* votes = nullptr) {
  MicroBatches batches(model, mesh, step, true);
  model.begin_sums(votes);
  for (const Action& action : schedule_of(model.options(), mesh)) {
    model.run(batches.batch(action));
    const bool has_gradients = action.work == Work::backward || action.work == Work::weight;
    if (action.micro_batch == 0 && action.chunk == 0 && has_gradients) after_first();
  }
  const LearningRateSchedule schedule{"cosine", 3e-3, 3e-4, all_steps, 3, 0};
  const AdamW options = {float(learning_rate(schedule, step)), 0.9f, 0.95f, 1e-8f, 0.1f};
  model.update(options, 1.0f);
}

inline float validation_loss(Model& model, Mesh& mesh) {
  MicroBatches batches(model, mesh, all_steps, false);
  model.begin_sums();
  for (const Action& action : forwards(model.stage(), micro_batches(model.options(), mesh))) model.run(batches.batch(action));
  return model.loss();
}

// Biases and LayerNorms start as zeros and ones, which hide mistakes: in the cases of these files every weight is drawn at random.
// (A program has the cases of several files, test/one_text.sh.)
inline std::set<std::string>& files_with_random_tensors() {
  static std::set<std::string> files;
  return files;
}

// A number in [−0.2, 0.2) that belongs to an element of a whole tensor.
inline float random_of(const std::string& tensor, size_t element) {
  return float((std::hash<std::string>()(tensor) ^ (element + 1)) * 0x9e3779b97f4a7c15u >> 40) / float(1 << 24) * 0.4f - 0.2f;
}

inline void randomize_biases_and_norms(Model& model) {
  for (const TensorDescriptor& tensor : model.tensors().tensors()) {
    if (tensor.decays()) continue;
    std::vector<float> values(tensor.count());
    for (size_t i = 0; i < values.size(); ++i) values[i] = (tensor.initial == Initial::one) + random_of(tensor.name, i);
    model.trained_store().copy_in({&tensor, 0, values.size()}, State::weight, values);
  }
}
// The weights beside which adapters are trained: not fresh ones, which hide mistakes.
inline void randomize_frozen(Parameters& frozen) {
  for (const TensorDescriptor& tensor : frozen.shards().list().tensors()) {
    std::vector<float> values(tensor.count());
    for (size_t i = 0; i < values.size(); ++i) values[i] = (tensor.initial == Initial::one) + random_of(tensor.name, i);
    frozen.copy_in({&tensor, 0, values.size()}, State::weight, values);
  }
}

// A model with fresh weights.
template <class T>
std::unique_ptr<Model> model_of(ModelOptions options, Mesh& mesh) {
  options.seq_len = options.shape.positions;
  if (mesh.shape().pp > 1) {
    const Actions schedule = schedule_of(options, mesh);
    options.slots = slots_of(schedule);
    options.splits_backward = pipeline_schedule == "zb";
  }
  std::unique_ptr<Model> model = make_model(dtype_name<T>, options, mesh, test_stream());
  model->trained_store().initialize();
  if (model->frozen()) return randomize_frozen(*model->frozen()), std::move(model);
  if (files_with_random_tensors().contains(doctest::getContextOptions()->currentTest->m_file.c_str())) randomize_biases_and_norms(*model);
  return model;
}
template <class T>
std::unique_ptr<Model> model_of(const ModelShape& shape, Mesh& mesh, int micro_batch, const StoreOptions& store = {}) {
  return model_of<T>({.shape = shape, .micro_batch = micro_batch, .store = store}, mesh);
}

template <class T>
Curve train(const ModelOptions& options, Mesh& mesh, size_t steps = all_steps) {
  const std::unique_ptr<Model> owner = model_of<T>(options, mesh);
  Model& model = *owner;
  Curve curve;
  StepsInFlight in_flight(model, mesh);
  const OuterOptions& outer = options.store.rooms.of<OuterOptions>();
  OuterSteps outer_steps(outer, model);
  int traffic = 0;
  const auto finish = [&] {
    const FinishedStep step = in_flight.finish();
    curve.losses.push_back(float(step.result.loss));
    curve.norms.push_back(float(step.result.norm));
    traffic = step.traffic;
  };
  double before = 0;
  for (size_t step = 0; step < steps; ++step) {  // the host runs one step ahead
    if (step + 1 == steps) {
      CUDA_CHECK(cudaDeviceSynchronize());
      before = transport_bytes();
      curve.graphs = graphs();
    }
    in_flight.begin(false, false);
    train_step(model, mesh, step);
    const bool is_last = step + 1 == steps;
    const bool is_outer = outer.is_on() && ((step + 1) % size_t(outer.local_steps) == 0 || is_last);
    if (outer.is_on()) outer_steps.after_update(step + 1, is_outer, is_last);
    in_flight.end(step + 1, 0, {}, 0, is_outer);
    if (step > 0) finish();
  }
  finish();
  CUDA_CHECK(cudaDeviceSynchronize());
  curve.really_sent = transport_bytes() - before;
  curve.graphs = graphs() - curve.graphs;
  for (const auto& [group, sent] : mesh.take_traffic(traffic)) curve.bytes_sent[group] = sent.bytes_sent;
  curve.memory = model.memory().categories();
  if (steps == all_steps) curve.losses.push_back(validation_loss(model, mesh));
  return curve;
}
template <class T>
Curve train(const ModelShape& shape, Mesh& mesh, int micro_batch, StoreOptions store, size_t steps = all_steps) {
  return train<T>({.shape = shape, .micro_batch = micro_batch, .store = store}, mesh, steps);
}

// ---- a first step beside one rank's

// How far a tensor's gradient is from the wanted one. The part of c_attn.bias that shifts keys counts by itself:
// softmax ignores it, so its gradient is zero in theory, and noise in practice.
struct Difference {
  double squares = 0, wanted = 0;  // ‖difference‖² and ‖wanted‖², without the part that shifts keys
  double noise = 0;                // ‖gradient of the part that shifts keys‖²
};

// Gradients, or weights, after a first step on one rank: all tensors, one after the other. Rank 0 computes them.
template <class T>
std::vector<float> first_step_of_one_rank(const ModelShape& shape, State state, const StoreOptions& store = {}) {
  return from_rank_0([&] {
    Mesh alone;
    const std::unique_ptr<Model> model = model_of<T>(shape, alone, 2, store);
    train_step(*model, alone, 0);
    std::vector<float> all;
    for (const Slice& slice : model->trained_store().kept_slices()) {
      const std::vector<float> values = values_of(model->trained_store(), slice, state);
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  });
}

// Where a tensor begins in these values.
inline size_t offset_of(const TensorList& list, const TensorDescriptor& tensor) {
  size_t before = 0;
  for (const TensorDescriptor* other = list.tensors().data(); other != &tensor; ++other) before += other->count();
  return before;
}

// The differences by tensor, in the order of the list. Elements that several ranks have count several times, in each of
// the numbers.
inline std::vector<Difference> differences(Model& model, const std::vector<float>& wanted) {
  const std::vector<TensorDescriptor>& tensors = model.tensors().tensors();
  std::vector<float> mine(tensors.size() * 3);
  for (const Slice& slice : model.trained_store().kept_slices()) {
    const TensorDescriptor& tensor = *slice.tensor;
    const bool has_keys = tensor.name.ends_with("c_attn.bias");
    const std::vector<float> actual = values_of(model.trained_store(), slice, State::gradient);
    const size_t before = offset_of(model.tensors(), tensor);
    float* const sums = &mine[size_t(&tensor - tensors.data()) * 3];
    double squares[3] = {};
    for (size_t i = 0; i < actual.size(); ++i) {
      const size_t whole = tensor.part.in_whole(slice.first + i);
      const double expected = wanted.at(before + whole);
      if (has_keys && whole * 3 / tensor.count() == 1) {
        squares[2] += std::pow(double(actual[i]), 2);
      } else {
        squares[0] += std::pow(actual[i] - expected, 2);
        squares[1] += expected * expected;
      }
    }
    for (int i = 0; i < 3; ++i) sums[i] += float(squares[i]);
  }
  const std::vector<float> all = all_values(mine);
  std::vector<Difference> sums(tensors.size());
  for (size_t i = 0; i < all.size(); i += 3) {
    Difference& sum = sums[i / 3 % tensors.size()];
    sum.squares += all[i];
    sum.wanted += all[i + 1];
    sum.noise += all[i + 2];
  }
  return sums;
}

// ---- bounds of single steps

// Bounds for a tensor as a whole, in its norm, as in test_model. A product that adds up to k = 216 terms is off by
// 2.4e-8·√k = 3.5e-7. With L layers, 6·L + 1 products lie before a logit, and twice as many before a gradient. Two
// computations that add in different orders differ by √2 times that. The bounds are three times that, as small tensors
// are worse than others.
inline double products_differ_by(double products) { return 3.5e-7 * std::sqrt(2 * products); }
inline double logit_bound(const ModelShape& shape) { return 3 * products_differ_by(6 * shape.layers + 1); }
inline double gradient_bound(const ModelShape& shape) { return 3 * products_differ_by(2 * (6 * shape.layers + 1)); }

// ---- curves beside one rank's

// Curves of one rank alone: in fp32 one curve, in 16 bits one for each size of micro-batch. The ranks share the work.
template <class T>
const std::vector<Curve>& of_one_rank(const ModelShape& shape, size_t steps = all_steps) {
  static std::map<int, std::vector<Curve>> known;  // by channels: the first to ask says how many steps
  std::vector<Curve>& curves = known[shape.channels];
  if (!curves.empty()) return curves;
  Mesh alone;
  const std::vector<int> micro_batches = std::is_same_v<T, float> ? std::vector{2} : std::vector{1, 2, 4, 8};
  for (int size : micro_batches) {
    const bool mine = int(curves.size()) % ranks().all.size() == ranks().all.rank();
    curves.push_back(mine ? train<T>(shape, alone, size, {}, steps) : Curve{});
  }
  for (Curve& curve : curves) {
    curve.losses = all_values(curve.losses);  // the others have none
    curve.norms = all_values(curve.norms);
  }
  return curves;
}

// Largest relative difference from the first steps of `wanted`.
inline double largest_difference(const std::vector<float>& curve, const std::vector<float>& wanted) {
  double largest = curve.size() <= wanted.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(curve.size(), wanted.size()); ++i) {
    const double difference = std::abs(curve[i] / double(wanted[i]) - 1);
    if (!(difference <= largest)) largest = std::isnan(difference) ? INFINITY : difference;
  }
  return largest;
}

// Root-mean-square over curves and over their first steps of the relative differences from `wanted`.
inline double distance(const std::vector<Curve>& curves, std::vector<float> Curve::*part, const std::vector<float>& wanted,
                       size_t steps) {
  double squares = 0;
  for (const Curve& curve : curves)
    for (size_t i = 0; i < steps; ++i) squares += std::pow((curve.*part).at(i) / double(wanted.at(i)) - 1, 2);
  return std::sqrt(squares / double(curves.size() * steps));
}

// The same over the first few steps, where each curve is compared with its own `wanted`.
inline double distance(const std::vector<Curve>& curves, std::vector<float> Curve::*part,
                       const std::vector<Curve>& wanted) {
  double squares = 0;
  for (size_t i = 0; i < curves.size(); ++i)
    squares += std::pow(distance({curves[i]}, part, wanted[i].*part, some_steps), 2);
  return std::sqrt(squares / double(curves.size()));
}

// fp32: within 1e-5 (test/README.md, Curves).
inline void check_fp32_curve(const Curve& curve, const ModelShape& shape, size_t steps = all_steps) {
  const Curve& wanted = of_one_rank<float>(shape, steps)[0];
  CHECK_WITHIN("losses", largest_difference(curve.losses, wanted.losses), 1e-5);
  CHECK_WITHIN("norms", largest_difference(curve.norms, wanted.norms), 1e-5);
}

// 16 bits: in another order some sums fall on the other side of a tie, and no formula says how that changes ten steps.
// But one rank's curve rounds as often, so it is as far from the fp32 curve. The bound is twice that distance, in
// root-mean-square (test/README.md, Curves). Over ten seeds, other micro-batches and meshes were at 0.8 to 1.15 times the
// distance, and gradients that travel in bf16 at 0.8 to 1.4 times. Norms are compared before they become chaotic: after
// the warm-up one seed's norms are off by 0.2 %, another's by 3 %. fp16 rounds by an eighth of what bf16 does.
// Gradients that travel in bf16 are rounded by each of N ranks, and in a ring at each of N − 1 additions. A sum of k
// ranks is k/N of the whole, or less, so together these are √(N/3) roundings of 0.17 %: 0.3 % for 8 ranks, beside the
// 1.3 % of the gradients' own roundings (test_model).
template <class T>
void check_16_bit_curves(const std::vector<Curve>& curves, const ModelShape& shape) {
  const Curve& wanted = of_one_rank<float>(shape)[0];
  const auto check = [&](const char* name, std::vector<float> Curve::*part, size_t steps) {
    const double own = distance(of_one_rank<__nv_bfloat16>(shape), part, wanted.*part, steps);
    CHECK_WITHIN(name, distance(curves, part, wanted.*part, steps), 2 * own / (std::is_same_v<T, __half> ? 8 : 1));
  };
  check("losses", &Curve::losses, curves[0].losses.size());
  check("norms", &Curve::norms, some_steps);
}

// As check_16_bit_curves, but over seeds. Other micro-batches do not change how rows are rounded, so they do not show
// what is chance: a seed's losses are off by 0.2e-5 to 1.3e-5, and a mesh's by a third of one rank's or by three times.
//
// Tensor-parallel ranks round each of the N terms of a product by rows, and each of the N − 1 partial sums that go
// round a ring, where one rank rounds once. Terms of random sign are 1/√N of the sum S, k of them √(k/N)·S. So the
// variances of the roundings, in units of one rank's, are N·1/N for the terms and Σ k/N over k = 2 ... N for the
// sums: together (N + 3)/2 − 1/N, which is 2 for N = 2 and 5.4 for N = 8. That happens in two of 15 places forward and
// two of 10 backward. With N = 8 it makes √1.6 = 1.3 times the distance for losses and √1.9 = 1.4 for norms. Twice the
// distance is allowed.
//
// options_of(shape, mesh, turn): the options of a run in bf16; seeds take turns on the meshes.
template <class OptionsOf>
void check_bf16_curves(const ModelShape& shape, const std::vector<MeshShape>& mesh_shapes, OptionsOf options_of) {
  constexpr int seeds = 12;
  std::vector<Curve> wanted(seeds), own(seeds), found;
  Mesh alone;
  for (int seed = ranks().all.rank(); seed < seeds; seed += ranks().all.size()) {  // the ranks share the work
    const ModelOptions options = {.shape = shape, .micro_batch = 2, .store = {.seed = uint64_t(seed)}};
    wanted[size_t(seed)] = train<float>(options, alone, some_steps);
    own[size_t(seed)] = train<__nv_bfloat16>(options, alone, some_steps);
  }
  for (int seed = 0; seed < seeds; ++seed) {
    Mesh mesh(ranks().mesh, mesh_shapes[size_t(seed) % mesh_shapes.size()]);
    ModelOptions options = options_of(shape, mesh, seed);
    options.store.seed = uint64_t(seed);
    found.push_back(train<__nv_bfloat16>(options, mesh, some_steps));
  }
  for (std::vector<Curve>* curves : {&wanted, &own})
    for (Curve& curve : *curves)
      for (std::vector<float>* values : {&curve.losses, &curve.norms}) *values = all_values(*values);
  CHECK_WITHIN("losses", distance(found, &Curve::losses, wanted), 2 * distance(own, &Curve::losses, wanted));
  CHECK_WITHIN("norms", distance(found, &Curve::norms, wanted), 2 * distance(own, &Curve::norms, wanted));
}

// ---- what must hold on every mesh

// Compares logits in their norm.
inline void check_logits(const std::vector<float>& actual, const std::vector<float>& wanted, double bound) {
  REQUIRE(actual.size() == wanted.size());
  double squares = 0, norm = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    squares += std::pow(double(actual[i]) - wanted[i], 2);
    norm += std::pow(double(wanted[i]), 2);
  }
  CHECK_WITHIN("logits", std::sqrt(squares), bound * std::sqrt(norm));
}

// fp16: all ranks leave the same updates out, and have one loss scale.
inline void check_loss_scale(ModelOptions options, Mesh& mesh) {
  options.store.loss_scale = {.value = 0x1p28f, .window = 3};  // overflows at once, and is halved until it doesn't
  const std::unique_ptr<Model> owner = model_of<__half>(options, mesh);
  Model& model = *owner;
  const std::vector<float> before = own_state(model.trained_store());
  int left_out = 0;
  for (train_step(model, mesh, 0); !was_applied(model); train_step(model, mesh, 0)) {
    CHECK(own_state(model.trained_store()) == before);
    REQUIRE(++left_out < 20);
  }
  const LossScale last = model.gradient_summary().scale;
  const std::vector<float> all = all_values({float(left_out), last.value, float(last.good_steps)});
  CHECK(left_out > 0);
  for (size_t i = 0; i < all.size(); ++i) CHECK(all[i] == all[i % 3]);
}

// Puts a NaN on one rank after the other: all ranks leave the update out, and go on. in_weight(rank): the NaN is in a
// weight of a block, else in a gradient of a unit whose gradients stay where they are.
template <class InWeight>
void check_nan_on_each_rank(Model& model, Mesh& mesh, int block_unit, int gradient_unit, InWeight in_weight) {
  for (int rank = 0; rank < ranks().all.size(); ++rank) {
    CAPTURE(rank);
    const bool mine = ranks().all.rank() == rank;
    const std::vector<float> before = own_state(model.trained_store());
    if (in_weight(rank)) {
      // The first weight of a block that this rank keeps: of a matrix that ranks split.
      const std::vector<Slice> slices = model.trained_store().kept_slices();
      Slice weight = *std::ranges::find_if(slices, [&](const Slice& slice) { return slice.tensor->unit == block_unit; });
      weight.count = 1;
      const std::vector<float> value = values_of(model.trained_store(), weight, State::weight);
      // All ranks call copy_in(), as it is collective: weights are gathered anew.
      const CheckpointBlock block = {weight.tensor, weight.tensor->part.in_whole(weight.first), 1};
      model.trained_store().copy_in(block, State::weight, mine ? std::vector<float>{NAN} : value);
      train_step(model, mesh, 0);
      model.trained_store().copy_in(block, State::weight, value);
    } else {
      train_step(model, mesh, 0, [&] {
        const float nan = NAN;
        float* const gradients = model.trained_store().gradients(gradient_unit).data;
        if (mine) copy_and_wait(gradients + 77, &nan, 1, cudaMemcpyHostToDevice, test_stream());
      });
    }
    CHECK(!was_applied(model));
    CHECK(own_state(model.trained_store()) == before);
  }
  train_step(model, mesh, 0);
  CHECK(was_applied(model));
}
