// The model as the program sees it, whatever its storage type. gpt.cuh has the maths. The Makefile compiles that once for
// each storage type, so that an edit of the program compiles no kernel.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "parallel/collectives.cuh"
#include "parallel/memory.cuh"
#include "parallel/parameters.h"

// What backward computes again instead of keeping it: nothing; gelu's output (4C of 16C elements a row and layer); all
// of a block but its input (C elements).
enum class Recompute { none, gelu, block };

struct ModelOptions {
  ModelShape shape = {};
  int micro_batch = 0, seq_len = 0;
  Recompute recompute = Recompute::none;
  int logit_chunks = 1;  // the head's rows at a time: ⌈R / logit_chunks⌉
  bool library_attention = false;  // attention of micro-batches by a library, if there is one that can
  StoreOptions store = {};
};

// What is added up over the ranks with every step: the loss, and what else all must know at the same step.
struct StepSums {
  float loss = 0;
  float stop = 0;   // ranks that were asked to stop
  float saved = 0;  // ranks that have written their part of the checkpoint under way
};

// What a step came to.
struct StepResults {
  StepSums sums;
  GradientSummary gradients;
  double seconds = 0;  // on the device, from begin_step to end_step
};

class Model {
 public:
  virtual ~Model() = default;

  const ModelOptions& options() const { return options_; }
  const TensorList& tensors() const { return list_; }
  const DeviceMemory& memory() const { return memory_; }
  virtual Parameters& store() = 0;
  // The library that does attention in this build, if any, and why it can't do this model's; both may be empty.
  const std::string& library_attention() const { return library_attention_; }
  const std::string& attention_problem() const { return attention_problem_; }

  // 6·N + 6·L·C·T FLOPs a token: N parameters, forward and backward; causal attention counted once.
  double flops_per_token() const {
    const ModelShape& s = options_.shape;
    return 6.0 * double(list_.parameters()) + 6.0 * s.layers * double(s.channels) * options_.seq_len;
  }

  // ---- steps. The host may be one ahead: it learns what a step came to while the device computes the next.

  // votes: this rank's part of the step's sums; the loss is not looked at. A number for results().
  virtual int begin_step(const StepSums& votes) = 0;
  // After the update.
  virtual void end_step() = 0;
  // Of a step that has been given to the device, this or the one before. Waits for it to end.
  virtual StepResults results(int number) = 0;
  // Has the device done all it was given?
  virtual bool is_idle() const = 0;

  // One micro-step: loss and gradients of inputs, targets (B,T), added up from `first` to `last`. Host memory, which is
  // free again when the call returns. tokens: those of the whole step on all ranks, the loss's denominator.
  virtual void train_micro_step(const int* inputs, const int* targets, double tokens, bool first, bool last) = 0;
  // One micro-batch of validation: adds to the loss only.
  virtual void evaluate_micro_step(const int* inputs, const int* targets, double tokens, bool first, bool last) = 0;
  // Clips and applies the gradients of the micro-steps, unless loss or norm are beyond `limits` or not finite.
  virtual void update(const AdamW& options, float clip, const StepLimits& limits = {}) = 0;

  // Of the micro-steps from the last `first` to `last`, on all ranks. These wait for the device.
  virtual StepSums sums() = 0;
  float loss() { return sums().loss; }
  virtual GradientSummary gradient_summary() = 0;

  // Logits (V) that follow `tokens`, at most T of them.
  virtual std::vector<float> next_token_logits(const std::vector<int>& tokens) = 0;
  // Logits (B,T,V) of a whole batch, for tests.
  virtual std::vector<float> batch_logits(const int* inputs) = 0;

 protected:
  explicit Model(const ModelOptions& options) : options_(options), list_(options.shape) {}

  ModelOptions options_;
  TensorList list_;
  DeviceMemory memory_;
  std::string library_attention_, attention_problem_;
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
