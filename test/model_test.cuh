// What tests do with a model, from the host's memory.
#pragma once

#include <vector>

#include "gpt/batch_buffers.cuh"
#include "gpt/model.cuh"
#include "test/kernel_test.cuh"

// inputs, targets: (B,T) of the model's micro-batch; tokens: of the whole step on all ranks.
inline Batch send_batch(const Model& model, const int* inputs, const int* targets, double tokens, bool first, bool last) {
  static BatchBuffers buffers(1 << 12, test_stream(), 3);  // for two slots
  Batch batch = buffers.send(inputs, targets, model.options().micro_batch, model.options().seq_len,
                             model.positions());
  batch.first = first;
  batch.last = last;
  batch.loss_weight = float(1 / tokens);
  return batch;
}

// The logits (B,T,V) of one micro-batch.
inline std::vector<float> batch_logits(Model& model, const int* inputs) {
  Batch batch = send_batch(model, inputs, nullptr, 1, true, true);
  batch.loss_weight = 0;
  model.forward(batch);
  return model.logits(0, batch.batch_size * batch.positions.length);
}

// The values of a slice that this rank keeps.
inline std::vector<float> values_of(const Parameters& store, const Slice& slice, State state) {
  std::vector<float> values(slice.count);
  store.copy_out(slice, state, values.data());
  CUDA_CHECK(cudaStreamSynchronize(test_stream()));
  return values;
}
