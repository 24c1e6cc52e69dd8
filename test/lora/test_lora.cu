// LoRA (extensions/lora/lora.h) on one rank, beside Hugging Face's peft: test/reference/lora/ has adapters of the model in
// test/reference/tiny as peft saves them, and what it computed with them (dev/check_peft.py reference).
#include <set>

#include <nlohmann/json.hpp>

#include "extensions/lora/lora.h"
#include "gpt/checkpoint.h"
#include "gpt/model.cuh"
#include "test/kernel_test.cuh"
#include "test/model_test.cuh"
#include "test/reference_file.h"

namespace {

const std::string base = "test/reference/tiny", folder = "test/reference/lora";

struct Reference {
  SafetensorsFile of_base{base + "/reference.safetensors"}, file{folder + "/reference.safetensors"};
  nlohmann::json settings = read_json_object(folder + "/reference.json"), tiny = read_json_object(base + "/reference.json");
  ModelShape shape = load_shape(base);
  int B = tiny["B"], T = tiny["T"];

  // There are ten steps' tokens, which take turns.
  std::pair<std::vector<int>, std::vector<int>> tokens(int step) const { return tokens_of(of_base, step % 10, B, T); }
  LoraOptions lora() const {
    LoraOptions lora = {settings["rank"], settings["alpha"]};
    for (const auto& [name, module] : lora_targets) lora.modules.push_back(module);
    return lora;
  }
};

// The model of the reference. zero_b: B is zero, as at the start of a training.
template <class T>
std::unique_ptr<Model> load_model(const Reference& reference, const LoraOptions& lora, bool zero_b = false,
                                  Recompute recompute = Recompute::none, const StoreOptions& store = {}) {
  static Mesh alone;
  auto model = make_model(dtype_name<T>, {.shape = reference.shape, .micro_batch = reference.B, .seq_len = reference.T,
                                          .recompute = recompute, .store = store, .lora = lora}, alone, test_stream());
  load_weights(base, model->frozen() ? *model->frozen() : model->trained_store());
  if (!model->frozen()) return model;
  load_weights(folder, model->trained_store());
  for (const TensorDescriptor& tensor : model->trained_store().shards().list().tensors())
    if (zero_b && tensor.initial == Initial::zero)
      model->trained_store().copy_in({&tensor, 0, tensor.count()}, State::weight, std::vector<float>(tensor.count()));
  return model;
}

// The loss of a step's forward and backward, without the update.
float gradients(Model& model, const Reference& reference, int step) {
  const auto [inputs, targets] = reference.tokens(step);
  const Batch batch = send_batch(model, inputs.data(), targets.data(), double(inputs.size()), true, true);
  model.begin_sums();
  model.forward(batch);
  model.backward(batch);
  return model.loss();
}

// The losses of a training, `steps` long.
std::vector<float> train(Model& model, const Reference& reference, int steps) {
  const nlohmann::json& s = reference.settings;
  std::vector<float> losses;
  for (int step = 0; step < steps; ++step) {
    losses.push_back(gradients(model, reference, step));
    model.update({s["lr"], s["beta1"], s["beta2"], s["eps"], s["weight_decay"]}, s["grad_clip"]);
  }
  return losses;
}

double relative_error(const std::vector<float>& actual, const std::vector<float>& expected) {
  REQUIRE(actual.size() == expected.size());
  double squares = 0, norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    squares += std::pow(double(actual[i]) - expected[i], 2);
    norm += std::pow(double(expected[i]), 2);
  }
  return std::sqrt(squares / norm);
}

// peft computes in float, too, in another order: bounds are twice those of test_model, which compares with float64.
constexpr double logit_tolerance = 4e-6, gradient_tolerance = 1e-5, loss_tolerance = 1e-6;

}  // namespace

TEST_CASE("adapters that peft has saved: its logits, its loss, its gradients") {
  const Reference reference;
  for (const Recompute recompute : {Recompute::none, Recompute::gelu, Recompute::block}) {
    const auto model = load_model<float>(reference, reference.lora(), false, recompute);
    std::vector<float> logits = batch_logits(*model, reference.tokens(0).first.data());
    const std::vector<float> wanted = tensor_of(reference.file, "logits");
    logits.resize(wanted.size());  // of the first sample
    CHECK_WITHIN("logits", relative_error(logits, wanted), logit_tolerance);
    CHECK_WITHIN("loss", std::abs(gradients(*model, reference, 0) / reference.settings["loss"].get<double>() - 1), loss_tolerance);
    for (const TensorDescriptor& tensor : model->trained_store().shards().list().tensors()) {
      CAPTURE(tensor.name);
      const std::vector<float> gradient = values_of(model->trained_store(), {&tensor, 0, tensor.count(), tensor.offset}, State::gradient);
      const std::string name = "gradient." + file_prefix(State::weight, model->trained_store().shards().list()) + tensor.name;
      CHECK_WITHIN("gradient", relative_error(gradient, tensor_of(reference.file, name)), gradient_tolerance);
    }
  }
}

TEST_CASE("20 steps from B = 0: peft's losses within 1e-5") {
  const Reference reference;
  const auto model = load_model<float>(reference, reference.lora(), true);
  const std::vector<float> losses = train(*model, reference, 20), wanted = reference.settings["losses"];
  for (size_t step = 0; step < losses.size(); ++step)
    CHECK_WITHIN("loss", std::abs(losses[step] / double(wanted[step]) - 1), 1e-5);
}

// In 16 bits a loss is off by the bound of test_model at each step; adapters are sums of updates in float, as in fp32.
TEST_CASE_TEMPLATE("16 bits: the first loss is the base model's, bit for bit; later ones are near to peft's", T, float,
                   __nv_bfloat16, __half) {
  const Reference reference;
  const StoreOptions store = {.loss_scale = {.value = std::is_same_v<T, __half> ? 1024.0f : 1}};
  const auto model = load_model<T>(reference, reference.lora(), true, Recompute::none, store);
  const float whole = gradients(*load_model<T>(reference, {}, false, Recompute::none, store), reference, 0);
  const std::vector<float> losses = train(*model, reference, 20), wanted = reference.settings["losses"];
  CHECK(losses[0] == whole);
  const double tolerance = std::is_same_v<T, float> ? 1e-5 : std::is_same_v<T, __half> ? 1e-3 / 8 : 1e-3;
  double squares = 0;
  for (size_t step = 0; step < losses.size(); ++step) squares += std::pow(losses[step] / double(wanted[step]) - 1, 2);
  CHECK_WITHIN("losses", std::sqrt(squares / double(losses.size())), 2 * tolerance);
}

TEST_CASE("some targets, an odd rank: nothing frozen has a gradient, and the frozen weights stay as they are") {
  const Reference reference;
  static Mesh alone;
  for (const LoraOptions& lora : {LoraOptions{3, 5, {"attn.c_proj"}}, LoraOptions{5, 1, {"attn.c_attn", "mlp.c_fc", "mlp.c_proj"}}}) {
    const auto model = make_model("fp32", {.shape = reference.shape, .micro_batch = reference.B, .seq_len = reference.T, .lora = lora},
                                  alone, test_stream());
    load_weights(base, *model->frozen());
    model->trained_store().initialize();
    const auto weights = [&] {
      std::vector<float> all;
      for (const Slice& slice : model->frozen()->kept_slices())
        for (float x : values_of(*model->frozen(), slice, State::weight)) all.push_back(x);
      return all;
    };
    const std::vector<float> before = weights();
    Profiler::instance().enabled = true;
    const std::vector<float> losses = train(*model, reference, 3);
    Profiler::instance().enabled = false;
    for (const auto& [name, total] : Profiler::instance().collect())
      for (const char* gradient : {"matmul_weight_gradient", "matmul_bias_gradient", "column_sum", "embedding_backward"})
        CHECK(name != gradient);
    CHECK(weights() == before);
    CHECK(losses[2] < losses[0] * 1.2);
    CHECK(losses[2] != losses[0]);
    size_t trained = 0;
    for (const std::string& module : lora.modules) {
      const size_t C = size_t(reference.shape.channels);
      trained += size_t(lora.rank) * size_t(reference.shape.layers) * (module == "attn.c_attn" ? 4 * C : module == "attn.c_proj" ? 2 * C : 5 * C);
    }
    CHECK(model->trained_tensors().parameters() == trained);
  }
}

TEST_CASE_TEMPLATE("memory: the base in the storage type alone; gradients, masters and moments of adapters", T, float, __nv_bfloat16) {
  const Reference reference;
  const auto model = load_model<T>(reference, reference.lora());
  std::map<std::string, size_t> bytes;
  for (const auto& [name, count] : model->memory().categories()) bytes[name] += count;
  const size_t all = model->frozen()->shards().all_whole(), adapters = model->trained_store().shards().all_whole();
  const size_t wide = std::is_same_v<T, float> ? 0 : 4;  // masters
  CHECK(bytes.at("frozen weights") == all * sizeof(T));
  CHECK(bytes.at("weights") == adapters * sizeof(T));
  CHECK(bytes.at("optimizer") == adapters * (8 + wide));
  CHECK(bytes.at("gradients") - adapters * 4 < 64 << 10);  // and sums for the norm
}

TEST_CASE("A is drawn as peft draws it: uniform between -1/√inputs and 1/√inputs; B is zero") {
  const Reference reference;
  static Mesh alone;
  const auto model = make_model("fp32", {.shape = reference.shape, .micro_batch = 1, .seq_len = reference.T,
                                         .lora = {16, 32, {"mlp.c_proj"}}}, alone, test_stream());
  model->trained_store().initialize();
  for (const TensorDescriptor& tensor : model->trained_store().shards().list().tensors()) {
    const std::vector<float> values = values_of(model->trained_store(), {&tensor, 0, tensor.count(), tensor.offset}, State::weight);
    const double bound = 1 / std::sqrt(4.0 * reference.shape.channels);
    double sum = 0, squares = 0, largest = 0;
    for (float x : values) sum += x, squares += double(x) * x, largest = std::max(largest, std::abs(double(x)));
    if (tensor.initial == Initial::zero) {
      CHECK(largest == 0);
      continue;
    }
    // 4,096 numbers: their mean is off by 4.5 deviations of σ/64 at most, their variance σ² by as many of σ²·√0.8/64.
    const double n = double(values.size()), sigma = bound / std::sqrt(3);
    CHECK(largest < bound * (1 + 1e-6));
    CHECK(largest > 0.99 * bound);
    CHECK(std::abs(sum / n) < 4.5 * sigma / std::sqrt(n));
    CHECK(std::abs(squares / n / (sigma * sigma) - 1) < 4.5 * std::sqrt(0.8 / n));
  }
}
