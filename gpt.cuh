// The model: GPT-2 (Radford et al. 2019), forward and backward, in the order it is computed.
//
//   x = wte[token] + wpe[position]
//   L times:  x += attention(layernorm(x)) · W + b;   x += gelu(layernorm(x) · W + b) · W + b
//   logits = layernorm(x) · wteᵀ
//
// Symbols: B micro-batch, T sequence length, C channels, NH heads, HS = C/NH, V vocabulary, Vp padded to a multiple of
// 128, L layers, R = B·T rows. T is also the template parameter of the storage type (float, bf16, half), as
// in the kernels.
//
// The residual addition belongs to the LayerNorm after it (kernels/layernorm.cuh), so a block starts with the stream as
// the block before it left it, in two parts: `middle`, the stream after attention, and `branch`, its MLP's output.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "model.cuh"
#include "kernels/attention.cuh"
#include "kernels/cross_entropy.cuh"
#include "kernels/embedding.cuh"
#include "kernels/gelu.cuh"
#include "kernels/graph.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/matmul.cuh"
#include "parallel/zero.cuh"

// The tensors of a block's unit, in the order of TensorList. E is const T for weights, float for gradients.
template <class E>
struct BlockTensors {
  BlockTensors(E* unit, const TensorDescriptor* list)
      : qkv_weight(unit + list[0].offset), projection_weight(unit + list[1].offset), up_weight(unit + list[2].offset),
        down_weight(unit + list[3].offset), qkv_bias(unit + list[4].offset), projection_bias(unit + list[5].offset),
        up_bias(unit + list[6].offset), down_bias(unit + list[7].offset), norm1_weight(unit + list[8].offset),
        norm1_bias(unit + list[9].offset), norm2_weight(unit + list[10].offset), norm2_bias(unit + list[11].offset) {}

  E *qkv_weight, *projection_weight, *up_weight, *down_weight;  // (C,3C) (C,C) (C,4C) (4C,C)
  E *qkv_bias, *projection_bias, *up_bias, *down_bias;          // (3C) (C) (4C) (C)
  E *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;     // (C) each
};

// What a block keeps between forward and backward.
template <class T>
struct BlockActivations {
  T* input;                     // (R,C)   the residual stream entering the block
  T* norm1;                     // (R,C)
  T* qkv;                       // (R,3C)
  T* attention;                 // (R,C)
  T* middle;                    // (R,C)   the stream after attention
  T* norm2;                     // (R,C)
  T* up;                        // (R,4C)  before gelu
  T* gelu;                      // (R,4C)
  float *mean1, *rstd1, *mean2, *rstd2;  // (R) each
  float* lse;                   // (B,NH,T)
};

template <class T>
class GPT final : public Model {
 public:
  GPT(const ModelOptions& options, Communicator& dp, cudaStream_t stream)
      : Model(options), dp_(dp), stream_(stream),
        store_(list_, options.store, memory_, dp, stream), pinned_(sizeof(PinnedStep) * 2 + batch_bytes() * 2) {
    gemm_choices().use_library(gemm_library());
    if (has_library_attention) library_attention_ = library_attention_name();
    if (options.library_attention)
      attention_problem_ = plan_attention<T>(options.micro_batch, options.seq_len, options.shape.heads,
                                             options.shape.head_size());
    memory_.add("activations", [this](Arena& arena) { lay_out_activations(arena); });
    memory_.add("workspace", [this](Arena& arena) { lay_out_workspace(arena); });
    memory_.allocate();
    store_.clear();
    CUDA_CHECK(cudaStreamCreateWithFlags(&copies_, cudaStreamNonBlocking));
    Profiler::instance().name_stream(copies_, "copies");
    auto* steps = static_cast<PinnedStep*>(pinned_.data());
    for (int i : {0, 1}) {
      steps_[i].host = steps + i;
      batches_[i].host = reinterpret_cast<int*>(steps + 2) + i * batch_bytes() / sizeof(int);
    }
  }
  ~GPT() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(copies_);
    use_gemm_workspace(nullptr);
    use_library_attention_workspace(nullptr, 0);
  }
  GPT(const GPT&) = delete;
  GPT& operator=(const GPT&) = delete;

  Parameters& store() override { return store_; }

  // ---- steps

  int begin_step(const StepSums& votes) override {
    step_ ^= 1;
    steps_[step_].host->votes = votes;
    steps_[step_].begin.record(stream_);
    return step_;
  }

  void end_step() override {
    Step& step = steps_[step_];
    CUDA_CHECK(cudaMemcpyAsync(&step.host->sums, reduced_sums_, sizeof(StepSums), cudaMemcpyDeviceToHost, stream_));
    CUDA_CHECK(cudaMemcpyAsync(&step.host->gradients, store_.summary(), sizeof(GradientSummary), cudaMemcpyDeviceToHost,
                               stream_));
    step.end.record(stream_);
  }

  StepResults results(int number) override {
    const Step& step = steps_[number];
    CUDA_CHECK(cudaEventSynchronize(step.end));
    return {step.host->sums, step.host->gradients, elapsed_ms(step.begin, step.end) / 1e3};
  }

  bool is_idle() const override { return is_ready(stream_); }

  void train_micro_step(const int* inputs, const int* targets, double tokens, bool first, bool last) override {
    store_.begin_micro_step(first, last);
    begin_micro_step(inputs, targets, first);
    const auto compute_loss = [&] {
      forward(options_.micro_batch, options_.seq_len);
      head(float(1 / tokens), true);
    };
    if (can_be_recorded(tokens)) {
      recorded_[batch_][first].run(stream_, [&] { compute_loss(), backward(); });
      if (last) reduce_sums();
    } else {
      compute_loss();
      if (last) reduce_sums();  // they travel during the backward pass
      backward();
    }
  }

  void evaluate_micro_step(const int* inputs, const int* targets, double tokens, bool first, bool last) override {
    begin_micro_step(inputs, targets, first);
    forward(options_.micro_batch, options_.seq_len);
    head(float(1 / tokens), false);
    if (last) reduce_sums();
  }

  void update(const AdamW& options, float clip, const StepLimits& limits) override {
    store_.update(options, clip, &reduced_sums_->loss, limits);
  }

  StepSums sums() override {
    dp_.wait_for_all(stream_);
    return read(reduced_sums_);
  }
  GradientSummary gradient_summary() override { return read(store_.summary()); }

  std::vector<float> next_token_logits(const std::vector<int>& tokens) override {
    const int count = int(tokens.size()), C = options_.shape.channels, padded = options_.shape.padded_vocabulary();
    const Untimed untimed;  // the next count is another
    send_batch(tokens.data(), nullptr, count);
    forward(1, count);
    head_forward(logits_, final_norm_ + size_t(count - 1) * C, store_.acquire(0, Pass::backward), 1, C, padded, stream_);
    return read_logits(1);
  }

  std::vector<float> batch_logits(const int* inputs) override {
    const int rows = options_.micro_batch * options_.seq_len, C = options_.shape.channels;
    send_batch(inputs, nullptr, rows);
    forward(options_.micro_batch, options_.seq_len);
    std::vector<float> all;
    for (int begin = 0; begin < rows; begin += logit_rows()) {
      const int count = std::min(logit_rows(), rows - begin);
      head_forward(logits_, final_norm_ + size_t(begin) * C, store_.acquire(0, Pass::backward), count, C,
                   options_.shape.padded_vocabulary(), stream_);
      const std::vector<float> logits = read_logits(count);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }

 private:
  void begin_micro_step(const int* inputs, const int* targets, bool first) {
    if (first)
      CUDA_CHECK(cudaMemcpyAsync(sums_, &steps_[step_].host->votes, sizeof(StepSums), cudaMemcpyHostToDevice, stream_));
    send_batch(inputs, targets, options_.micro_batch * options_.seq_len);
  }

  void reduce_sums() {
    CUDA_CHECK(cudaMemcpyAsync(reduced_sums_, sums_, sizeof(StepSums), cudaMemcpyDeviceToDevice, stream_));
    dp_.after(stream_);
    dp_.all_reduce(&reduced_sums_->loss, sizeof(StepSums) / sizeof(float));
  }

  // Is this micro-step's work the same as before? Not where the store gathers and reduces during it, and not while the
  // profiler wants to see each launch. Batches come in two places, and gradients are written or added to.
  bool can_be_recorded(double tokens) {
    const Profiler& profiler = Profiler::instance();
    if (!store_.is_quiet() || profiler.enabled || profiler.trace || profiler.listener) return false;
    if (std::exchange(recorded_tokens_, tokens) != tokens)
      for (auto& of_place : recorded_)
        for (RecordedWork& work : of_place) work.clear();
    return true;
  }

  // ---- forward

  void forward(int batch, int seq_len) {
    use_gemm_workspace(gemm_workspace_);  // there may have been another model's
    use_library_attention_workspace(attention_workspace_, attention_workspace_bytes_);
    const ModelShape& s = options_.shape;
    const int rows = batch * seq_len;
    const T* wte = store_.acquire(0, Pass::forward);
    embedding_forward(blocks_[0].input, inputs_, wte, wte + position_offset(), batch, seq_len, s.channels, stream_);
    for (int layer = 0; layer < s.layers; ++layer) {
      const TraceScope scope(layer);
      // Layer 0 finds the stream in its input already; later ones add what the block before left.
      const T* middle = layer ? blocks_[layer - 1].middle : blocks_[0].input;
      const BlockTensors<const T> w = weights(layer, Pass::forward);
      block_forward(layer, w, middle, layer ? branch_ : nullptr, batch, seq_len);
      linear_forward(branch_, blocks_[layer].gelu, w.down_weight, w.down_bias, rows, 4 * s.channels, s.channels, stream_);
    }
    const T* norm = store_.acquire(s.layers + 1, Pass::forward);
    residual_layernorm_forward(final_norm_, final_input_, final_mean_, final_rstd_, blocks_.back().middle, branch_, norm,
                               norm + final_bias_offset(), rows, s.channels, stream_);
  }

  // Everything of a block but its last product: what backward needs. `branch` null: `stream` is the block's input.
  void block_forward(int layer, const BlockTensors<const T>& w, const T* stream, const T* branch, int batch, int seq_len) {
    const ModelShape& s = options_.shape;
    const int rows = batch * seq_len, C = s.channels;
    BlockActivations<T>& a = blocks_[layer];
    residual_layernorm_forward(a.norm1, a.input, a.mean1, a.rstd1, stream, branch, w.norm1_weight, w.norm1_bias, rows, C,
                               stream_);
    linear_forward(a.qkv, a.norm1, w.qkv_weight, w.qkv_bias, rows, C, 3 * C, stream_);
    attention_forward(a.attention, a.lse, a.qkv, batch, seq_len, s.heads, s.head_size(), stream_);
    linear_forward(branch_, a.attention, w.projection_weight, w.projection_bias, rows, C, C, stream_);
    residual_layernorm_forward<T>(a.norm2, a.middle, a.mean2, a.rstd2, a.input, branch_, w.norm2_weight, w.norm2_bias,
                                  rows, C, stream_);
    linear_gelu_forward(a.gelu, a.up, a.norm2, w.up_weight, w.up_bias, rows, C, 4 * C, stream_);
  }

  // The loss, += weight · Σ losses, and in training the gradients of final_norm_ (in branch_) and of wte. Some rows at
  // a time, so that the logits, R·Vp, need not all be there at once.
  void head(float weight, bool training) {
    const ModelShape& s = options_.shape;
    const int rows = options_.micro_batch * options_.seq_len, C = s.channels, padded = s.padded_vocabulary();
    const T* wte = store_.acquire(0, Pass::backward);
    for (int begin = 0; begin < rows; begin += logit_rows()) {
      const int count = std::min(logit_rows(), rows - begin);
      const T* x = final_norm_ + size_t(begin) * C;
      head_forward(logits_, x, wte, count, C, padded, stream_);
      cross_entropy(logits_, losses_ + begin, &sums_->loss, targets_ + begin, count, s.vocabulary, padded, weight,
                    &store_.summary()->scale.value, training, stream_);
      if (!training) continue;
      const auto [dwte, accumulate] = store_.gradients(0);
      head_backward(branch_ + size_t(begin) * C, dwte, logits_, x, wte, count, C, padded, accumulate || begin > 0, stream_);
    }
  }

  int logit_rows() const { return ceil_div(options_.micro_batch * options_.seq_len, options_.logit_chunks); }

  // ---- backward

  void backward() {
    const ModelShape& s = options_.shape;
    const int batch = options_.micro_batch, seq_len = options_.seq_len, rows = batch * seq_len, C = s.channels;
    CUDA_CHECK(cudaMemsetAsync(dstream_, 0, size_t(rows) * C * sizeof(T), stream_));
    final_norm_backward();
    for (int layer = s.layers - 1; layer >= 0; --layer) {
      const TraceScope scope(layer);
      const BlockTensors<const T> w = weights(layer, Pass::backward);
      if (options_.recompute == Recompute::block) block_forward(layer, w, blocks_[layer].input, nullptr, batch, seq_len);
      if (options_.recompute == Recompute::gelu)
        gelu_forward(blocks_[layer].gelu, blocks_[layer].up, rows, 4 * C, stream_);
      block_backward(layer, w);
    }
    // The head has written wte's gradient in this micro-step already: here it is always added to.
    const auto [dwte, accumulate] = store_.gradients(0);
    embedding_backward(dwte, dwte + position_offset(), inputs_, order_, dstream_, batch, seq_len, s.positions, C,
                       accumulate, stream_);
    store_.gradients_ready(0);
  }

  void final_norm_backward() {
    const int rows = options_.micro_batch * options_.seq_len, C = options_.shape.channels, unit = options_.shape.layers + 1;
    const auto [dnorm, accumulate] = store_.gradients(unit);
    layernorm_backward(dstream_, dnorm, dnorm + final_bias_offset(), branch_, final_input_,
                       store_.acquire(unit, Pass::backward), final_mean_, final_rstd_, rows, C, accumulate, reductions_,
                       stream_);
    store_.gradients_ready(unit);
  }

  // dstream_: with respect to the stream after the block on entry, before the block on return.
  void block_backward(int layer, const BlockTensors<const T>& w) {
    const ModelShape& s = options_.shape;
    const int batch = options_.micro_batch, seq_len = options_.seq_len, rows = batch * seq_len, C = s.channels;
    const auto [gradients, accumulate] = store_.gradients(layer + 1);
    const BlockTensors<float> d(gradients, block_tensors(layer));
    const BlockActivations<T>& a = blocks_[layer];
    const T* no_gelu = nullptr;
    linear_backward(dwide_, d.down_weight, d.down_bias, dstream_, a.gelu, w.down_weight, a.up, rows, 4 * C, C, accumulate,
                    reductions_, stream_);
    linear_backward(branch_, d.up_weight, d.up_bias, dwide_, a.norm2, w.up_weight, no_gelu, rows, C, 4 * C, accumulate,
                    reductions_, stream_);
    layernorm_backward(dstream_, d.norm2_weight, d.norm2_bias, branch_, a.middle, w.norm2_weight, a.mean2, a.rstd2, rows,
                       C, accumulate, reductions_, stream_);
    linear_backward(branch_, d.projection_weight, d.projection_bias, dstream_, a.attention, w.projection_weight, no_gelu,
                    rows, C, C, accumulate, reductions_, stream_);
    attention_backward(dwide_, row_dots_, branch_, a.attention, a.qkv, a.lse, batch, seq_len, s.heads, s.head_size(),
                       stream_);
    linear_backward(branch_, d.qkv_weight, d.qkv_bias, dwide_, a.norm1, w.qkv_weight, no_gelu, rows, C, 3 * C, accumulate,
                    reductions_, stream_);
    layernorm_backward(dstream_, d.norm1_weight, d.norm1_bias, branch_, a.input, w.norm1_weight, a.mean1, a.rstd1, rows,
                       C, accumulate, reductions_, stream_);
    store_.gradients_ready(layer + 1);
  }

  // ---- parameters

  const TensorDescriptor* block_tensors(int layer) const {
    return &list_.tensors()[list_.units()[layer + 1].first_tensor];
  }
  BlockTensors<const T> weights(int layer, Pass pass) { return {store_.acquire(layer + 1, pass), block_tensors(layer)}; }
  size_t position_offset() const { return list_.tensors()[1].offset; }  // of wpe in the embedding's unit
  size_t final_bias_offset() const { return list_.tensors().back().offset; }

  // ---- memory

  void lay_out_activations(Arena& arena) {
    const ModelShape& s = options_.shape;
    const size_t rows = size_t(options_.micro_batch) * options_.seq_len, C = s.channels;
    const bool keep_blocks = options_.recompute != Recompute::block;
    blocks_.resize(s.layers);
    for (int layer = 0; layer < s.layers; ++layer) {
      BlockActivations<T>& a = blocks_[layer];
      if (layer == 0 || keep_blocks) {
        a.norm1 = arena.take<T>(rows * C);
        a.qkv = arena.take<T>(rows * 3 * C);
        a.attention = arena.take<T>(rows * C);
        a.middle = arena.take<T>(rows * C);
        a.norm2 = arena.take<T>(rows * C);
        a.up = arena.take<T>(rows * 4 * C);
        for (float** statistic : {&a.mean1, &a.rstd1, &a.mean2, &a.rstd2}) *statistic = arena.take<float>(rows);
        a.lse = arena.take<float>(rows * s.heads);
        a.gelu = layer == 0 || options_.recompute == Recompute::none ? arena.take<T>(rows * 4 * C) : blocks_[0].gelu;
      } else {
        a = blocks_[0];  // one set of buffers serves every block
      }
      a.input = arena.take<T>(rows * C);
    }
    final_input_ = arena.take<T>(rows * C);
    final_norm_ = arena.take<T>(rows * C);
    final_mean_ = arena.take<float>(rows);
    final_rstd_ = arena.take<float>(rows);
    logits_ = arena.take<T>(size_t(logit_rows()) * s.padded_vocabulary());
    losses_ = arena.take<float>(rows);
  }

  void lay_out_workspace(Arena& arena) {
    const ModelShape& s = options_.shape;
    const int rows = options_.micro_batch * options_.seq_len, C = s.channels;
    branch_ = arena.take<T>(size_t(rows) * C);
    dstream_ = arena.take<T>(size_t(rows) * C);
    dwide_ = arena.take<T>(size_t(rows) * 4 * C);
    row_dots_ = arena.take<float>(size_t(rows) * s.heads);
    reductions_ = arena.take<float>(std::max(layernorm_workspace(rows, C), linear_workspace(rows, 4 * C)));
    for (Batch& batch : batches_) batch.device = arena.take<int>(size_t(3) * rows);
    sums_ = arena.take<StepSums>(1);
    reduced_sums_ = arena.take<StepSums>(1);
    gemm_workspace_ = arena.take<char>(gemm_workspace_bytes);
    attention_workspace_bytes_ = library_attention_workspace_bytes();
    attention_workspace_ = arena.take<char>(attention_workspace_bytes_);
  }

  // ---- host and device

  // On a stream of its own, while the batch before is computed. targets may be null.
  void send_batch(const int* inputs, const int* targets, int rows) {
    batches_[batch_].used.record(stream_);
    batch_ ^= 1;
    Batch& batch = batches_[batch_];
    CUDA_CHECK(cudaEventSynchronize(batch.copied));  // two micro-batches ago
    std::copy_n(inputs, rows, batch.host);
    if (targets) std::copy_n(targets, rows, batch.host + rows);
    sort_by_token(inputs, rows, batch.host + 2 * rows);
    CUDA_CHECK(cudaStreamWaitEvent(copies_, batch.used));
    CUDA_CHECK(cudaMemcpyAsync(batch.device, batch.host, 3 * rows * sizeof(int), cudaMemcpyHostToDevice, copies_));
    batch.copied.record(copies_);
    CUDA_CHECK(cudaStreamWaitEvent(stream_, batch.copied));
    inputs_ = batch.device;
    targets_ = inputs_ + rows;
    order_ = targets_ + rows;
  }

  size_t batch_bytes() const { return size_t(3) * options_.micro_batch * options_.seq_len * sizeof(int); }

  template <class Value>
  Value read(const Value* value) const {
    Value result;
    copy_and_wait(&result, value, 1, cudaMemcpyDeviceToHost, stream_);
    return result;
  }

  std::vector<float> read_logits(int rows) {
    const size_t padded = options_.shape.padded_vocabulary(), vocabulary = options_.shape.vocabulary;
    std::vector<T> narrow(rows * padded);
    copy_and_wait(narrow.data(), logits_, narrow.size(), cudaMemcpyDeviceToHost, stream_);
    std::vector<float> logits(rows * vocabulary);
    for (int row = 0; row < rows; ++row)
      for (size_t v = 0; v < vocabulary; ++v) logits[row * vocabulary + v] = to_float(narrow[row * padded + v]);
    return logits;
  }

  Communicator& dp_;
  cudaStream_t stream_;
  ParameterStore<T> store_;

  std::vector<BlockActivations<T>> blocks_;
  T *final_input_, *final_norm_, *logits_;             // (R,C) (R,C) (logit_rows,Vp)
  float *final_mean_, *final_rstd_, *losses_;          // (R) each
  T *branch_, *dstream_, *dwide_;                      // (R,C) (R,C) (R,4C)
  float *row_dots_, *reductions_;                      // (B,NH,T), workspace of reductions
  char *gemm_workspace_, *attention_workspace_;        // lent to the libraries
  size_t attention_workspace_bytes_;
  StepSums *sums_, *reduced_sums_;                     // of this rank, of all ranks
  const int *inputs_, *targets_, *order_;              // (R) each; order: positions sorted by token

  // What host and device tell each other, two of each in turn: one is in use while the other is filled.
  struct PinnedStep {
    StepSums votes, sums;
    GradientSummary gradients;
  };
  struct Step {
    PinnedStep* host;
    Event begin{cudaEventDefault}, end{cudaEventDefault};
  };
  struct Batch {
    int *host, *device;  // (3,R): inputs, targets, order
    Event copied, used;
  };
  HostMemory pinned_;
  Step steps_[2];
  Batch batches_[2];
  int step_ = 0, batch_ = 0;
  cudaStream_t copies_ = nullptr;
  RecordedWork recorded_[2][2];  // by place of the batch, and whether the micro-step is the first
  double recorded_tokens_ = 0;
};
