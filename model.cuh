// The model as the program sees it, whatever its storage type. gpt.cuh has the maths: what Model declares as a pass,
// GPT defines. The Makefile compiles that once for each storage type, so that an edit of the program compiles no kernel.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/device/graph.cuh"
#include "parallel/collectives.cuh"
#include "kernels/device/memory.cuh"
#include "parallel/parameters.h"

// What backward computes again instead of keeping it: nothing; gelu's output (4C of 16C elements a row and layer); all
// of a block but its input (C elements).
enum class Recompute { none, gelu, block };

struct ModelOptions {
  ModelShape shape = {};
  int micro_batch = 0, seq_len = 0;
  Recompute recompute = Recompute::none;
  int logit_chunks = 1;            // the head's rows at a time: ⌈R / logit_chunks⌉
  bool library_attention = false;  // attention of micro-batches by a library, if there is one that can
  StoreOptions store = {};
};

// A micro-batch in the device's memory (training/batch_buffers.cuh puts it there).
struct Batch {
  const int* inputs;          // (B,T)  token ids
  const int* targets;         // (B,T)  the tokens that follow them
  const int* order;           // (B·T)  positions of inputs, sorted by token
  int batch_size, seq_len;    // B, T
  bool first = true, last = true;  // of the step's micro-batches on this rank
  bool training = true;       // gradients are wanted, too
  float loss_weight = 0;      // of a token's loss: 1 / (tokens of the whole step on all ranks); 0: no loss is wanted
};

// What is added up over the ranks in every step: the loss, and two votes (training/steps_in_flight.cuh).
struct StepSums {
  float loss = 0;
  float stop = 0;   // ranks that were asked to stop
  float saved = 0;  // ranks that have written their part of the checkpoint under way
};

class Model {
 public:
  virtual ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelOptions& options() const { return options_; }
  const TensorList& tensors() const { return list_; }
  const DeviceMemory& memory() const { return memory_; }
  cudaStream_t stream() const { return stream_; }
  virtual Parameters& store() = 0;
  // The library that does attention in this build, if any, and why it can't do this model's; both may be empty.
  const std::string& library_attention() const { return library_attention_; }
  const std::string& attention_problem() const { return attention_problem_; }

  // 6·N + 6·L·C·T FLOPs a token: N parameters, forward and backward; causal attention counted once.
  double flops_per_token() const {
    const ModelShape& s = options_.shape;
    return 6.0 * double(list_.parameters()) + 6.0 * s.layers * double(s.channels) * options_.seq_len;
  }

  // ---- a step: begin_sums, then forward and backward of each micro-batch, then update. The host waits for nothing.

  // The step's sums start from zero, or from this rank's votes, in pinned memory that stays as it is meanwhile.
  void begin_sums(const StepSums* votes = nullptr) {
    if (votes) CUDA_CHECK(cudaMemcpyAsync(sums_, votes, sizeof(StepSums), cudaMemcpyHostToDevice, stream_));
    else CUDA_CHECK(cudaMemsetAsync(sums_, 0, sizeof(StepSums), stream_));
  }

  // Adds the batch's loss to the sums. In training the gradients of its logits are computed as well (their rows come in
  // chunks, and none is kept), and from them those of the head. After the last batch the ranks' sums are added up, which
  // takes place during the backward pass.
  void forward(const Batch& batch) {
    if (batch.training) store().begin_micro_step(batch.first, batch.last);
    launch(forward_graphs_, batch, [&] { forward_pass(batch); });
    if (batch.last && batch.loss_weight > 0) reduce_sums();
  }

  // Adds the batch's gradients to those of the step, or begins with them if it is the first.
  void backward(const Batch& batch) {
    launch(backward_graphs_, batch, [&] { backward_pass(batch); });
  }

  // Clips the step's gradients and applies them, unless loss or norm are not finite or beyond `limits`.
  void update(const AdamW& options, float clip, const StepLimits& limits = {}) {
    store().update(options, clip, &reduced_sums_->loss, limits);
  }

  // ---- what came of it. Device memory:
  const StepSums* reduced_sums() const { return reduced_sums_; }  // over all ranks, after the last batch of a step
  // These wait for the device.
  StepSums sums() {
    dp_.wait_for_all(stream_);
    return read(reduced_sums_);
  }
  float loss() { return sums().loss; }
  GradientSummary gradient_summary() { return read(store().summary()); }

  // Logits (count,V) of `count` rows of the batch that the last forward pass was of, from row `first` on. Waits.
  virtual std::vector<float> logits(int first, int count) = 0;

 protected:
  Model(const ModelOptions& options, Communicator& dp, cudaStream_t stream)
      : options_(options), list_(options.shape), dp_(dp), stream_(stream) {}

  virtual void forward_pass(const Batch& batch) = 0;
  virtual void backward_pass(const Batch& batch) = 0;

  void lay_out_sums(Arena& arena) {
    sums_ = arena.take<StepSums>(1);
    reduced_sums_ = arena.take<StepSums>(1);
  }

  ModelOptions options_;
  TensorList list_;
  DeviceMemory memory_;
  Communicator& dp_;  // the data-parallel ranks
  cudaStream_t stream_;
  StepSums* sums_ = nullptr;  // of this rank
  std::string library_attention_, attention_problem_;

 private:
  // Graphs of the same pass: by where the batch lies, and whether it is the first of a step, whose gradients are
  // written, not added.
  using Graphs = std::map<std::pair<const int*, bool>, RecordedWork>;

  // As a graph, where the pass is the same every time: not where the store gathers and reduces during it, and not while
  // the profiler wants to see each launch.
  template <class Pass>
  void launch(Graphs& graphs, const Batch& batch, Pass pass) {
    const Profiler& profiler = Profiler::instance();
    const bool watched = profiler.enabled || profiler.trace || profiler.listener;
    if (!batch.training || watched || !store().is_quiet()) return pass();
    if (std::exchange(recorded_weight_, batch.loss_weight) != batch.loss_weight) {
      forward_graphs_.clear();
      backward_graphs_.clear();
    }
    graphs[{batch.inputs, batch.first}].run(stream_, pass);
  }

  void reduce_sums() {
    CUDA_CHECK(cudaMemcpyAsync(reduced_sums_, sums_, sizeof(StepSums), cudaMemcpyDeviceToDevice, stream_));
    dp_.after(stream_);
    dp_.all_reduce(&reduced_sums_->loss, sizeof(StepSums) / sizeof(float));
  }

  template <class Value>
  Value read(const Value* value) const {
    Value result;
    copy_and_wait(&result, value, 1, cudaMemcpyDeviceToHost, stream_);
    return result;
  }

  StepSums* reduced_sums_ = nullptr;
  Graphs forward_graphs_, backward_graphs_;
  float recorded_weight_ = 0;
};

// Data-parallel ranks are those of `dp`: the model's calls are collective, each rank with its own samples.
using MakeModel = std::unique_ptr<Model> (*)(const ModelOptions& options, Communicator& dp, cudaStream_t stream);

// By storage type, fp32, bf16, fp16: those that this program was linked with (make DTYPES).
inline std::map<std::string, MakeModel>& model_makers() {
  static std::map<std::string, MakeModel> makers;
  return makers;
}

inline std::unique_ptr<Model> make_model(const std::string& dtype, const ModelOptions& options, Communicator& dp,
                                         cudaStream_t stream) {
  return model_makers().at(dtype)(options, dp, stream);
}
