// Writes the logits of a checkpoint for random tokens, for dev/check_huggingface.py to compare with transformers, or
// dev/check_peft.py with peft:
//
//   make build/cpu/logits && build/cpu/logits CHECKPOINT logits.safetensors
//   python3 dev/check_huggingface.py CHECKPOINT logits.safetensors
#include <random>

#include "extensions/lora/adapter_config.h"
#include "gpt/base/error.h"
#include "gpt/batch_buffers.cuh"
#include "gpt/checkpoint.h"
#include "gpt/model.cuh"

namespace {

void write_logits(const std::filesystem::path& folder, const std::filesystem::path& output) {
  const std::optional<StoredAdapters> adapters = load_adapter_config(folder);
  const ModelShape shape = load_shape(adapters ? adapters->base : folder);
  const int batch = 2, seq_len = std::min(shape.positions, 64);
  cudaStream_t stream;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Mesh alone;
  const auto model = make_model(
      "fp32", {.shape = shape, .micro_batch = batch, .seq_len = seq_len, .store = {.training = false},
               .lora = adapters ? adapters->lora : LoraOptions()}, alone, stream);
  load_weights(folder, model->trained_store());
  if (adapters) load_weights(adapters->base, *model->frozen());

  std::mt19937 generator(1);
  std::vector<int> tokens;
  for (int i = 0; i < batch * seq_len; ++i) tokens.push_back(int(generator() % unsigned(shape.vocabulary)));
  BatchBuffers buffers(batch * seq_len, stream);
  const Batch sent = buffers.send(tokens.data(), nullptr, batch, seq_len, neighbours(seq_len));
  model->forward(sent);
  const std::vector<float> logits = model->logits(0, batch * seq_len), ids(tokens.begin(), tokens.end());
  const size_t B = size_t(batch), T = size_t(seq_len), V = size_t(shape.vocabulary);
  SafetensorsWriter writer(output, {{"tokens", {B, T}}, {"logits", {B, T, V}}}, {});
  writer.write("tokens", 0, ids.size(), ids.data());
  writer.write("logits", 0, logits.size(), logits.data());
  writer.close();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc != 3) fail("usage: logits CHECKPOINT OUTPUT.safetensors");
    write_logits(argv[1], argv[2]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "logits: %s\n", error.what());
    return 1;
  }
}
