// The whole model against test/reference/, which dev/reference.py computed in float64 with PyTorch.
#include <fstream>

#include <nlohmann/json.hpp>

#include "extensions/fp8/options.h"
#include "extensions/generation/generation.cuh"
#include "extensions/hopper/kernels/hopper.cuh"
#include "gpt/checkpoint.h"
#include "gpt/model.cuh"
#include "gpt/schedule.h"
#include "kernels/matmul.cuh"
#include "test/kernel_test.cuh"
#include "test/model_test.cuh"
#include "test/reference_file.h"

namespace {

struct Reference {
  explicit Reference(const std::string& name)
      : folder("test/reference/" + name), file(folder + "/reference.safetensors"),
        settings(read_json_object(folder + "/reference.json")), shape(load_shape(folder)), batch(settings["B"]),
        seq_len(settings["T"]) {}

  std::vector<float> tensor(const std::string& name) const { return tensor_of(file, name); }
  std::pair<std::vector<int>, std::vector<int>> tokens(int step) const { return tokens_of(file, step, batch, seq_len); }

  std::string folder;
  SafetensorsFile file;
  nlohmann::json settings;
  ModelShape shape;
  int batch, seq_len;
};

// How far a tensor may be from float64, in its norm. A rounding to bf16 changes a number by 0.17 % (the
// root-mean-square; 2^-8 at most). Forward, with the weights' roundings, there are 2 roundings of random sign before
// the first of the two blocks, 15 in each block, and 2 after them: √34 · 0.17 % = 1 % for logits. Backward there are 3
// more before the last block, and 10 in each: √57 · 0.17 % = 1.3 % for gradients. The bounds are twice that, as small
// tensors are worse than others. fp16 rounds by an eighth of that, as long as gradients don't vanish: loss_scale sees
// to it. In float the sums count, not the roundings of their results: a product that adds k = 50 to 250 terms is off by
// 2.4e-8·√k = 3e-7 (test/test_matmul.cu). Twelve products lie before the logits, 24 before a gradient: 1e-6 and 1.5e-6.
// The bounds are twice and three times that.
template <class T>
constexpr double of_16_bits = std::is_same_v<T, __half> ? 1.0 / 8 : 1;
template <class T>
constexpr double logit_tolerance = std::is_same_v<T, float> ? 2e-6 : 0.02 * of_16_bits<T>;
template <class T>
constexpr double tensor_tolerance = std::is_same_v<T, float> ? 5e-6 : 0.03 * of_16_bits<T>;
// The relative error of the loss. Logits are of size 1, and the loss is 5.4. A token's loss is off by the error of its
// target's logit less the others', and the mean over 64 tokens by an eighth of that: 0.02 / 5.4 / 8 = 0.05 %. The bound
// is twice that. In float the loss itself is rounded, and some sums.
template <class T>
constexpr double loss_tolerance = std::is_same_v<T, float> ? 5e-7 : 1e-3 * of_16_bits<T>;
template <class T>
constexpr float loss_scale = std::is_same_v<T, __half> ? 4096 : 1;

template <class T>
std::unique_ptr<Model> load_model(const Reference& reference, ModelOptions options) {
  options.shape = reference.shape;
  options.micro_batch = options.micro_batch ? options.micro_batch : reference.batch;
  options.seq_len = reference.seq_len;
  options.store.loss_scale.value = loss_scale<T>;
  static Mesh alone;
  auto model = make_model(dtype_name<T>, options, alone, test_stream());
  load_weights(reference.folder, model->trained_store());
  return model;
}

std::vector<float> values_of(Model& model, const TensorDescriptor& tensor, State state) {
  return values_of(model.trained_store(), {&tensor, 0, tensor.count(), tensor.offset}, state);
}

double norm(const std::vector<float>& values) {
  double squares = 0;
  for (float x : values) squares += double(x) * x;
  return std::sqrt(squares);
}

// ‖actual − expected‖ / ‖expected‖, the error of a tensor as a whole.
double relative_error(const std::vector<float>& actual, const std::vector<float>& expected) {
  REQUIRE(actual.size() == expected.size());
  double squares = 0;
  for (size_t i = 0; i < actual.size(); ++i) squares += std::pow(double(actual[i]) - expected[i], 2);
  return std::sqrt(squares) / norm(expected);
}

// The largest relative difference of a curve.
double largest_difference(const std::vector<float>& actual, const std::vector<float>& expected) {
  double largest = actual.size() == expected.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(actual.size(), expected.size()); ++i) {
    const double difference = std::abs(actual[i] / double(expected[i]) - 1);
    if (!(difference <= largest)) largest = std::isnan(difference) ? INFINITY : difference;
  }
  return largest;
}

// The part of c_attn.bias that shifts keys: softmax ignores it, so its gradient is zero in theory, noise in practice.
std::vector<float> without_key_third(const std::string& name, std::vector<float> values) {
  if (name.find("c_attn.bias") != std::string::npos)
    values.erase(values.begin() + values.size() / 3, values.begin() + 2 * values.size() / 3);
  return values;
}

// The root-mean-square of its relative differences, which no single step decides.
double distance(const std::vector<float>& actual, const std::vector<float>& expected) {
  REQUIRE(actual.size() == expected.size());
  double squares = 0;
  for (size_t i = 0; i < actual.size(); ++i) squares += std::pow(actual[i] / double(expected[i]) - 1, 2);
  return std::sqrt(squares / double(actual.size()));
}

void train_step(Model& model, const Reference& reference, int step, int micro_batch) {
  auto [inputs, targets] = reference.tokens(step);
  const int micro_steps = reference.batch / micro_batch, size = micro_batch * reference.seq_len;
  const int slots = model.options().slots;
  std::vector<Batch> batches;
  model.begin_sums();
  for (int i = 0; i < micro_steps; ++i) {  // as many forwards as there are slots, then their backwards
    batches.push_back(send_batch(model, &inputs[i * size], &targets[i * size], double(reference.batch) * reference.seq_len,
                                 i == 0, i + 1 == micro_steps));
    batches.back().action.slot = i % slots;
    model.forward(batches.back());
    if ((i + 1) % slots != 0 && i + 1 < micro_steps) continue;
    for (const Batch& batch : batches) model.backward(batch);
    batches.clear();
  }
}

template <class T>
void check_gradients(const std::string& name, ModelOptions options) {
  CAPTURE(name);
  Reference reference(name);
  auto model = load_model<T>(reference, options);
  train_step(*model, reference, 0, model->options().micro_batch);
  const double loss = reference.tensor("losses")[0];
  CHECK_WITHIN("loss", model->loss() / loss - 1, loss_tolerance<T>);
  for (const TensorDescriptor& tensor : model->tensors().tensors()) {
    CAPTURE(tensor.name);
    std::vector<float> actual = values_of(*model, tensor, State::gradient);
    for (float& value : actual) value /= loss_scale<T>;
    std::vector<float> expected = reference.tensor("grad.transformer." + tensor.name);
    const std::vector<float> others = without_key_third(tensor.name, actual);
    CHECK_WITHIN("gradients", relative_error(others, without_key_third(tensor.name, expected)), tensor_tolerance<T>);
    // The sum of what should cancel: as much noise as the two other thirds may have.
    const std::vector<float> keys(actual.begin() + actual.size() / 3, actual.begin() + 2 * actual.size() / 3);
    if (others.size() != actual.size()) CHECK_WITHIN("key third", norm(keys), tensor_tolerance<T> * norm(others));
  }
}

struct Curve {
  std::vector<float> losses, norms;
  bool operator==(const Curve&) const = default;
};

Curve train(Model& model, const Reference& reference) {
  const nlohmann::json& s = reference.settings;
  LearningRateSchedule schedule{"cosine", s["lr"], s["min_lr"], s["steps"], s["warmup"], 0};
  Curve curve;
  for (int step = 0; step < int(schedule.steps); ++step) {
    train_step(model, reference, step, model.options().micro_batch);
    const double rate = learning_rate(schedule, step);
    model.update({float(rate), s["beta1"], s["beta2"], s["eps"], s["weight_decay"]}, s["grad_clip"]);
    curve.losses.push_back(model.loss());
    curve.norms.push_back(model.gradient_summary().norm);
  }
  return curve;
}

}  // namespace

TEST_CASE_TEMPLATE("logits equal the reference", T, float, __nv_bfloat16, __half) {
  for (std::string name : {"tiny", "odd"})
    for (int chunks : {1, 3}) {
      CAPTURE(name);
      Reference reference(name);
      const auto model = load_model<T>(reference, {.logit_chunks = chunks});
      const std::vector<float> actual = batch_logits(*model, reference.tokens(0).first.data());
      CHECK_WITHIN("logits", relative_error(actual, reference.tensor("logits")), logit_tolerance<T>);
    }
}

TEST_CASE_TEMPLATE("loss and every gradient equal the reference", T, float, __nv_bfloat16, __half) {
  for (std::string name : {"tiny", "odd"}) {
    check_gradients<T>(name, {});
    check_gradients<T>(name, {.micro_batch = 1});  // gradient accumulation equals the larger batch
    check_gradients<T>(name, {.logit_chunks = 5});
  }
}

namespace {

// Trains, and returns, too, the FLOPs that attention counts on its way back. They tell which kernels it has: our own multiply
// seven matrices for each head, Hopper's five. Results do not always tell: for a few tokens both may have the same bits.
std::pair<Curve, double> train_and_count(Model& model, const Reference& reference) {
  Profiler::instance().collect();
  Profiler::instance().enabled = true;
  Curve curve = train(model, reference);
  Profiler::instance().enabled = false;
  return {std::move(curve), Profiler::instance().collect()["attention_backward"].flops};
}

}  // namespace

TEST_CASE("ten steps of AdamW equal the reference") {
  for (std::string name : {"tiny", "odd"}) {
    CAPTURE(name);
    Reference reference(name);
    auto model = load_model<float>(reference, {});
    Curve curve = train(*model, reference);
    // test/README.md, Curves: 1e-5 relative over ten steps. After ten steps weights are mostly sums of updates.
    // Each update is about as far off as its gradient, whose error the updates before have doubled; the bound is twice
    // that.
    CHECK_WITHIN("losses", largest_difference(curve.losses, reference.tensor("losses")), 1e-5);
    CHECK_WITHIN("norms", largest_difference(curve.norms, reference.tensor("norms")), 1e-5);
    for (const TensorDescriptor& tensor : model->tensors().tensors()) {
      CAPTURE(tensor.name);
      std::vector<float> actual = values_of(*model, tensor, State::weight);
      std::vector<float> expected = reference.tensor("final.transformer." + tensor.name);
      CHECK_WITHIN("weights", relative_error(without_key_third(tensor.name, actual), without_key_third(tensor.name, expected)),
                   4 * tensor_tolerance<float>);
    }
    const auto [bf16, own_flops] = train_and_count(*load_model<__nv_bfloat16>(reference, {}), reference);
    const Curve fp16 = train(*load_model<__half>(reference, {}), reference);
    // Weights are rounded from fp32 masters anew in each step: no loss is further off than the first step's.
    CHECK_WITHIN("bf16 losses", distance(bf16.losses, reference.tensor("losses")), loss_tolerance<__nv_bfloat16>);
    CHECK_WITHIN("fp16 losses", distance(fp16.losses, reference.tensor("losses")), loss_tolerance<__half>);
    const auto hopper = load_model<__nv_bfloat16>(reference, {.attention = "hopper"});
    CHECK(hopper->attention_problem().empty() == (has_wgmma() && reference.shape.head_size() % 8 == 0));
    if (!hopper->attention_problem().empty()) continue;
    const auto [on_hopper, hopper_flops] = train_and_count(*hopper, reference);
    CHECK(own_flops > 0);
    CHECK(hopper_flops == about(own_flops * 5 / 7));
    CHECK_WITHIN("hopper losses", distance(on_hopper.losses, reference.tensor("losses")), loss_tolerance<__nv_bfloat16>);
  }
}

TEST_CASE_TEMPLATE("recomputation, slots and repetition give the same bits", T, float, __nv_bfloat16, __half) {
  Reference reference("odd");
  auto run = [&](Recompute recompute, int slots = 1) {
    auto model = load_model<T>(reference, {.micro_batch = 1, .recompute = recompute, .slots = slots});
    return train(*model, reference);
  };
  const Curve kept = run(Recompute::none);
  CHECK(kept == run(Recompute::none));
  CHECK(kept == run(Recompute::block));
  for (Recompute recompute : {Recompute::none, Recompute::block}) CHECK(kept == run(recompute, 2));
  const Curve again = run(Recompute::gelu);
  if (!gemm_has_epilogues<T>) CHECK(kept == again);
  else  // gelu of what was rounded already: two curves, either as far off as it may be
    CHECK_WITHIN("losses", largest_difference(again.losses, kept.losses), std::max(1e-5, 2 * loss_tolerance<T>));
}

// The reference rounds to bf16 where gpt.cu does, so both cast the same numbers, but for those that attention has
// rounded otherwise: the last block's gradients differ by 4e-4. A number that is off by d becomes another code with
// probability d/u, if codes are u of it apart (1/8 in e4m3, 1/4 in e5m2), and is then off by u: √(d·u) in
// root-mean-square. So it goes from cast to cast on the way back: 0.7, 3, 6 and 9 % in e4m3, 1, 5, 11 and 17 % in e5m2,
// at most: measured is a tenth to a half. The first is far below what eight bits change (`plain`: the same in bf16
// alone), and e4m3's second, too.
//
// That holds where forward makes the reference's codes, as the CPU device does. On a GPU attention rounds more (P, to bf16),
// and products in eight bits keep 14 bits of a sum (cpu/tensor_core_sums.h), so some numbers become other codes in forward
// already, and with each cast more. At worst all codes are others: then two errors of the size that eight bits make are
// subtracted, √2 of it; the bound is twice what a step in bf16 is off from the reference. With Hopper's sums and our attention for
// Hopper the CPU device is off by what an H200 was, tensor for tensor (dev/results/2026-11-26-h200.md).
bool has_codes_of_reference() { return !eight_bit_sums_have_14_bits(); }
double fp8_tolerance(int casts, Fp8Format format) {
  const double apart = format == Fp8Format::e4m3 ? 1.0 / 8 : 1.0 / 4;
  double off = 4e-4;
  for (int i = 0; i < casts; ++i) off = std::sqrt(off * apart);
  return off;
}

// Casts between the loss and this gradient: of the last block none, of the first one all four.
int casts_before(const TensorDescriptor& tensor) {
  const auto is = [&](const char* part) { return tensor.name.find(part) != std::string::npos; };
  if (tensor.unit > 2) return 0;
  if (tensor.unit < 2 || is("c_attn") || is("ln_1")) return 4;
  return is("attn.c_proj") ? 3 : is("c_fc") || is("ln_2") ? 2 : 1;
}

TEST_CASE("a step in eight bits equals PyTorch's, which casts the same matrices") {
  if (!has_fp8()) return skip("this GPU has no tensor cores for eight bits");
  const Reference reference("fp8");
  const double plain_loss = reference.tensor("plain.losses")[0];
  const auto plain = load_model<__nv_bfloat16>(reference, {});
  train_step(*plain, reference, 0, reference.batch);
  for (const std::string prefix : {"", "e4m3.", "tiles."}) {
    const Fp8Format format = prefix == "e4m3." ? Fp8Format::e4m3 : Fp8Format::e5m2;
    const bool tiles = prefix == "tiles.";
    if (tiles && !has_fp8_tiles()) continue;
    CAPTURE(prefix);
    const auto model = load_model<__nv_bfloat16>(reference, {.attention = has_codes_of_reference() ? "own" : "hopper",
                                                          .store = {.rooms = Fp8Options{.is_on = true, .gradients = format, .tiles = tiles}}});
    train_step(*model, reference, 0, reference.batch);
    const double loss = reference.tensor(prefix + "losses")[0];
    if (has_codes_of_reference()) CHECK_WITHIN("loss", model->loss() / loss - 1, 1e-4);
    else CHECK_WITHIN("loss, other codes", model->loss() / loss - 1, 2 * std::abs(plain_loss / loss - 1));
    CHECK(std::abs(plain_loss / loss - 1) > 2e-4);
    for (const TensorDescriptor& tensor : model->tensors().tensors()) {
      CAPTURE(tensor.name);
      if (!prefix.empty() && tensor.unit != 2) continue;  // the others are kept for one format alone
      const auto gradient = [&](const std::string& kind) {
        return without_key_third(tensor.name, reference.tensor(kind + "grad.transformer." + tensor.name));
      };
      const auto own = [&](Model& of) { return without_key_third(tensor.name, values_of(of, tensor, State::gradient)); };
      const std::vector<float> expected = gradient(prefix);
      const double bound = fp8_tolerance(casts_before(tensor), format);
      if (has_codes_of_reference()) CHECK_WITHIN("gradients", relative_error(own(*model), expected), 2 * bound);
      else CHECK_WITHIN("gradients, other codes", relative_error(own(*model), expected), 2 * relative_error(own(*plain), expected));
      if (casts_before(tensor) != 1) continue;
      CHECK(relative_error(gradient("plain."), expected) > bound);
      if (tiles && tensor.shape.size() == 2) CHECK(relative_error(gradient(""), expected) > 2 * bound);
    }
  }
}

// ---- text, token by token

namespace {

// Logits of the tokens that follow the first 1, 2, ... tokens of two texts. samples: 0: without a cache.
template <class T>
std::vector<float> next_logits(const Reference& reference, int samples) {
  const int positions = reference.seq_len;
  const ModelOptions options = {.micro_batch = 2, .cached_positions = samples ? positions : 0, .samples = samples,
                                .store = {.training = false}};
  const std::unique_ptr<Model> model = load_model<T>(reference, options);
  BatchBuffers buffers(2 * positions, test_stream());
  TokenByToken next(*model, buffers);
  std::vector<float> all;
  for (int tokens = 3; tokens <= 2 * positions; ++tokens) {  // the positions are full three times
    std::vector<std::vector<int>> texts(2);
    for (int i = 0; i < tokens; ++i) texts[0].push_back(i * 7 % 50), texts[1].push_back((i * i + 5) % 50);
    for (const std::vector<float>& logits : next(texts)) all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

}  // namespace

// Both compute the same sums in another order.
TEST_CASE_TEMPLATE("a token from the cache has the logits that all tokens have", T, float, __nv_bfloat16, __half) {
  Reference reference("odd");
  const std::vector<float> wanted = next_logits<T>(reference, 0), cached = next_logits<T>(reference, 2);
  const size_t V = size_t(reference.shape.vocabulary);
  REQUIRE(cached.size() == wanted.size());
  for (size_t begin = 0; begin < wanted.size(); begin += V) {
    CAPTURE(begin / V);
    double squares = 0, norm = 0;
    for (size_t i = begin; i < begin + V; ++i) {
      squares += std::pow(double(cached[i]) - wanted[i], 2);
      norm += std::pow(double(wanted[i]), 2);
    }
    CHECK_WITHIN("logits", std::sqrt(squares / norm), 2 * logit_tolerance<T>);
  }
}

TEST_CASE("the model sees the last half of a text when its positions are full") {
  CHECK(first_seen(1, 8) == 0);
  CHECK(first_seen(8, 8) == 0);
  CHECK(first_seen(9, 8) == 4);
  CHECK(first_seen(12, 8) == 4);
  CHECK(first_seen(13, 8) == 8);
  CHECK(first_seen(3, 1) == 2);
}
