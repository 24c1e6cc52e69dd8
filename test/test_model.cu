// The whole model against test/reference/, which dev/reference.py computed in float64 with PyTorch.
#include <fstream>

#include "kernels/matmul.cuh"
#include "model.cuh"
#include "runtime/checkpoint.h"
#include "runtime/schedule.h"
#include "test/kernel_test.cuh"

namespace {

struct Reference {
  explicit Reference(const std::string& name)
      : folder("test/reference/" + name), file(folder + "/reference.safetensors"),
        settings(read_json_object(folder + "/reference.json")), shape(load_shape(folder)), batch(settings["B"]),
        seq_len(settings["T"]) {}

  std::vector<float> tensor(const std::string& name) const {
    const TensorInfo* info = file.find(name);
    REQUIRE_MESSAGE(info, name);
    std::vector<float> values(element_count(info->shape));
    file.read(*info, 0, values.size(), values.data());
    return values;
  }

  // Inputs and targets of one step, each (B, T).
  std::pair<std::vector<int>, std::vector<int>> tokens(int step) const {
    std::vector<float> all = tensor("tokens");
    std::vector<int> inputs, targets;
    for (int b = 0; b < batch; ++b)
      for (int t = 0; t < seq_len; ++t) {
        size_t i = (size_t(step) * batch + b) * (seq_len + 1) + t;
        inputs.push_back(int(all[i]));
        targets.push_back(int(all[i + 1]));
      }
    return {inputs, targets};
  }

  std::string folder;
  SafetensorsFile file;
  nlohmann::json settings;
  ModelShape shape;
  int batch, seq_len;
};

// Float sums of some hundred terms leave errors of about 1e-6 in a tensor's norm; bf16 rounds every activation by
// 2^-9 = 0.2 %, and about ten of these roundings, of random sign, lie between a weight and the loss. fp16 rounds by an
// eighth of that, as long as gradients don't vanish: loss_scale sees to it.
template <class T>
constexpr double tensor_tolerance = std::is_same_v<T, float> ? 5e-6 : std::is_same_v<T, __half> ? 0.03 / 8 : 0.03;
template <class T>
constexpr float loss_scale = std::is_same_v<T, __half> ? 4096 : 1;

template <class T>
std::unique_ptr<Model> load_model(const Reference& reference, ModelOptions options) {
  options.shape = reference.shape;
  options.micro_batch = options.micro_batch ? options.micro_batch : reference.batch;
  options.seq_len = reference.seq_len;
  options.store.loss_scale.value = loss_scale<T>;
  static Communicator alone;
  auto model = make_model(dtype_name<T>, options, alone, test_stream());
  const auto tensors = stored_tensors(model->tensors());
  load_weights(reference.folder, reference.shape, tensors, whole_tensors(tensors),
               [&](const CheckpointSlice& slice, char, const std::vector<float>& values) {
                 model->store().copy_in(stored_slice(model->tensors(), slice), State::weight, values);
               });
  return model;
}

std::vector<float> values_of(Model& model, const TensorDescriptor& tensor, State state) {
  std::vector<float> values(tensor.count());
  model.store().copy_out({&tensor, 0, tensor.count(), tensor.offset}, state, values.data());
  CUDA_CHECK(cudaStreamSynchronize(test_stream()));
  return values;
}

// ‖actual − expected‖ / ‖expected‖, the error of a tensor as a whole.
double relative_error(const std::vector<float>& actual, const std::vector<float>& expected) {
  REQUIRE(actual.size() == expected.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    difference += std::pow(double(actual[i]) - expected[i], 2);
    norm += std::pow(double(expected[i]), 2);
  }
  return std::sqrt(difference / norm);
}

// The part of c_attn.bias that shifts keys: softmax ignores it, so its gradient is zero in theory, noise in practice.
std::vector<float> without_key_third(const std::string& name, std::vector<float> values) {
  if (name.find("c_attn.bias") != std::string::npos)
    values.erase(values.begin() + values.size() / 3, values.begin() + 2 * values.size() / 3);
  return values;
}

void train_step(Model& model, const Reference& reference, int step, int micro_batch) {
  auto [inputs, targets] = reference.tokens(step);
  const int micro_steps = reference.batch / micro_batch, size = micro_batch * reference.seq_len;
  for (int i = 0; i < micro_steps; ++i)
    model.train_micro_step(&inputs[i * size], &targets[i * size], double(reference.batch) * reference.seq_len, i == 0,
                           i + 1 == micro_steps);
}

template <class T>
void check_gradients(const std::string& name, ModelOptions options) {
  CAPTURE(name);
  Reference reference(name);
  auto model = load_model<T>(reference, options);
  train_step(*model, reference, 0, model->options().micro_batch);
  const double loss = reference.tensor("losses")[0];
  CHECK(std::abs(model->loss() - loss) / loss <= (std::is_same_v<T, float> ? 1e-6 : tensor_tolerance<T> / 15));
  for (const TensorDescriptor& tensor : model->tensors().tensors()) {
    CAPTURE(tensor.name);
    std::vector<float> actual = values_of(*model, tensor, State::gradient);
    for (float& value : actual) value /= loss_scale<T>;
    std::vector<float> expected = reference.tensor("grad.transformer." + tensor.name);
    CHECK(relative_error(without_key_third(tensor.name, actual), without_key_third(tensor.name, expected)) <=
          tensor_tolerance<T>);
    if (actual.size() != without_key_third(tensor.name, actual).size())
      for (size_t i = actual.size() / 3; i < 2 * actual.size() / 3; ++i)
        CHECK(std::abs(actual[i]) <= tensor_tolerance<T> * 0.1);
  }
}

struct Curve {
  std::vector<float> losses, norms;
  bool operator==(const Curve&) const = default;
};

Curve train(Model& model, const Reference& reference) {
  const nlohmann::json& s = reference.settings;
  Schedule schedule{"cosine", s["lr"], s["min_lr"], s["steps"], s["warmup"], 0};
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

TEST_CASE("logits equal the reference") {
  for (std::string name : {"tiny", "odd"}) {
    CAPTURE(name);
    Reference reference(name);
    auto inputs = reference.tokens(0).first;
    std::vector<float> expected = reference.tensor("logits");
    CHECK(relative_error(load_model<float>(reference, {})->batch_logits(inputs.data()), expected) <= 2e-6);
    CHECK(relative_error(load_model<float>(reference, {.logit_chunks = 3})->batch_logits(inputs.data()), expected) <= 2e-6);
    CHECK(relative_error(load_model<__nv_bfloat16>(reference, {})->batch_logits(inputs.data()), expected) <= 0.02);
    CHECK(relative_error(load_model<__half>(reference, {})->batch_logits(inputs.data()), expected) <= 0.02 / 8);
  }
}

TEST_CASE_TEMPLATE("loss and every gradient equal the reference", T, float, __nv_bfloat16, __half) {
  for (std::string name : {"tiny", "odd"}) {
    check_gradients<T>(name, {});
    check_gradients<T>(name, {.micro_batch = 1});  // gradient accumulation equals the larger batch
    check_gradients<T>(name, {.logit_chunks = 5});
  }
}

TEST_CASE("ten steps of AdamW equal the reference") {
  for (std::string name : {"tiny", "odd"}) {
    CAPTURE(name);
    Reference reference(name);
    auto model = load_model<float>(reference, {});
    Curve curve = train(*model, reference);
    // Design, section 4: fp32 within 1e-5 relative over ten steps.
    for (int step = 0; step < 10; ++step) {
      CAPTURE(step);
      CHECK(curve.losses[step] == doctest::Approx(reference.tensor("losses")[step]).epsilon(1e-5));
      CHECK(curve.norms[step] == doctest::Approx(reference.tensor("norms")[step]).epsilon(1e-4));
    }
    for (const TensorDescriptor& tensor : model->tensors().tensors()) {
      CAPTURE(tensor.name);
      std::vector<float> actual = values_of(*model, tensor, State::weight);
      std::vector<float> expected = reference.tensor("final.transformer." + tensor.name);
      CHECK(relative_error(without_key_third(tensor.name, actual), without_key_third(tensor.name, expected)) <= 1e-4);
    }
    const Curve bf16 = train(*load_model<__nv_bfloat16>(reference, {}), reference);
    const Curve fp16 = train(*load_model<__half>(reference, {}), reference);
    for (int step = 0; step < 10; ++step) {
      CHECK(bf16.losses[step] == doctest::Approx(reference.tensor("losses")[step]).epsilon(0.01));
      CHECK(fp16.losses[step] == doctest::Approx(reference.tensor("losses")[step]).epsilon(0.01 / 8));
    }
  }
}

TEST_CASE_TEMPLATE("recomputation and repetition give the same bits", T, float, __nv_bfloat16, __half) {
  Reference reference("odd");
  auto run = [&](Recompute recompute) {
    auto model = load_model<T>(reference, {.micro_batch = 1, .recompute = recompute});
    return train(*model, reference);
  };
  const Curve kept = run(Recompute::none);
  CHECK(kept == run(Recompute::none));
  CHECK(kept == run(Recompute::block));
  const Curve again = run(Recompute::gelu);
  if (!gemm_has_epilogues<T>) CHECK(kept == again);
  else  // gelu of what was rounded already
    for (size_t step = 0; step < kept.losses.size(); ++step)
      CHECK(kept.losses[step] == doctest::Approx(again.losses[step]).epsilon(tensor_tolerance<T> / 3));
}
