// Runs the model of gpt.cuh on a rank: a pass computes one chunk of layers. A chunk begins with the rows that the
// stage before has sent, or with the embedding, and ends by sending to the stage after, or with the head (gpt/actions.h).
// With one stage there is one chunk, and nothing is sent.
//
// Where a micro-batch lies, on a stage in the middle:
//   forward    the received buffer becomes the input of the slot's first block, and that one the next buffer to receive
//              in. The last block's stream + branch is written to the buffer to send
//   backward   the received buffer becomes dstream_, which each block changes in place, and which then becomes the
//              buffer to send. A split backward leaves the rest in the slot (WeightGradients)
#pragma once

#include <algorithm>
#include <tuple>
#include <vector>

#include "gpt/ends.cuh"
#include "gpt/gpt.cuh"
#include "gpt/logits.cuh"
#include "gpt/model.cuh"
#include "kernels/device/graph.cuh"
#include "kernels/residual.cuh"
#include "model_rooms.cuh"  // as dev/make/rooms.sh has written it

// Block: gpt.cuh's, or another class with the functions that this file calls on block_, and lay_out() for its activations and
// gradients (CONTRIBUTING.md).
template <class Float, template <class> class Block = TransformerBlock>
class StageModel final : public Model {
 public:
  StageModel(const ModelOptions& options, Mesh& mesh, cudaStream_t stream)
      : Model(options, mesh, stream, Block<Float>::tensors),
        store_(list_, store_options(options), memory_, host_memory_, mesh, stream),
        table_(store_, list_), final_(store_, list_),
        on_{.store = store_, .trained = &store_, .list = list_, .products = &plain_, .stream = stream}, rooms_(make_rooms()),
        attention_(on_, *attention_of_rows_, attention_kernels_, options_, mesh, largest_attention()), block_(on_, attention_),
        final_norm_(on_, final_, final_norm_weight, final_norm_bias) {
    if (has_library_attention) library_attention_ = library_attention_name();
    attention_problem_ = attention_.problem();
    attention_body_ = attention_.name();
    set_rows(options.micro_batch, positions());  // the largest, for which memory is laid out
    memory_.add("activations", [this](Arena& arena) { lay_out_activations(arena); });
    memory_.add("workspace", [this](Arena& arena) { lay_out_workspace(arena); });
    for (const ModelRoom& room : rooms_) {
      if (room.lay_out) memory_.add(room.memory, room.lay_out);
      if (room.lay_out_on_host) host_memory_.add(room.memory, room.lay_out_on_host);
    }
    if (mesh.is_imagined()) return;
    if (gemm_choices().library.empty()) gemm_choices().library = gemm_library();
    if (!options.store.training) memory_.cure = "fewer --samples, a shorter --seq-len, or more ranks with --tp or --pp";
    memory_.allocate();
    if (host_memory_.total() > 0) host_memory_.allocate(mesh.room_on_host());
    store_.clear();
    for (const ModelRoom& room : rooms_) room.clear();
  }
  ~StageModel() {
    if (mesh_.is_imagined()) return;
    cudaStreamSynchronize(stream_);
    use_gemm_workspace(nullptr);
  }

  Parameters& trained_store() const override { return *on_.trained; }
  Parameters* frozen() override { return on_.trained == &store_ ? nullptr : &store_; }
  void merge_trained() override {
    for (const ModelRoom& room : rooms_) room.merge();
  }

  void run(const Batch& batch) override {
    if (batch.empty) return meet(batch);
    set_rows(batch.batch_size, batch.positions);
    if (links_) links_->post(batch.action);
    const SmMargin margin(mesh_.sm_margin(!batch.training || on_.trained->may_send(batch.action.work, batch.first, batch.last)));
    if (batch.action.work == Work::forward) forward(batch);
    else if (batch.action.work == Work::weight) weight_pass(batch);
    else backward(batch);
  }

  void forward(const Batch& batch) override {
    last_ = batch;
    if (batch.training) on_.trained->begin_micro_step(batch.first, batch.last);
    forward_graphs_.run(key_of(batch), differs_each_time(batch), stream_, [&] { forward_pass(batch); });
  }

  void backward(const Batch& batch) override {
    on_.trained->begin_micro_step(batch.first, batch.last);
    backward_graphs_.run(key_of(batch), differs_each_time(batch), stream_, [&] { backward_pass(batch); });
  }

  std::vector<float> logits(int first, int count, int cp_rank) override {
    set_rows(last_.batch_size, last_.positions);
    const SmMargin margin(mesh_.sm_margin(true));
    if (list_.is_last_stage()) table_.begin(0);
    const Float* own = list_.is_last_stage() ? activations_[size_t(last_.action.slot)].final_norm : nullptr;
    return logits_of_rows(*head_, on_, mesh_, own, {first, count}, logit_row_, cp_rank);
  }

 private:
  // A micro-batch's activations of one chunk of layers, kept between forward and backward. The final norm's are used in the last
  // chunk only.
  struct Activations {
    std::vector<typename Block<Float>::Activations> blocks;
    Float *final_input, *final_norm;  // (r,C) each: input and output of the last LayerNorm
    NormStats final_stats;
  };

  std::vector<ModelRoom> make_rooms() {
    const std::vector<TensorRow> block = Block<Float>::tensors(size_t(options_.shape.channels));
    ModelParts<Float> parts = {options_, mesh_, memory_, host_memory_, block, table_, largest_attention(), on_, attention_of_rows_,
                               attention_kernels_, embedding_, head_, inputs_, later_, links_};
    return model_rooms(parts);
  }

  // With adapters the model's own tensors are kept as weights only, and of ZeRO's levels the third alone divides them.
  static StoreOptions store_options(const ModelOptions& o) {
    return o.lora.is_on() ? StoreOptions{.zero = o.store.zero / 3 * 3, .training = false, .frozen = true} : o.store;
  }

  // Attention of this rank's rows and heads in a full micro-batch.
  AttentionSizes largest_attention() const {
    const ModelShape& s = options_.shape;
    return square_attention(options_.micro_batch, positions().length, s.heads / list_.tp(), s.head_size());
  }

  // In sampling B·T need not be a multiple of N: then R is B·T rounded up.
  void set_rows(int samples, const Positions& positions) {
    on_.R = round_up(samples * positions.length, list_.tp());
    on_.r = on_.R / list_.tp();
  }

  bool is_pipeline() const { return mesh_.shape().pp > 1; }
  const Layers& chunk_of(const Batch& batch) const { return list_.chunks()[size_t(batch.action.chunk)]; }
  bool is_last(const Layers& chunk) const { return chunk.end() == options_.shape.layers; }
  // The block that the next action begins with; 0: there is none.
  int block_after(const Action& action) const {
    if (action.next_chunk < 0) return 0;
    const Layers& next = list_.chunks()[size_t(action.next_chunk)];
    return action.next_work == Work::forward ? next.first + 1 : next.end();
  }
  Activations& activations_of(const Batch& batch) { return activations_[size_t(batch.action.slot)]; }

  // A training pass that is the same every time is recorded as a CUDA graph. It is not where the store gathers or
  // reduces meanwhile, where inputs of blocks are offloaded, nor where ranks exchange data: in a pipeline buffers change
  // places in every pass. Batches differ by their memory, by whether they overwrite the step's gradients or add to them,
  // and by the weight of a loss; arrays of gradients may take turns; and after the rehearsal products may have other
  // algorithms.
  using Key = std::tuple<const int*, bool, float, int, const float*>;
  Key key_of(const Batch& batch) const {
    return {batch.tokens.inputs, batch.first, batch.loss_weight, gemm_choices().lessons, on_.trained->written_gradients()};
  }
  bool differs_each_time(const Batch& batch) const {
    return !batch.training || inputs_->takes_turns() || mesh_.exchanges_in_passes() || !store_.is_quiet() || !on_.trained->is_quiet();
  }

  // ---- a pass

  void forward_pass(const Batch& batch) {
    use_gemm_workspace(gemm_workspace_);  // another model of this process may have set its own
    set_rows(batch.batch_size, batch.positions);
    on_.products->begin(batch.action.slot);
    attention_.begin_forward(batch.batch_size, batch.positions, batch.cached, batch.added);
    const Layers& chunk = chunk_of(batch);
    Activations& a = activations_of(batch);
    inputs_->begin_forward(a.blocks[0].input, 0);
    if (chunk.first == 0) {
      table_.begin(0, 1);
      embedding_->forward(a.blocks[0].input, batch.tokens, batch.positions);              // (r,C)
    } else {
      std::swap(a.blocks[0].input, links_->received(Message::activation));               // (r,C)
    }
    Residual<Float> x = {a.blocks[0].input};                                             // (r,C)
    for (int i = 0; i < chunk.count; ++i) {
      const TraceScope scope(chunk.first + i);
      block_.unit.begin(chunk.first + i + 1, i + 1 < chunk.count ? chunk.first + i + 2 : block_after(batch.action));
      typename Block<Float>::Activations& block = a.blocks[size_t(i)];
      if (i > 0) inputs_->begin_forward(block.input, i);
      x = block_.forward(block, x, narrow_);
      inputs_->end_forward(block.input, batch.action.slot, i, batch.training);
    }
    if (!is_last(chunk)) {
      residual_forward(links_->to_send(Message::activation), x.stream, x.branch, on_.r, on_.C(), stream_);  // (r,C)
      return links_->send(Message::activation);
    }
    final_.begin(list_.final_norm_unit());
    final_norm_.forward(a.final_norm, a.final_input, a.final_stats, x);                  // (r,C)
    if (batch.training || batch.loss_weight == 0) return;
    table_.begin(0);
    head_->forward(a.final_norm, batch.tokens.targets, batch.loss_weight, sums_.own_loss());
  }

  // dX is the gradient of the loss with respect to X. Work::input leaves the gradients of the blocks' matrices to
  // weight_pass().
  void backward_pass(const Batch& batch) {
    set_rows(batch.batch_size, batch.positions);
    on_.products->begin({});
    attention_.begin(batch.batch_size, batch.positions);
    const Layers& chunk = chunk_of(batch);
    Activations& a = activations_of(batch);
    inputs_->bring(batch.action.slot, chunk.count - 1);
    if (is_last(chunk)) head_backward(batch, a);
    else std::swap(dstream_, links_->received(Message::gradient));                       // (r,C)
    for (int i = chunk.count - 1; i >= 0; --i) {
      const TraceScope scope(chunk.first + i);
      typename Block<Float>::Activations& block = a.blocks[size_t(i)];
      block_.unit.begin(chunk.first + i + 1, i > 0 ? chunk.first + i : block_after(batch.action));
      inputs_->begin_backward(block.input, batch.action.slot, i);
      if (options_.recompute == Recompute::block) block_.forward_for_backward(block, {block.input}, narrow_);
      if (options_.recompute == Recompute::gelu) block_.recompute_gelu(block);
      later_->begin(batch.action, i);
      block_.backward(dstream_, block, gradients_, *later_);                             // (r,C)
      inputs_->end_backward(i);
      if (later_->end()) on_.trained->gradients_ready(block_.unit.number());  // none was left to weight_pass()
    }
    if (chunk.first == 0 && store_.trains()) return embedding_backward(batch);
    if (chunk.first == 0) return;  // adapters are in blocks only
    std::swap(dstream_, links_->to_send(Message::gradient));
    links_->send(Message::gradient);
  }

  void head_backward(const Batch& batch, const Activations& a) {
    clear_embedding_gradients(batch);
    table_.begin(0, list_.final_norm_unit() - 1);
    head_->backward(narrow_, a.final_norm, batch.tokens.targets, batch.loss_weight, sums_.own_loss());  // (r,C)
    CUDA_CHECK(cudaMemsetAsync(dstream_, 0, on_.elements() * sizeof(Float), stream_));
    final_.begin(list_.final_norm_unit());
    final_norm_.backward(dstream_, narrow_, a.final_input, a.final_stats);                         // (r,C)
    final_.gradients_ready();
    if (!list_.is_first_stage()) table_.gradients_ready();
  }

  void embedding_backward(const Batch& batch) {
    if (!list_.is_last_stage()) clear_embedding_gradients(batch);
    embedding_->backward(dstream_, batch.tokens, batch.positions, batch.batch_size);
    table_.gradients_ready();
  }

  // In a pipeline the first stage computes the embedding's part of the gradients of wte, and the last stage the head's
  // part. Each starts from zeros; update() adds the two.
  void clear_embedding_gradients(const Batch& batch) {
    if (!is_pipeline() || !batch.first || !store_.trains()) return;
    CUDA_CHECK(cudaMemsetAsync(store_.gradients(0).data, 0, list_.units()[0].count * sizeof(float), stream_));
  }

  void weight_pass(const Batch& batch) {
    on_.products->begin({});
    on_.trained->begin_micro_step(batch.first, batch.last);
    const Layers& chunk = chunk_of(batch);
    for (int i = chunk.count - 1; i >= 0; --i) {
      const TraceScope scope(chunk.first + i);
      block_.unit.use(chunk.first + i + 1);
      later_->compute(batch.action.slot, i);
      on_.trained->gradients_ready(block_.unit.number());
    }
  }

  // This rank has no micro-batch while others have one: it takes part in the collectives of the pass's units, in the same
  // order, and adds zeros to their gradients.
  void meet(const Batch& batch) {
    const Layers& chunk = chunk_of(batch);
    const bool is_forward = batch.action.work == Work::forward;
    if (batch.training) store_.begin_micro_step(batch.first, batch.last);
    if (!is_forward) {
      table_.begin(0, list_.final_norm_unit() - 1);
      final_.begin(list_.final_norm_unit());
      final_.gradients_ready();
    } else {
      table_.begin(0, 1);
    }
    for (int i = 0; i < chunk.count; ++i) {
      const int unit = is_forward ? i + 1 : chunk.count - i, next = is_forward ? unit + 1 : unit - 1;
      const TraceScope scope(unit - 1);
      block_.unit.begin(unit, 0 < next && next <= chunk.count ? next : block_after(batch.action));
      if (is_forward) continue;
      CUDA_CHECK(cudaMemsetAsync(store_.gradients(unit).data, 0, store_.shards().whole(unit) * sizeof(float), stream_));
      block_.unit.gradients_ready();
    }
    if (is_forward) final_.begin(list_.final_norm_unit());
    else table_.gradients_ready();
  }

  // ---- memory, for the largest micro-batch

  int logit_rows() const { return ceil_div(on_.R, options_.logit_chunks); }

  // Where activations are recomputed, one set of buffers serves all blocks of all micro-batches. A slot is as large as
  // this rank's largest chunk.
  void lay_out_activations(Arena& arena) {
    activations_.resize(size_t(options_.slots));
    for (Activations& slot : activations_) {
      slot.blocks.resize(size_t(list_.most_layers()));
      for (auto& a : slot.blocks) {
        const auto& first = activations_[0].blocks[0];
        if (inputs_->takes_turns() && &a != &first) a = first;  // which has all but the inputs
        else lay_out(arena, a, first, options_.recompute, on_, attention_);
      }
      if (!list_.is_last_stage()) continue;
      for (Float** rows : {&slot.final_input, &slot.final_norm}) *rows = on_.take_rows(arena);
      slot.final_stats = on_.take_norm_stats(arena);
    }
    inputs_->lay_out(arena, activations_[0].blocks[0].input, on_.elements());
    if (list_.is_last_stage()) head_->lay_out_logits(arena, logit_rows());
  }

  void lay_out_workspace(Arena& arena) {
    narrow_ = on_.take_rows(arena);  // of a branch forward, of gradients backward
    dstream_ = on_.take_rows(arena);
    lay_out(arena, gradients_, narrow_, on_, options_.splits_backward);
    if (is_pipeline() || list_.tp() > 1) logit_row_ = arena.take<Float>(size_t(list_.tp()) * list_.vocabulary_rows());
    on_.reductions = arena.take<float>(std::max({layernorm_workspace(on_.r, on_.C()),
                                                 linear_workspace(on_.R, std::max(4 * on_.c(), on_.C())),
                                                 embedding_workspace(on_.R, on_.C())}));
    sums_.lay_out(arena);
    gemm_workspace_ = arena.take<char>(options_.elsewhere ? options_.elsewhere->gemm : gemm_workspace_bytes);
    attention_.lay_out_workspace(arena);
  }

  ParameterStore<Float> store_;
  UnitInUse<Float> table_, final_;  // the units of the embedding, and of the last norm
  PlainProducts<Float> plain_{on_};
  LayerContext<Float> on_;
  AttentionOfRows<Float> own_attention_{stream_};
  Embedding<Float> own_embedding_{on_, table_};
  Head<Float> own_head_{on_, table_};
  BlockInputs<Float> own_inputs_;
  WeightGradients<Float> own_later_;
  // Those that compute: these, or others that rooms have put in their place
  AttentionOfRows<Float>* attention_of_rows_ = &own_attention_;
  AttentionKernels<Float>* attention_kernels_ = nullptr;
  Embedding<Float>* embedding_ = &own_embedding_;
  Head<Float>* head_ = &own_head_;
  BlockInputs<Float>* inputs_ = &own_inputs_;
  WeightGradients<Float>* later_ = &own_later_;
  Links<Float>* links_ = nullptr;
  std::vector<ModelRoom> rooms_;
  Attention<Float> attention_;
  Block<Float> block_;  // takes the place of one layer after the other
  LayerNorm<Float> final_norm_;
  std::vector<Activations> activations_;  // by slot
  typename Block<Float>::Gradients gradients_;
  Float *narrow_, *dstream_;    // (r,C) each
  Float* logit_row_ = nullptr;  // (N·Vs)
  char* gemm_workspace_;
  Batch last_ = {};             // of the last forward pass
  RecordedWorks<Key> forward_graphs_, backward_graphs_;
};
