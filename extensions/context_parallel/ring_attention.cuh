// Ring attention (Liu, Zaharia, Abbeel, arXiv:2310.01889), on sequences dealt out in zigzag (Llama 3,
// arXiv:2407.21783).
//
// N ranks stand in a ring. Each has T/N rows of every sample: their queries stay with it, their keys and values travel.
// In step i, rank r computes attention of its queries with the keys of rank r − i, while these are already on their way
// to rank r + 1 and the next ones come from rank r − 1. extensions/context_parallel/kernels/ring.cuh explains the computation of a step,
// and how steps add up.
//
//   forward, rank r of 4      step 0          step 1           step 2           step 3
//     computes with keys of   r               r − 1            r − 2            r − 3
//     sends keys of           r       ──►     r − 1    ──►     r − 2    ──►     none
//   backward, in addition
//     has dk, dv of           r (at home)     r − 1            r − 2            r − 3
//     sends dk, dv of                                  r − 1   ──►     r − 2    ──►     r − 3    ──► home
//
// In backward keys travel the same way once more, and from step 1 on their gradients follow them. A rank computes its
// part of them while the sum of the ranks before it arrives, adds it, and sends it on while it computes the next part.
// After N − 1 hops it is at home, where the rank's own part waits. All sums have a fixed order: they never depend on
// timing.
//
// R = B·T/N rows, c channels of this tensor-parallel rank, w bytes of the storage type. Bytes that a rank sends:
//   forward (N−1)·2·R·c·w,   backward (N−1)·2·R·c·(w + 4): gradients travel in fp32
// Memory, for all layers together: 4·R·c·w for keys in two buffers; 4·R·c forward, 40·R·c backward (12 sums, 12 a part,
// 16 in two buffers that travel), in the same place; and log-sum-exps, 4·B·NH·T/N.
// Its events are tested by test_context_parallel.
#pragma once

#include <cstdint>
#include <string>

#include "extensions/context_parallel/context_parallel.cuh"
#include "extensions/context_parallel/kernels/ring.cuh"

template <class Float>
class RingAttention final : public ContextParallel<Float> {
 public:
  using ContextParallel<Float>::ContextParallel;

  void lay_out(Arena& arena, const AttentionSizes& largest, bool training) override {
    const size_t values = size_t(largest.batch) * largest.queries * largest.channels();
    for (Float*& buffer : keys_) buffer = arena.take<Float>(2 * values);
    part_lse_ = arena.take<float>(size_t(largest.batch) * largest.heads * largest.queries);
    sums_ = arena.take<float>((training ? 3 : 1) * values);
    if (!training) return;
    part_ = arena.take<float>(3 * values);
    for (float*& buffer : keys_sums_) buffer = arena.take<float>(2 * values);
  }

  // Of the shapes of all steps
  std::string ask_library(const AttentionSizes& own) override {
    for (int number = 0; number < ranks_.size(); ++number) {
      const RingStep step = step_of(number);
      const std::string problem = plan_attention<Float>(ring_part(step, own).sizes, ring_strides(step, own));
      if (!problem.empty()) return problem;
    }
    return "";
  }

  // out (R,c) and lse (B,NH,T/N) from qkv (R,3c).
  void forward(Float* out, Float*, float* lse, Float* qkv, int, const AttentionSizes& own, const AttentionBody<Float>& body,
               float* maximum) override {
    pack_keys<Float>(keys_[0], qkv, own, stream_);
    for (int number = 0; number < ranks_.size(); ++number) {
      const RingStep step = step_of(number);
      const TraceScope scope(number, !step.is_last());
      pass_keys_on(step, own);
      ring_forward<Float>(step, out, lse, sums_, part_lse_, qkv, keys(step), own, stream_, body, maximum);
    }
  }

  // dqkv (R,3c) from dout (R,c) and the tensors of forward. row_dots: workspace (B,NH,T/N).
  void backward(Float* dqkv, float* row_dots, const Float* dout, const Float* out, const Float*, const Float* qkv, const float* lse,
                const AttentionSizes& own, const AttentionBody<Float>& body, float* maximum) override {
    pack_keys(keys_[0], qkv, own, stream_);
    copy_late_queries(part_lse_, lse, own, stream_);
    for (int number = 0; number < ranks_.size(); ++number) {
      const RingStep step = step_of(number);
      const TraceScope scope(number, true);
      pass_keys_on(step, own);
      float* const gradients = step.is_first() ? sums_ : part_;
      ring_backward(step, gradients, row_dots, dout, out, qkv, keys(step), lse, part_lse_, own, stream_, body);
      if (step.is_first()) continue;
      if (number > 1) ranks_.wait(stream_, last_sums_);
      add_ring_part(step, sums_, keys_sums_[number % 2], part_, own, stream_);
      last_sums_ = pass_on(keys_sums_, number, own);
    }
    ranks_.wait(stream_, last_sums_);
    finish_ring_gradients(dqkv, sums_, keys_sums_[ranks_.size() % 2], own, stream_, maximum);
  }

 private:
  using AttentionOfRows<Float>::stream_;
  using ContextParallel<Float>::ranks_;  // the Communicator of --cp

  RingStep step_of(int number) const { return {ranks_.rank(), ranks_.size(), number}; }
  const Float* keys(const RingStep& step) const { return keys_[step.number % 2]; }

  // Waits for the keys of this step, and sends them on for the next one.
  void pass_keys_on(const RingStep& step, const AttentionSizes& own) {
    if (!step.is_first()) ranks_.wait(stream_, last_keys_);
    if (!step.is_last()) last_keys_ = pass_on(keys_, step.number, own);
  }

  // Sends the keys and values (R,2c) of step `number` to the next rank, and receives the ones of the next step from the
  // previous rank. They overwrite the buffer that the last step used, so this begins when all earlier work of `stream_`
  // is done. Returns the number of the call in its group.
  template <class T>
  uint64_t pass_on(T* const (&buffers)[2], int number, const AttentionSizes& own) {
    const int next = (ranks_.rank() + 1) % ranks_.size(), previous = (ranks_.rank() + ranks_.size() - 1) % ranks_.size();
    const T* from = buffers[number % 2];
    ranks_.after(stream_);
    ranks_.send_receive(from, next, buffers[(number + 1) % 2], previous, size_t(own.batch) * own.keys * 2 * own.channels());
    return ranks_.last();
  }

  uint64_t last_keys_ = 0, last_sums_ = 0;  // numbers of the calls that bring the next keys and sums
  Float* keys_[2] = {};       // (R,2c): step i uses number i mod 2
  float* part_lse_ = nullptr;  // forward: of a step; backward: of the late queries
  float* sums_ = nullptr;      // forward: out (R,c); backward: dq, and dk and dv by this rank's own queries, (R,3c)
  float* part_ = nullptr;      // (R,3c): gradients of a step
  float* keys_sums_[2] = {};   // (R,2c): dk and dv of the keys of step i so far, in number i mod 2
};
