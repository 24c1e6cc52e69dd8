// The sums over all ranks that every step needs: the loss, and the votes of ranks beside it. In a training
// step they travel together with the norm of the gradients (gpt/zero.cuh), so that all ranks wait for one
// collective.
// Its events are tested by test_zero, test_delay, test_tensor_parallel, test_meshes.
#pragma once

#include "gpt/mesh.cuh"
#include "kernels/device/memory.cuh"

struct StepSums {
  float loss = 0;
  // Votes (gpt/steps_in_flight.cuh)
  float stop = 0;    // number of ranks that were asked to stop
  float saved = 0;   // number of ranks that have written their part of the checkpoint under way
  float asks = 0;    // 1: a room of rank 0 asks for something (gpt/step_hook.h)
};
// The sums over all islands (extensions/islands/islands.cuh), at an outer step: losses and norms are to be divided by their number.
struct IslandSums {
  StepSums step = {};
  float norm = 0;
};
inline Summed summed(StepSums* sums) {
  static_assert(sizeof(StepSums) == 4 * sizeof(float));
  return {&sums->loss, sizeof(StepSums) / sizeof(float)};
}

class SummedOverRanks {
 public:
  SummedOverRanks(Mesh& mesh, cudaStream_t stream) : mesh_(mesh), stream_(stream) {}

  void lay_out(Arena& arena) {
    own_ = arena.take<StepSums>(1), all_ = arena.take<StepSums>(1);
    if (mesh_.islands().size() > 1) of_islands_ = arena.take<IslandSums>(1);
  }

  // Sets this rank's terms to zero, or to its votes, which lie in pinned memory and must not change before the device
  // has copied them.
  void begin(const StepSums* votes) {
    if (votes) CUDA_CHECK(cudaMemcpyAsync(own_, votes, sizeof(StepSums), cudaMemcpyHostToDevice, stream_));
    else CUDA_CHECK(cudaMemsetAsync(own_, 0, sizeof(StepSums), stream_));
    is_reduced_ = false;
  }

  float* own_loss() const { return &own_->loss; }
  // In device memory, when the stream has waited for the world.
  const StepSums* all() const { return all_; }

  // Adds up the sums of all islands, and the norms of their gradients. The result is in device memory; null: there is one
  // island.
  void add_up_over_islands(const float* norm) {
    if (!of_islands_) return;
    CUDA_CHECK(cudaMemcpyAsync(&of_islands_->step, all_, sizeof(StepSums), cudaMemcpyDeviceToDevice, stream_));
    CUDA_CHECK(cudaMemcpyAsync(&of_islands_->norm, norm, sizeof(float), cudaMemcpyDeviceToDevice, stream_));
    add_up(mesh_.islands(), {&of_islands_->step.loss, sizeof(IslandSums) / sizeof(float)});
  }
  const IslandSums* of_islands() const { return of_islands_; }

  // This rank's terms, which the caller adds up over the ranks, in device memory, before anything else is given to the stream
  // that needs the sums. Losses that are added to own_loss() later do not count any more.
  StepSums* terms() {
    is_reduced_ = true;
    CUDA_CHECK(cudaMemcpyAsync(all_, own_, sizeof(StepSums), cudaMemcpyDeviceToDevice, stream_));
    return all_;
  }

  // The sums. Adds them up if nobody has, over all islands. Waits for the device.
  StepSums read() {
    if (!is_reduced_) {
      const Summed own = summed(terms());
      for (Communicator* group : {&mesh_.world(), &mesh_.islands()}) add_up(*group, own);
    }
    StepSums result;
    copy_and_wait(&result, all_, 1, cudaMemcpyDeviceToHost, stream_);
    return result;
  }

 private:
  void add_up(Communicator& group, const Summed& own) {
    group.after(stream_);
    group.all_reduce({own});
    group.wait_for_all(stream_);
  }

  Mesh& mesh_;
  cudaStream_t stream_;
  StepSums *own_ = nullptr, *all_ = nullptr;
  IslandSums* of_islands_ = nullptr;
  bool is_reduced_ = false;
};
