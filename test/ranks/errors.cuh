// What tests of compressed gradients share: a parameter store that is given gradients, and the errors that its ranks keep.
#pragma once

#include "gpt/zero.cuh"
#include "runtime/checkpoints/state.cuh"
#include "test/ranks/formulas.cuh"
#include "test/save_checkpoint.h"
#include "test/temporary_folder.h"

using Values = std::vector<float>;

// A parameter store with what it needs, on all ranks. Its blocks are no multiple of 256, as pieces of theirs are not.
template <class T>
struct StoreOf {
  TensorList list{odd};
  DeviceMemory memory;
  PinnedMemory host_memory;
  Mesh& mesh;
  ParameterStore<T> store;
  explicit StoreOf(const StoreOptions& options, Mesh& mesh = ::mesh())
      : mesh(mesh), store(list, options, memory, host_memory, mesh, test_stream()) {
    memory.allocate();
    store.clear();
  }

  const Shards& shards() const { return store.shards(); }
  int last_unit() const { return shards().units() - 1; }
};
using Store = StoreOf<float>;

// What a rank has as the gradient of a unit in a micro-step: other numbers for each tensor, so runs have other scales. The
// last rank has zeros in every second micro-step, as one has that has no micro-batch left.
inline Values gradient_of(const Shards& shards, int unit, int rank, int micro_step) {
  Values values(shards.whole(unit));
  if (rank == dp().size() - 1 && micro_step % 2 == 1) return values;
  float size = 1;
  for (const Slice& slice : shards.slices(unit, 0, values.size())) {
    const Values random = random_values<float>(slice.count, size *= 0.37f, 0, unsigned(1 + unit + 100 * rank + 10000 * micro_step));
    std::ranges::copy(random, values.begin() + long(slice.in_unit));
  }
  return values;
}

// A step of micro-steps [first, first + count): each rank gives the store its gradients. Returns what the store keeps.
inline std::vector<Values> step(Store& s, int first, int count, bool buffers_add_up) {
  for (int i = 0; i < count; ++i) {
    s.store.begin_micro_step(i == 0, i + 1 == count);
    for (int unit = s.last_unit(); unit >= 0; --unit) {
      Values values = gradient_of(s.shards(), unit, dp().rank(), first + i);
      const Gradient to = s.store.gradients(unit);
      if (to.accumulate) {
        REQUIRE((buffers_add_up || !s.list.is_block(unit)));
        Values before(values.size());
        copy_and_wait(before.data(), static_cast<const float*>(to.data), before.size(), cudaMemcpyDeviceToHost, test_stream());
        for (size_t k = 0; k < values.size(); ++k) values[k] += before[k];
      }
      copy_and_wait(to.data, values.data(), values.size(), cudaMemcpyHostToDevice, test_stream());
      s.store.gradients_ready(unit);
    }
  }
  s.mesh.data().wait_for_all(test_stream());
  std::vector<Values> sums;
  for (const Slice& slice : s.store.kept_slices()) sums.push_back(values_of(s.store, slice, State::gradient));
  return sums;
}

inline Values errors_of(const Parameters& store) {
  Values all;
  for (const Slice& slice : error_slices(store.shards())) {
    const Values values = values_of(store, slice, State::error);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

// Gives this rank errors that no other one has, but tensor-parallel ranks the same of a whole tensor: small whole numbers, whose
// sums and halves are exact.
inline void fill_errors(Parameters& parameters) {
  for (const TensorDescriptor& tensor : parameters.shards().list().tensors()) {
    Values values(tensor.count());
    const size_t rank = size_t(ranks().all.rank() - (tensor.is_whole() ? parameters.shards().list().tp_rank() : 0));
    for (size_t i = 0; i < values.size(); ++i) values[i] = float((i * 7 + size_t(tensor.unit) * 13 + rank * 31) % 1000);
    parameters.copy_in({&tensor, 0, values.size()}, State::error, values);
  }
}

// The sums of the errors of all ranks, by element of the whole tensors, one after the other. Of a whole tensor the first
// tensor-parallel rank's count.
inline std::vector<double> sum_of_errors(const Parameters& parameters) {
  const TensorList& list = parameters.shards().list();
  std::vector<double> sums(list.parameters());
  for (const Slice& slice : error_slices(parameters.shards())) {
    if (slice.tensor->is_whole() && list.tp_rank() > 0) continue;
    const Values values = values_of(parameters, slice, State::error);
    const size_t before = offset_of(list, *slice.tensor);
    for (size_t i = 0; i < values.size(); ++i) sums[before + slice.tensor->part.in_whole(slice.first + i)] += values[i];
  }
  const Values mine(sums.begin(), sums.end()), all = all_values(mine);
  for (size_t i = 0; i < sums.size(); ++i) sums[i] = 0;
  for (size_t i = 0; i < all.size(); ++i) sums[i % sums.size()] += all[i];
  return sums;
}

// Trains three steps with two loss scales: weights, moments and errors must have the same bits.
inline void check_loss_scale(StoreOptions options, Mesh& mesh) {
  std::vector<Values> found;
  for (float value : {1.0f, 4096.0f}) {
    options.loss_scale = {.value = value};
    const std::unique_ptr<Model> owner = model_of<float>(odd, mesh, 2, options);
    for (size_t i = 0; i < 3; ++i) train_step(*owner, mesh, i);
    CHECK(was_applied(*owner));
    found.push_back(own_state(owner->trained_store()));
    const Values errors = errors_of(owner->trained_store());
    found.back().insert(found.back().end(), errors.begin(), errors.end());
  }
  CHECK(same_bits(found[0], found[1]));
}

// A mesh, and what is trained on it.
struct Way {
  MeshShape mesh;
  ModelOptions options = {.shape = {4, 4, 64, 211, 32}, .micro_batch = 2};
  std::string schedule = "1f1b";
};
