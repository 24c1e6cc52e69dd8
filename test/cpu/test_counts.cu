// What one training step of gpt2 asks of the device, exactly: an extra pass, copy or wait fails here, not in a
// benchmark months later. A sixth of its channels is enough: no count but the norm's depends on the channels.
#include "gpt/batch_buffers.cuh"
#include "gpt/steps_in_flight.cuh"
#include "test/kernel_test.cuh"

namespace {

constexpr size_t L = 12;  // layers

struct Run {
  static constexpr int B = 1, T = 64;
  Mesh alone;
  std::unique_ptr<Model> model = make_model(
      "bf16",
      {.shape = {.layers = L, .heads = 2, .channels = 128, .vocabulary = 50257, .positions = 1024}, .micro_batch = B, .seq_len = T},
      alone, test_stream());
  BatchBuffers buffers{B * T, test_stream()};
  StepsInFlight in_flight{*model, alone};
  std::vector<int> tokens = std::vector<int>(B * T, 17);

  // What a step of `micro_steps` micro-steps asks for. The host waits for the step before it.
  cpu::Counts step(int micro_steps) {
    const cpu::Counts before = cpu::counts;
    in_flight.begin(false, false);
    for (int i = 0; i < micro_steps; ++i) {
      Batch batch = buffers.send(tokens.data(), tokens.data(), B, T, neighbours(T));
      batch.first = i == 0;
      batch.last = i + 1 == micro_steps;
      batch.loss_weight = 1.0f / (2 * B * T);
      model->forward(batch);
      model->backward(batch);
    }
    model->update({1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f}, 1.0f);
    in_flight.end(1, 0, {});
    if (in_flight.count() > 1) in_flight.finish();
    return cpu::counts - before;
  }
};

}  // namespace

TEST_CASE("one step of gpt2") {
  const size_t before = cpu::counts.allocated_bytes;
  Run run;
  CHECK(cpu::counts.allocated_bytes - before == run.model->memory().total() + run.buffers.memory().total());
  run.model->trained_store().initialize();
  CHECK(run.step(1).graphs == 0);  // graphs are recorded the second time, for two places of the batch, first and later
  for (int i = 0; i < 2; ++i) run.step(1), run.step(2);

  const cpu::Counts one = run.step(1), two = run.step(2);
  CHECK(one.graphs == 2);  // forward and backward
  CHECK(two.graphs == 4);
  CHECK(one.allocations == 0);
  CHECK(two.allocations == 0);
  CHECK(one.waits == 2);   // for the pinned memory of the batch before last, and for the results of the step before
  CHECK(one.copies == 5);  // votes, batch, the loss's sums to be reduced; results: sums, gradients
  CHECK(one.copied_bytes == 3 * Run::B * Run::T * sizeof(int) + 3 * sizeof(StepSums) + sizeof(GradientSummary));
  CHECK(one.memsets == 1);  // the stream's gradient
  CHECK(one.products == 3 * (4 * L + 1));

  // Forward: embedding; layernorm, attention, layernorm, gelu of each layer; the final layernorm; loss and its sum.
  const size_t forward = 1 + 4 * L + 1 + 2;
  // Backward: two layernorms of 2, gelu, attention 2, the biases of four products, 2 each; the final layernorm; embedding 3.
  const size_t backward = L * (2 * 2 + 1 + 2 + 4 * 2) + 2 + 3;
  // Norm of each unit's gradients, the embedding's in windows of a block's size, and their sum; the factor; the count; AdamW
  // of each unit.
  const Shards& shards = run.model->trained_store().shards();
  const size_t update = (L + 1) + ceil_div(shards.whole(0), shards.whole(1)) + 1 + 1 + 1 + (L + 2);
  CHECK(one.launches == forward + backward + update);
  CHECK(two.launches == 2 * (forward + backward) + update);
  CHECK(two.copies == 6);
  CHECK(two.waits == 3);
  CHECK(two.products == 2 * one.products);
}
