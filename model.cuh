// The model's interface for the program, the same for every storage type. gpt.cuh has the maths, and stage.cuh the class that
// defines the passes that Model declares. The Makefile compiles gpt.cu once for each storage type, so an edit of the program does
// not compile the kernels again. When the program starts, gpt.cu enters StageModel<float>, <bf16> and <half> in
// model_makers(), and make_model() asks for one of them by the name of its type.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/device/graph.cuh"
#include "kernels/device/memory.cuh"
#include "kernels/positions.h"
#include "parallel/mesh.cuh"
#include "parallel/parameters.h"
#include "parallel/pipeline.h"
#include "parallel/tokens.h"

// Which activations backward computes again instead of keeping them from forward: none; gelu's output (4C of the 16C
// elements per row and layer); all activations of a block except its input (C elements per row).
enum class Recompute { none, gelu, block };

// Bytes of workspace that libraries take on a device that is not here, for a plan (planner/memory.cuh).
struct LibraryWorkspaces {
  size_t gemm, attention;
};

struct ModelOptions {
  ModelShape shape = {};
  int micro_batch = 0, seq_len = 0;
  Recompute recompute = Recompute::none;
  ContextMethod context_method = ContextMethod::ring;
  int tp_pieces = 1;               // tensor parallelism sends rows in so many pieces (parallel/tensor_parallel.cuh)
  int chunks = 1;                  // of layers, which each pipeline stage has (parallel/pipeline.h)
  int slots = 1;                   // so many may be between forward and backward at the same time: a micro-batch in a chunk
  bool splits_backward = false;    // the schedule has actions of Work::input and Work::weight
  int logit_chunks = 1;            // the head computes ⌈R / logit_chunks⌉ rows at a time
  int cached_positions = 0;        // in the cache of keys and values that text is generated with; 0: no cache
  int samples = 0;                 // so many texts are generated at a time, at most micro_batch
  bool library_attention = false;  // use a library's attention for micro-batches, if this build has one that can
  bool hopper_attention = false;   // use kernels/hopper_attention.cuh, if this GPU can; one of the two at most
  std::optional<LibraryWorkspaces> elsewhere = {};
  StoreOptions store = {};
};

// A micro-batch in the device's memory (training/batch_buffers.cuh puts it there).
struct Batch {
  Tokens tokens = {};            // for the first and last chunk
  int batch_size = 0;            // B
  Positions positions = {};      // of the rows, T for each sample
  bool first = true, last = true;  // is it the first, the last of the step's micro-batches on this rank?
  bool training = true;       // backward will follow
  Action action = {Work::forward, 0};  // what is done with it, and where its activations are kept until backward
  int cached = 0, added = 0;  // with a cache of texts: it has so many tokens of each, and so many are added to it
  float loss_weight = 0;      // factor of each token's loss: 1 / (tokens of the step on all ranks); 0: compute no loss
};

// The sums over all ranks that every step needs: the loss, and votes (training/steps_in_flight.cuh).
struct StepSums {
  float loss = 0;
  float stop = 0;   // number of ranks that were asked to stop
  float saved = 0;  // number of ranks that have written their part of the checkpoint under way
  float sample = 0;  // 1: a sample is due by rank 0's clock
};

// The chunks of layers of this rank's pipeline stage.
inline std::vector<Layers> own_chunks(const ModelOptions& options, const Mesh& mesh) {
  const Stage stage = mesh.stage(options.chunks);
  const std::vector<Layers> all = deal_layers(options.shape, stage.stages, stage.chunks);
  std::vector<Layers> own;
  for (int chunk = 0; chunk < stage.chunks; ++chunk) own.push_back(all[size_t(stage.in_model(chunk))]);
  return own;
}

class Model {
 public:
  virtual ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelOptions& options() const { return options_; }
  const TensorList& tensors() const { return list_; }
  const DeviceMemory& memory() const { return memory_; }
  cudaStream_t stream() const { return stream_; }
  Stage stage() const { return mesh_.stage(options_.chunks); }
  // Of the rows that a context-parallel rank, or this one, has in samples of so many tokens.
  Positions positions(int seq_len, int cp_rank) const {
    return positions_of(options_.context_method, seq_len, mesh_.cp().size(), cp_rank);
  }
  Positions positions(int seq_len) const { return positions(seq_len, mesh_.cp().rank()); }
  Positions positions() const { return positions(options_.seq_len); }
  virtual Parameters& store() = 0;
  // The name of the library that does attention in this build (empty: none), and why what was asked for can't do this model's
  // (empty: it can).
  const std::string& library_attention() const { return library_attention_; }
  const std::string& attention_problem() const { return attention_problem_; }

  // 6·Ψ + 6·L·C·T FLOPs per token, Ψ parameters, forward and backward. Of attention only the causal half is counted.
  double flops_per_token() const {
    const ModelShape& s = options_.shape;
    return 6.0 * double(list_.parameters()) + 6.0 * s.layers * double(s.channels) * options_.seq_len;
  }

  // ---- a step: begin_sums (which StepsInFlight::begin calls in training), then the actions of a schedule
  // (parallel/pipeline.h), then update. None of these calls waits for the device.

  // Sets the step's sums to zero, or to this rank's votes. Votes lie in pinned memory, and must not change before the
  // device has copied them.
  void begin_sums(const StepSums* votes = nullptr) {
    if (votes) CUDA_CHECK(cudaMemcpyAsync(sums_, votes, sizeof(StepSums), cudaMemcpyHostToDevice, stream_));
    else CUDA_CHECK(cudaMemsetAsync(sums_, 0, sizeof(StepSums), stream_));
    reduced_ = false;
  }

  // Does the batch's action. Whatever its work is, the receives that go with it are posted first.
  void run(const Batch& batch) {
    post_receives(batch);
    switch (batch.action.work) {
      case Work::forward: return forward(batch);
      case Work::backward:
      case Work::input: return backward(batch);
      case Work::weight: return weight_gradients(batch);
    }
  }

  // Computes the activations of the batch, in one chunk of layers. If no backward follows, the last chunk also computes the
  // logits and adds the batch's loss to the sums.
  void forward(const Batch& batch) {
    last_ = batch;
    if (batch.training) store().begin_micro_step(batch.first, batch.last);
    launch(forward_graphs_, batch, [&] { forward_pass(batch); });
  }

  // Adds the batch's loss to the sums, and its gradients to those of the step; the first batch of the step overwrites
  // them instead. The last chunk computes the logits here, some rows at a time, which are not kept.
  void backward(const Batch& batch) {
    store().begin_micro_step(batch.first, batch.last);
    launch(backward_graphs_, batch, [&] { backward_pass(batch); });
  }

  // Computes the gradients that backward of Work::input has left out, those of the blocks' matrices.
  void weight_gradients(const Batch& batch) {
    store().begin_micro_step(batch.first, batch.last);
    weight_pass(batch);
  }

  // Clips the step's gradients and applies them, unless loss or norm are not finite or beyond `limits`.
  void update(const AdamW& options, float clip, const StepLimits& limits = {}) {
    Profiler::instance().context.micro_batch = -1;  // what follows belongs to no micro-batch
    reduce_sums();
    store().update(options, clip, &reduced_sums_->loss, limits);
  }

  // ---- results

  // The sums over all ranks, in device memory. The stream can read them after update() or sums(), which let it wait for
  // the other ranks.
  const StepSums* reduced_sums() const { return reduced_sums_; }
  // The next three wait for the device.
  StepSums sums() {
    if (!reduced_) reduce_sums();
    mesh_.world().wait_for_all(stream_);
    return read(reduced_sums_);
  }
  float loss() { return sums().loss; }
  GradientSummary gradient_summary() { return read(store().summary()); }

  // Logits (count,V) of rows [first, first + count) that this context-parallel rank has in the last forward pass's batch.
  // Waits for the device.
  virtual std::vector<float> logits(int first, int count, int cp_rank = 0) = 0;

 protected:
  Model(const ModelOptions& options, Mesh& mesh, cudaStream_t stream)
      : options_(options), list_(options.shape, mesh.tp().size(), mesh.tp().rank(), own_chunks(options, mesh)), mesh_(mesh),
        stream_(stream) {}

  virtual void post_receives(const Batch& batch) = 0;
  virtual void forward_pass(const Batch& batch) = 0;
  virtual void backward_pass(const Batch& batch) = 0;
  virtual void weight_pass(const Batch& batch) = 0;

  void lay_out_sums(Arena& arena) {
    sums_ = arena.take<StepSums>(1);
    reduced_sums_ = arena.take<StepSums>(1);
  }

  ModelOptions options_;
  TensorList list_;
  DeviceMemory memory_;
  Mesh& mesh_;
  cudaStream_t stream_;
  Batch last_ = {};           // that of the last forward pass
  StepSums* sums_ = nullptr;  // this rank's, in device memory
  std::string library_attention_, attention_problem_;

 private:
  // The graphs of one pass. The key is the batch's address, and whether the batch is the first of its step: the first
  // overwrites gradients, the others add to them.
  using Graphs = std::map<std::pair<const int*, bool>, RecordedWork>;

  // Runs the pass, as a graph if it is the same every time. It is not while the store gathers or reduces during the
  // pass, and where ranks exchange data meanwhile. While the profiler wants to see each launch, no graph is used either.
  template <class Pass>
  void launch(Graphs& graphs, const Batch& batch, Pass pass) {
    const Profiler& profiler = Profiler::instance();
    const bool watched = profiler.enabled || profiler.trace || profiler.listener;
    if (!batch.training || watched || mesh_.exchanges_in_passes() || !store().is_quiet()) return pass();
    if (std::exchange(recorded_weight_, batch.loss_weight) != batch.loss_weight) {
      forward_graphs_.clear();
      backward_graphs_.clear();
    }
    graphs[{batch.tokens.inputs, batch.first}].run(stream_, pass);
  }

  void reduce_sums() {
    reduced_ = true;
    CUDA_CHECK(cudaMemcpyAsync(reduced_sums_, sums_, sizeof(StepSums), cudaMemcpyDeviceToDevice, stream_));
    mesh_.world().after(stream_);
    static_assert(sizeof(StepSums) == 4 * sizeof(float));  // so that one collective adds up all of it
    mesh_.world().all_reduce(&reduced_sums_->loss, sizeof(StepSums) / sizeof(float));
  }

  template <class Value>
  Value read(const Value* value) const {
    Value result;
    copy_and_wait(&result, value, 1, cudaMemcpyDeviceToHost, stream_);
    return result;
  }

  StepSums* reduced_sums_ = nullptr;
  bool reduced_ = false;
  Graphs forward_graphs_, backward_graphs_;
  float recorded_weight_ = 0;
};

// The model's calls are collective: all ranks of the mesh make them, each data-parallel rank with its own samples.
using MakeModel = std::unique_ptr<Model> (*)(const ModelOptions& options, Mesh& mesh, cudaStream_t stream);

// The storage types that this program was linked with (make DTYPES), by name: fp32, bf16, fp16.
inline std::map<std::string, MakeModel>& model_makers() {
  static std::map<std::string, MakeModel> makers;
  return makers;
}

inline std::unique_ptr<Model> make_model(const std::string& dtype, const ModelOptions& options, Mesh& mesh,
                                         cudaStream_t stream) {
  return model_makers().at(dtype)(options, mesh, stream);
}
