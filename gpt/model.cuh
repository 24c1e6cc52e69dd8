// The model's interface for the program, the same for every storage type. gpt.cuh has the maths, and stage.cuh the
// class that makes the passes. The Makefile compiles gpt/gpt_instances.cu once for each storage type, so an edit of
// the program does not compile the kernels again: that file enters StageModel<float>, <bf16> and <half> in
// model_makers(), and make_model() asks for one by name.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpt/model_options.h"
#include "gpt/room.h"
#include "gpt/step_sums.cuh"

// Its calls are collective: all ranks of the mesh make them, each data-parallel rank with its own samples.
class Model {
 public:
  virtual ~Model() = default;

  const ModelOptions& options() const { return options_; }
  const TensorList& tensors() const { return list_; }
  const DeviceMemory& memory() const { return memory_; }
  const PinnedMemory& host_memory() const { return host_memory_; }  // the arrays that are offloaded
  cudaStream_t stream() const { return stream_; }
  Stage stage() const { return mesh_.stage(options_.chunks); }
  // The positions of a sample of seq_len tokens whose rows rank cp_rank of those that split samples has (without it: this rank).
  Positions positions(int seq_len, int cp_rank) const {
    for (const Room* room : rooms())
      if (room->positions) return room->positions(options_.store.rooms, seq_len, mesh_.cp().size(), cp_rank);
    return neighbours(seq_len);
  }
  Positions positions(int seq_len) const { return positions(seq_len, mesh_.cp().rank()); }
  Positions positions() const { return positions(options_.seq_len); }
  // What is trained: the model's tensors, or the adapters beside them (extensions/lora/lora.h).
  virtual Parameters& trained_store() const = 0;
  const TensorList& trained_tensors() const { return trained_store().shards().list(); }
  // The model's tensors, if adapters are trained in their place; else null.
  virtual Parameters* frozen() = 0;
  virtual void merge_trained() = 0;  // into these tensors, on one rank
  // Of the library that does attention in this build: its name, and why it can't do this model's. Empty: none, it can.
  const std::string& library_attention() const { return library_attention_; }
  const std::string& attention_body() const { return attention_body_; }  // who computes it, as --attention names them
  const std::string& attention_problem() const { return attention_problem_; }
  double flops_per_token() const {
    return ::flops_per_token(options_.shape, double(trained_tensors().parameters()),
                             trained_tensors().is_adapters() ? double(list_.parameters()) : 0, options_.seq_len);
  }

  // ---- a step: begin_sums, its actions (gpt/actions.h), update. None waits for the device.

  // Sets the step's sums to zero, or to this rank's votes (SummedOverRanks::begin).
  void begin_sums(const StepSums* votes = nullptr) { sums_.begin(votes); }
  // Does the batch's action: posts the receives that go with it, and makes one of the passes below, or
  // computes the gradients that backward of Work::input has left.
  virtual void run(const Batch& batch) = 0;
  // Computes the activations of the batch, in one chunk of layers. If no backward follows and losses count, the last
  // chunk also computes logits, and adds the batch's loss to the sums.
  virtual void forward(const Batch& batch) = 0;
  // Adds the batch's loss to the step's loss, and its gradients to the step's gradients; the first micro-batch
  // overwrites them. The last chunk computes the logits here, some rows at a time, and does not keep them.
  virtual void backward(const Batch& batch) = 0;
  // Sums loss and norm over all ranks, clips the step's gradients and applies them, unless either is not finite or beyond `limits`.
  void update(const AdamW& options, float clip, const StepLimits& limits = {}) {
    Profiler::instance().context.micro_batch = -1;  // the work from here on belongs to no micro-batch
    trained_store().update(options, clip, sums_.terms(), limits);
  }

  // ---- results

  // Its all() are the sums over all ranks, in device memory: the stream can read them after update() or sums().
  SummedOverRanks& step_sums() { return sums_; }
  // These wait for the device.
  StepSums sums() { return sums_.read(); }
  float loss() { return sums().loss; }
  GradientSummary gradient_summary() {
    GradientSummary summary;
    copy_and_wait(&summary, trained_store().summary(), 1, cudaMemcpyDeviceToHost, stream_);
    return summary;
  }
  // Logits (count,V) of rows [first, first + count) that this context-parallel rank has in the last forward pass's
  // batch.
  virtual std::vector<float> logits(int first, int count, int cp_rank = 0) = 0;

 protected:
  Model(const ModelOptions& options, Mesh& mesh, cudaStream_t stream, BlockTensors of_block)
      : options_(options),
        list_(options.shape, mesh.tp().size(), mesh.tp().rank(), layers_of(options.shape, mesh.stage(options.chunks)), of_block),
        mesh_(mesh), stream_(stream), sums_(mesh, stream) {}

  ModelOptions options_;
  TensorList list_;
  DeviceMemory memory_;
  PinnedMemory host_memory_;
  Mesh& mesh_;
  cudaStream_t stream_;
  SummedOverRanks sums_;
  std::string library_attention_, attention_body_, attention_problem_;
};

using MakeModel = std::unique_ptr<Model> (*)(const ModelOptions& options, Mesh& mesh, cudaStream_t stream);

// The storage types that this program was linked with (make DTYPES), by name: fp32, bf16, fp16.
inline std::map<std::string, MakeModel>& model_makers() {
  static std::map<std::string, MakeModel> makers;
  return makers;
}
inline std::unique_ptr<Model> make_model(const std::string& dtype, const ModelOptions& options, Mesh& mesh, cudaStream_t stream) {
  return model_makers().at(dtype)(options, mesh, stream);
}
