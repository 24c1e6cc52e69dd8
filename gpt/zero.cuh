// The parameter store: where weights, gradients and optimizer state live, how ranks share them (ZeRO: Rajbhandari et
// al., arXiv:1910.02054), and the update of the weights by the gradients. The model asks for units and never for
// memory, so its code is the same at every level (shards.h explains unit, whole, piece and buffer):
//
//   ZeRO    weights   gradients   optimizer   sent per step of A micro-steps, in units of (N−1)/N · parameters
//   0       whole     whole       whole       2    all_reduce of the gradients
//   1       whole     whole       piece       2    reduce_scatter of the gradients, all_gather of the weights
//   2       whole     piece       piece       A+1  reduce_scatter after each micro-step, all_gather
//   3       piece     piece       piece       3A   the same, and all_gather of the weights before forward and backward
//
// The model computes with whole units, and each lies in a *buffer*. Where units are kept as pieces, the blocks take
// turns in a ring of two buffers: while one block is computed, the next one is gathered, or the one before is reduced,
// on the communication stream. The next one may be the first block of the next pass, or of the next action of a
// pipeline. The embedding and the final norm have buffers of their own, so they are sent once per step. That makes the
// last column an upper bound (test/ranks/test_zero.cu has the exact counts).
//
//   weights    Float  the model computes with them; Float is the storage type: float, bf16 or half
//   gradients  float  sums over the micro-steps of a step, for any Float
//   masters    float  AdamW updates them; in fp32 they are the weights themselves. None with stochastic rounding
//   states     float  the values that the optimizer keeps per parameter (kernels/update.h): AdamW's moments; bf16 if asked for
// Padding is zero everywhere and stays zero, because its gradient is zero.
// Its events are tested by test_zero, test_delay, test_offload, test_tensor_parallel, test_tp_checkpoint, test_meshes, test_islands.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "gpt/gradient_norm.cuh"
#include "gpt/mesh.cuh"
#include "gpt/parameters.h"
#include "gpt/step_sums.cuh"
#include "gpt/stored_values.cuh"
#include "gpt/unit_buffers.cuh"
#include "kernels/device/memory.cuh"
#include "kernels/random.cuh"
#include "store_rooms.cuh"  // as dev/make/rooms.sh has written it

template <class Float>
class ParameterStore final : public Parameters {
 public:
  static constexpr bool is_float = std::is_same_v<Float, float>;

  // Adds its categories to `memory`, and those of offloaded arrays to `host_memory`. The store can be used when both have been
  // allocated and clear() called. The model runs on `stream`.
  ParameterStore(const TensorList& list, const StoreOptions& options, DeviceMemory& memory, PinnedMemory& host_memory,
                 Mesh& mesh, cudaStream_t stream)
      : list_(list), options_(options), data_group_(mesh.data()), world_(mesh.world()),
        stream_(stream), shards_(list, data_group_.size(), data_group_.rank(), mesh.inside().size()),
        zero_(data_group_.size() > 1 ? options.zero : options.offload.gradients ? 2 : 0), kept_(shards_, zero_ > 0), norm_(shards_, kept_),
        parts_(make_parts(mesh)), gradients_(*parts_.gradients), optimizer_(*parts_.optimizer),
        weight_buffers_(shards_, zero_ == 3), gradient_buffers_(shards_, zero_ >= 2) {
    parts_.between->add_to(memory);
    const std::string kind = options.frozen ? "frozen " : "";
    memory.add(kind + "weights", [this](Arena& arena) {
      if (zero_ == 3) weight_pieces_ = arena.take<Float>(shards_.all_pieces());
      else weight_buffers_.lay_out(weights_ = arena.take<Float>(shards_.all_whole()));
    });
    parts_.gathering->add_to(memory);
    if (options.training) {
      memory.add("gradients", [this](Arena& arena) { lay_out_gradients(arena); });
      memory.add("optimizer", [this](Arena& arena) { optimizer_.lay_out(arena); });
      optimizer_.add_to(host_memory);
      gradients_.add_to(host_memory);
    }
    parts_.reduction->add_to(memory);
    if (zero_ >= 2 || parts_.reduction->has_messages() || parts_.gathering->rounds())
      memory.add(kind + "unit buffers", [this](Arena& arena) { lay_out_buffers(arena); });
    parts_.checkpoint_blocks->add_to(memory);
  }

  const Shards& shards() const override { return shards_; }
  bool trains() const { return options_.training; }
  GradientSummary* summary() override { return summary_; }

  void clear() override {
    clear(weights_, shards_.all_whole());
    clear(weight_pieces_, shards_.all_pieces());
    if (options_.training) {
      optimizer_.clear(stream_);
      parts_.reduction->clear(stream_);
      parts_.between->clear();
      set_progress(0, options_.loss_scale);
    }
    forget_passes();
  }

  void forget_passes() override {
    if (options_.training) gradients_.clear(stream_);
    for (UnitBuffer<float>& buffer : gradient_buffers_) clear(buffer.data, buffer.count);
    weights_changed();
  }

  // ---- the calls of the model; all of their work is ordered with the stream

  // Returns the whole unit's weights, as far as they are there in the storage type (weight_gathering.cuh), and starts to gather
  // the block that is acquired next, if the caller knows it: else `next` is 0.
  const Float* acquire(int unit, int next = 0) {
    UnitBuffer<Float>& buffer = fetch(unit);
    settle(buffer);
    acquired_ = unit;
    if (next > 0) fetch(next);
    return parts_.gathering->use(unit, buffer.data, stream_);
  }

  WeightGathering<Float>& gathering() { return *parts_.gathering; }

  // To be called before each pass of the micro-step. The first micro-step overwrites the gradients, later ones add to
  // them. After the last one they are reduced over the ranks.
  void begin_micro_step(bool first, bool last) {
    first_micro_step_ = first, last_micro_step_ = last;
    gradients_.begin_micro_step();
  }

  Gradient gradients(int unit) override {
    UnitBuffer<float>& buffer = gradient_buffers_.of(unit);
    settle(buffer);
    return {buffer.data, sums_in_buffer(unit) && !first_micro_step_};
  }
  const float* written_gradients() const { return gradients_.written(); }

  // To be called when a unit's gradients of this micro-step are complete. Starts to reduce them, if it is time to.
  void gradients_ready(int unit) {
    if ((data_group_.size() == 1 && zero_ == 0) || !options_.training) return;  // there is nothing to reduce
    if (gradients_.is_behind()) return;                                         // begin_gradient_sums_behind() will
    if (sums_in_buffer(unit) && !last_micro_step_) return;                      // the next micro-step adds to them
    UnitBuffer<float>& buffer = gradient_buffers_.of(unit);
    data_group_.after(stream_);
    reduce(unit, buffer.data, !sums_in_buffer(unit) && !first_micro_step_);
    buffer.moved.record(reduction_stream());
    buffer.moving = true;
  }

  // Will the next pass run without any collective, and without waiting for one? Then its work is the same every time.
  // A pass is not quiet where blocks take turns in buffers (ZeRO 2 and 3), in the last micro-step, which reduces
  // gradients (without --delay), in the first micro-step of ZeRO 1, which gathers the updated weights, and where something
  // is still to be computed from weights.
  bool is_quiet() const {
    if (!parts_.gathering->is_up_to_date() || gradients_.has_add()) return false;
    if (data_group_.size() == 1 || (options_.frozen && zero_ == 0)) return true;
    if (zero_ > 1 || (last_micro_step_ && !gradients_.is_behind())) return false;
    const auto is_there = [](const auto& buffer) { return buffer.count == 0 || (buffer.unit >= 0 && !buffer.moving); };
    return (zero_ == 0 || std::ranges::all_of(weight_buffers_, is_there)) &&
           std::ranges::none_of(gradient_buffers_, &UnitBuffer<float>::moving);
  }

  // May weights or gradients travel during this pass of the step's first or last micro-step, or of another one? Unlike
  // is_quiet() this does not depend on the steps before: a resumed run leaves the same SMs free. With several
  // chunks a pass may overlap with the collectives that the pass before has started in another chunk.
  bool may_send(Work work, bool first, bool last) const {
    if (data_group_.size() == 1) return false;
    if (zero_ >= 2 || list_.chunks().size() > 1 || gradients_.is_behind()) return true;
    return work == Work::forward ? zero_ == 1 && first : last;
  }

  void update(const AdamW& options, float clip, StepSums* sums, const StepLimits& limits) override {
    if (!gradients_.is_behind()) begin_gradient_sums_beside();
    complete_gradient_sums();
    reduce_step_sums_and_norm(sums, clip, gradients_.has_applied() ? limits : StepLimits{-INFINITY});
    parts_.reduction->end_step(summary_, stream_);
    adamw_count(adamw_state_, &summary_->factor, options, stream_);
    parts_.between->before_update([this](int unit) { return masters_of_piece(unit); });
    weights_changed();  // each unit is updated before anybody fetches it
    for (int unit = 0; unit < shards_.units(); ++unit) {
      if (!list_.has(unit)) continue;
      update_unit(unit, options);
      if (zero_ == 0) parts_.gathering->use(unit, kept_weights(unit), stream_);
      // Gathered while others are updated: the embedding, which is the largest unit, the first block, and the norm. If sums
      // follow behind the update, all units are gathered ahead of them, because these sums have more time.
      if (!list_.is_block(unit) || unit == list_.chunks()[0].first + 1 || gradients_.is_behind()) fetch(unit);
    }
    if (gradients_.take_turns()) begin_gradient_sums_behind();
  }

  bool waits() const override { return gradients_.has_waiting(); }
  std::optional<float> settle_waiting() override {
    if (waits()) complete_gradient_sums();
    return gradients_.waiting(stream_);
  }

  void start_outer_step() override { parts_.between->begin([this](int unit) { return masters_of_piece(unit); }); }
  void outer_step(bool is_under_way) override {
    data_group_.wait_for_all(stream_);  // units that update() has begun to gather are gathered again
    for (int unit = 0; unit < shards_.units(); ++unit) {
      if (!list_.has(unit)) continue;
      parts_.between->change_unit(unit, masters_of_piece(unit), is_under_way);
      if (zero_ == 0) gather_masters(unit);
      if constexpr (!is_float) cast(kept_weights(unit), masters(unit), kept_.count(unit), stream_);
    }
    weights_changed();
  }

  // ---- state, from and to the host

  std::vector<Slice> kept_slices() const override {
    std::vector<Slice> all;
    for (int unit = 0; unit < shards_.units(); ++unit)
      for (const Slice& slice : kept_.slices(unit)) all.push_back(slice);
    return all;
  }

  bool has_errors() const override { return parts_.reduction->has_errors(); }
  std::span<const TensorDescriptor> factors() const override { return parts_.reduction->factors(); }

  void initialize() override {
    for (const Slice& slice : kept_slices()) {
      const TensorDescriptor& tensor = *slice.tensor;
      const TraceScope scope(layer_of(tensor.unit));
      if (tensor.initial == Initial::one) fill(slice, State::weight, std::vector<float>(slice.count, 1.0f));
      if (tensor.initial == Initial::one || (tensor.initial == Initial::zero && !options_.random_biases)) continue;
      float* drawn = gradient_buffers_.of(tensor.unit).data + slice.in_unit;
      if constexpr (is_float) drawn = place(kept_weights(tensor.unit), slice);
      fill_random(drawn, slice.first, slice.count, random_key(options_.seed, tensor.name), list_.standard_deviation(tensor),
                  stream_, tensor.part, tensor.initial == Initial::uniform);
      if constexpr (!is_float)  // the rounded-up count reaches into the padding after the tensor, which is zero
        cast(place(kept_weights(tensor.unit), slice), drawn, round_up(slice.count, list_.alignment()), stream_);
      if (optimizer_.has_masters()) with_values(State::weight, slice, [&](auto* masters) {
        CUDA_CHECK(cudaMemcpyAsync(masters, drawn, slice.count * sizeof(float), cudaMemcpyDefault, stream_));
      });
    }
    forget_passes();
  }

  void visit_values(const Visit& visit) override {
    for (const TensorDescriptor& tensor : list_.tensors()) {
      const int unit = tensor.unit;
      const Float* const weights = !list_.has(unit) ? nullptr : zero_ == 3 ? kept_weights(unit) : acquire(unit);
      visit({tensor, State::weight, "weights", weights, sizeof(Float), zero_ == 3});
      parts_.gathering->visit_values(tensor, visit);
      const auto visit_state = [&](State state, const std::string& what) {
        optimizer_.with(state, kept_.offset(unit), [&](auto* values) { visit({tensor, state, what, values, sizeof(*values), zero_ > 0}); });
      };
      if (!options_.training) continue;
      optimizer_.settle();
      if (optimizer_.has_masters()) visit_state(State::weight, "masters");
      for (State state : optimizer_states) visit_state(state, std::string("optimizer state ") + char(state));
    }
  }

  void set_progress(size_t updates, const LossScale& scale, std::optional<float> waiting = {}) override {
    CUDA_CHECK(cudaDeviceSynchronize());  // sums of earlier gradients may be on their way
    gradients_.set_waiting(waiting, stream_);
    const GradientSummary summary = {.scale = scale};
    const AdamWState state = {.updates = int(updates)};
    copy_and_wait(summary_, &summary, 1, cudaMemcpyHostToDevice, stream_);
    copy_and_wait(adamw_state_, &state, 1, cudaMemcpyHostToDevice, stream_);
  }

  void copy_out(const Slice& slice, State state, float* to) const override {
    with_values(state, slice, [&](auto* from) { read_values(to, from, slice.count, stream_); });
  }

  void copy_out(const CheckpointBlock& block, State state, float* to) override {
    const TensorDescriptor& tensor = *block.tensor;
    // This rank's elements of the block. A round of gathered blocks has one for each tensor-parallel rank, all of
    // `count` elements; then these are the elements that this rank has of the round: `count`, too.
    const size_t others_before = block.gathered ? size_t(list_.tp_rank()) * block.count : 0;
    const size_t first = local_before(tensor, block.first - others_before);
    const Slice slice = {&tensor, first, block.count, tensor.offset + first};
    if (!block.gathered) copy_out(slice, state, to);
    else with_values(state, slice, [&](auto* own) { parts_.checkpoint_blocks->gather(block, own, to, stream_); });
  }

  void wait_for_copies() const override { CUDA_CHECK(cudaStreamSynchronize(stream_)); }

  void copy_in(const CheckpointBlock& block, State state, const std::vector<float>& from) override {
    for (const Slice& kept : state_slices(state, *block.tensor, shards_, kept_)) {
      if (kept.tensor != block.tensor) continue;
      const Slice slice = common(block, kept);
      if (slice.count > 0) fill(slice, state, pick(slice, block, from));
    }
  }

 private:
  // -1: embedding, final norm
  int layer_of(int unit) const { return list_.is_block(unit) ? unit - 1 : -1; }

  // Do this unit's gradients add up in its buffer over the micro-steps? The gradients of other units are reduced after
  // each one.
  bool sums_in_buffer(int unit) const { return zero_ < 2 || !list_.is_block(unit); }

  template <class E>
  void settle(UnitBuffer<E>& buffer) {
    if (buffer.moving) data_group_.wait(stream_, buffer.moved);
    buffer.moving = false;
  }

  UnitBuffer<Float>& fetch(int unit) {
    UnitBuffer<Float>& buffer = weight_buffers_.find(unit, acquired_);
    if (buffer.unit == unit) return buffer;
    buffer.unit = unit;
    if (zero_ == 0) return buffer;
    const TraceScope scope(layer_of(unit));  // the layer that is gathered, not the one being computed
    data_group_.after(stream_);
    parts_.gathering->gather(unit, buffer.data, kept_weights(unit), masters(unit));
    buffer.moved.record(data_group_.stream());
    buffer.moving = true;
    return buffer;
  }

  void weights_changed() {
    for (UnitBuffer<Float>& buffer : weight_buffers_) buffer.unit = -1;
    parts_.gathering->forget();
  }

  // ---- gradients

  // Adds up `whole`, this rank's gradients of a unit, over the ranks. The sum goes where this rank keeps gradients, or is
  // added to the values there.
  void reduce(int unit, float* whole, bool add) {
    if (!gradients_.has_add()) return parts_.reduction->reduce(unit, whole, gradients_.of(unit), add, summary_);
    float* const own = whole + shards_.begin(unit);
    if (data_group_.size() > 1) parts_.reduction->reduce(unit, whole, own, false, summary_);
    gradients_.add(unit, own, add, reduction_stream());
  }
  cudaStream_t reduction_stream() const { return data_group_.size() > 1 ? data_group_.stream() : stream_; }

  // The gradients of this step wait for the next one, while they are added up.
  void begin_gradient_sums_behind() {
    gradient_buffers_.lay_out(gradients_.written());
    data_group_.after(stream_);
    for (int unit = 0; unit < shards_.units() && data_group_.size() > 1; ++unit) {
      const TraceScope scope(layer_of(unit));
      float* const whole = gradients_.applied() + shards_.whole_offset(unit);
      if (shards_.whole(unit) > 0) reduce(unit, whole, false);
    }
    begin_gradient_sums_beside();
  }

  // Makes the stream wait for the sums that the update applies, and completes those over other ranks (SumsBeside).
  void complete_gradient_sums() {
    if (!gradients_.begin_completion()) return;
    data_group_.wait_for_all(stream_);
    for (UnitBuffer<float>& buffer : gradient_buffers_) buffer.moving = false;
    for (const auto& sums : parts_.sums_beside) sums->complete([this](int unit) { return gradients_.of(unit); }, stream_);
  }

  void begin_gradient_sums_beside() {
    for (const auto& sums : parts_.sums_beside) sums->begin([this](int unit) { return gradients_.of(unit); }, stream_);
  }

  // Each rank squares the elements that it owns. The sum over all ranks is the same everywhere, and so is the clip
  // factor. The step's other sums (the loss, and what ranks agree on; step_sums.cuh) travel in the same message.
  void reduce_step_sums_and_norm(StepSums* sums, float clip, const StepLimits& limits) {
    for (int unit = 0; unit < shards_.units(); ++unit)
      gradients_.read(unit, stream_, [&](const float* values, size_t first, size_t count) { norm_.add(unit, values, first, count, stream_); });
    double* const total = norm_.total(stream_);
    world_.after(stream_);
    world_.all_reduce({summed(sums), {total, 1}});
    world_.wait_for_all(stream_);
    clip_factor(summary_, total, gradients_.loss(&sums->loss), clip, limits, stream_);
    gradients_.keep_loss(&sums->loss, stream_);
  }

  void update_unit(int unit, const AdamW& options) {
    const TraceScope scope(layer_of(unit));
    gradients_.read(unit, stream_, [&](const float* values, size_t first, size_t count) {
      optimizer_.update(unit, {kept_weights(unit), values, first, count, options, &summary_->factor, adamw_state_, options_.seed}, stream_);
    });
  }

  // ---- state, from and to the host

  // Calls use(values): the address of a slice's values, in the type that they are stored in, on the device or in the host's
  // memory. (Weights without masters are those of the model.)
  template <class Use>
  void with_values(State state, const Slice& slice, Use use) const {
    const int unit = slice.tensor->unit;
    if (state == State::gradient) return use(place(gradients_.of(unit), slice));
    if (float* kept = parts_.reduction->kept(state, slice)) return use(kept);
    if (state == State::weight && !optimizer_.has_masters()) return use(place(kept_weights(unit), slice));
    if (float* kept = parts_.between->kept(state, slice)) return use(kept);
    optimizer_.settle();
    optimizer_.with(state, kept_.offset(unit) + slice.in_unit - kept_.begin(unit), use);
  }

  // Sets the values of a slice, and waits.
  void fill(const Slice& slice, State state, const std::vector<float>& from) {
    CUDA_CHECK(cudaDeviceSynchronize());
    const auto write = [&](auto* to) { write_values(to, from, stream_); };
    with_values(state, slice, write);
    optimizer_.forget();
    if (state != State::weight) return;
    parts_.between->forget();
    weights_changed();
    if (optimizer_.has_masters()) write(place(kept_weights(slice.tensor->unit), slice));
  }

  // ---- the elements that this rank keeps of a unit: the whole unit in ZeRO 0, else its piece

  Float* kept_weights(int unit) const {
    return zero_ == 3 ? weight_pieces_ + kept_.offset(unit) : weights_ + shards_.whole_offset(unit) + kept_.begin(unit);
  }

  // The kept weights in fp32, on the device; null: there are none. Those of this rank's piece lie in the whole unit with
  // ZeRO 0.
  float* masters(int unit) const {
    if (optimizer_.has_masters()) return optimizer_.masters(kept_.offset(unit));
    if constexpr (is_float) return kept_weights(unit);
    else return nullptr;
  }
  float* masters_of_piece(int unit) const { return masters(unit) + (shards_.begin(unit) - kept_.begin(unit)); }
  void gather_masters(int unit) {
    data_group_.after(stream_);
    data_group_.all_gather(masters(unit), masters_of_piece(unit), shards_.piece(unit));
    data_group_.wait_for_all(stream_);
  }

  template <class E>
  E* place(E* own, const Slice& slice) const {
    return own + (slice.in_unit - kept_.begin(slice.tensor->unit));
  }

  StoreParts<Float> make_parts(Mesh& mesh) const {
    StoreParts<Float> parts = {options_, shards_, kept_, zero_, mesh, stream_};
    plug_in_rooms(parts);
    if (!parts.optimizer) parts.optimizer = std::make_unique<OptimizerState<Float>>(shards_, kept_, parts.needs_masters(), options_);
    return parts;
  }

  // ---- memory

  void lay_out_gradients(Arena& arena) {
    gradients_.lay_out(arena);
    if (zero_ < 2) gradient_buffers_.lay_out(gradients_.written());
    norm_.lay_out(arena);
    summary_ = arena.take<GradientSummary>(1);
    adamw_state_ = arena.take<AdamWState>(1);
  }

  void lay_out_buffers(Arena& arena) {
    if (zero_ == 3) weight_buffers_.lay_out(arena, [this](int unit) { return parts_.gathering->elements(unit); });
    if (zero_ >= 2 && options_.training) gradient_buffers_.lay_out(arena, [this](int unit) { return shards_.whole(unit); });
    parts_.reduction->lay_out_messages(arena);
    parts_.gathering->lay_out_messages(arena);
  }

  template <class E>
  void clear(E* array, size_t count) {
    if (array) CUDA_CHECK(cudaMemsetAsync(array, 0, count * sizeof(E), stream_));
  }

  const TensorList& list_;
  StoreOptions options_;
  Communicator &data_group_, &world_;
  cudaStream_t stream_;
  Shards shards_;
  int zero_;  // the level in effect, which may differ from options_.zero
  Kept kept_;
  GradientNorm norm_;
  StoreParts<Float> parts_;
  GradientHome& gradients_;
  OptimizerState<Float>& optimizer_;
  bool first_micro_step_ = true, last_micro_step_ = true;
  int acquired_ = 0;  // the unit that was acquired last
  Float *weights_ = nullptr, *weight_pieces_ = nullptr;
  GradientSummary* summary_ = nullptr;
  AdamWState* adamw_state_ = nullptr;
  UnitBuffers<Float> weight_buffers_;
  UnitBuffers<float> gradient_buffers_;
};
