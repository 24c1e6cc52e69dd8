// The sums over all ranks that every step needs: the loss, and what ranks tell one another beside it. In a training
// step they travel together with the norm of the gradients (parallel/zero.cuh), so that all ranks wait for one
// collective.
#pragma once

#include "kernels/device/memory.cuh"
#include "parallel/mesh.cuh"

struct StepSums {
  float loss = 0;
  // Votes (runtime/training/steps_in_flight.cuh)
  float stop = 0;    // number of ranks that were asked to stop
  float saved = 0;   // number of ranks that have written their part of the checkpoint under way
  float sample = 0;  // 1: a sample is due by rank 0's clock
};
inline Summed summed(StepSums* sums) {
  static_assert(sizeof(StepSums) == 4 * sizeof(float));
  return {&sums->loss, sizeof(StepSums) / sizeof(float)};
}

class SummedOverRanks {
 public:
  SummedOverRanks(Mesh& mesh, cudaStream_t stream) : mesh_(mesh), stream_(stream) {}

  void lay_out(Arena& arena) { own_ = arena.take<StepSums>(1), all_ = arena.take<StepSums>(1); }

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

  // This rank's terms, which the caller adds up over the ranks, in device memory. What is added to own_loss() later does
  // not count any more.
  StepSums* terms() {
    is_reduced_ = true;
    CUDA_CHECK(cudaMemcpyAsync(all_, own_, sizeof(StepSums), cudaMemcpyDeviceToDevice, stream_));
    return all_;
  }

  // The sums. Adds them up if nobody has. Waits for the device.
  StepSums read() {
    if (!is_reduced_) {
      const Summed own = summed(terms());
      mesh_.world().after(stream_);
      mesh_.world().all_reduce({own});
    }
    mesh_.world().wait_for_all(stream_);
    StepSums result;
    copy_and_wait(&result, all_, 1, cudaMemcpyDeviceToHost, stream_);
    return result;
  }

 private:
  Mesh& mesh_;
  cudaStream_t stream_;
  StepSums *own_ = nullptr, *all_ = nullptr;
  bool is_reduced_ = false;
};
