// The seconds of a rank's kernels and messages: the parts of a forecast. runtime/planner/forecast.md derives each
// formula; FLOPs and bytes are those of the launchers (kernels/counts.h), in the order of gpt.cuh.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>

#include "kernels/counts.h"
#include "runtime/planner/forecast.h"

inline double bytes_of(const std::string& dtype) { return dtype == "fp32" ? 4 : 2; }
inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// ---- communication

// The ring of a group: N ranks, each of which sends to the next one.
struct Ring {
  double ranks = 1, bandwidth = 0, latency = 0;  // bytes/s of a rank, seconds to the next one

  // seconds of an all_gather or reduce_scatter; bytes: of the whole array
  double gather(double bytes) const { return ranks == 1 ? 0 : (ranks - 1) * (latency + bytes / ranks / bandwidth); }
  // seconds of a message to the next rank
  double send(double bytes) const { return ranks == 1 ? 0 : latency + bytes / bandwidth; }
};

// The ring of `size` ranks, of which each stands `stride` after the one before, among `all` ranks in a row. Inside a
// host each device has its own link. Between hosts all groups that cross share the host's links: a ring goes through
// each host once, and enters and leaves it by the links of its members there.
Ring ring_of(const Cluster& c, int stride, int size, int all);
inline Ring ring_of(const Cluster& c, int stride, int size) { return ring_of(c, stride, size, stride * size); }

// ---- computation

// The kinds before tp_total add up to the step. tp_total and cp_total are all communication, hidden and exposed;
// weights is the part of the products that zb delays, the gradients of weights.
enum Kind { products, attention, memory, launches, tp_exposed, cp_exposed, tp_total, cp_total, weights, kinds };

struct Cost {
  std::array<double, kinds> of = {};  // seconds

  double& operator[](Kind kind) { return of[kind]; }
  double operator[](Kind kind) const { return of[kind]; }
  double seconds() const { return std::accumulate(of.begin(), of.begin() + tp_total, 0.0); }
};
inline Cost sum(Cost a, const Cost& b, double times = 1) {
  for (size_t kind = 0; kind < kinds; ++kind) a.of[kind] += times * b.of[kind];
  return a;
}
inline Cost operator+(const Cost& a, const Cost& b) { return sum(a, b); }
inline Cost operator*(const Cost& cost, double times) { return sum({}, cost, times); }
inline Cost& operator+=(Cost& a, const Cost& b) { return a = a + b; }

// The kernels of gpt.cu. dev/published derives classes from this, for programs whose kernels differ.
class Kernels {
 public:
  Kernels(const StepOptions& step, const Cluster& cluster) : step_(step), cluster_(cluster) {}
  virtual ~Kernels() = default;

  // The forward pass of a block on one micro-batch.
  Cost forward() const { return activations() + cast(4 * R_ * c_, 1) + product_then_scatter(R_, C_, 4 * c_) + adapter(4 * c_, C_); }
  Cost backward() const {
    const Cost gelu_backward = kernel(gelu_backward_counts(4 * R_ * c_, w_)), mlp = half_backward(4 * c_, {}, 4 * c_);
    return recomputed() + gelu_backward + mlp + half_backward(3 * c_, attention_backward() + maximum_of_attention(3 * R_ * c_), c_);
  }

  Cost embedding_forward() const { return kernel(embedding_forward_counts(R_ * C_, w_)) + sent(rows_); }
  Cost embedding_backward() const { return kernel(embedding_backward_counts(R_ * C_, w_)) + sent(rows_); }

  // Final norm, logits, loss and their gradients; their forward is done at the start of backward.
  Cost head() const;

  // Norm and AdamW of `elements` elements; each unit has launches of its own.
  Cost update(double count, double units) const {
    const double moment = bytes_of(step_.moments);
    Cost cost = kernel(square_sums_counts(count)) + kernel(adamw_counts(count, w_, moment, !step_.stochastic_rounding));
    cost[launches] = 2 * units * device_.launch;
    return cost;
  }

  // Gradients are encoded, and codes are added up; with ZeRO 0 the sums are encoded once more
  // (extensions/compression/kernels/quantize.cuh).
  Cost compression(double count) const {
    const double code = step_.compressed_bits() / 8.0;
    return code > 0 ? kernel({(12 + 2 * code + (step_.zero == 0 ? code + 4 : 0)) * count, 8 * count}) : Cost();
  }

  // Gradients become factors and are restored; a block has 17 launches (extensions/compression/kernels/low_rank.cuh).
  Cost low_rank(double count) const {
    Cost cost = kernel({28 * count, 6.0 * step_.low_rank() * count});
    cost[launches] = 17 * device_.launch;
    return cost;
  }

  // Gathered codes become weights. (Few become codes: a rank's piece.)
  Cost decoding(double count) const { return kernel({(1 + w_) * count, 2 * count}); }

  // Cast to eight bits: an operand is read, and written `times` times. Where no kernel of ours has written it just
  // before, it is read once more, for its maximum; for attention's output that depends on which kernels compute it.
  Cost cast(double count, double times) const { return step_.fp8 ? kernel({(2 + times) * count, 2 * count}) : Cost(); }
  Cost maximum(double count) const { return step_.fp8 && step_.fp8_scale == "tensor" ? kernel({2 * count, count}) : Cost(); }
  // The transposition of weights that ZeRO 3 gathers as codes.
  Cost transposed(double count) const { return kernel({2 * count, 0}); }
  // Bytes of a block's weight that ZeRO gathers: of a code, where a matrix has one scale (extensions/fp8/fp8_gathering.cuh).
  virtual double gathered_bytes() const {
    return step_.fp8 && step_.fp8_scale == "tensor" && step_.zero == 3 && step_.compress_weights == "none" ? 1 : w_;
  }

  // Do gradients and messages between stages travel while kernels run?
  bool overlaps() const { return overlaps_; }

 protected:
  Cost timed(Kind kind, double seconds) const {
    Cost cost;
    cost[kind] = seconds;
    cost[launches] = device_.launch;
    return cost;
  }
  // sums: extra seconds for sums over rows
  Cost kernel(const BytesAndFlops& counts, double sums = 0) const {
    Cost cost = timed(memory, std::max(counts.flops / elements_, counts.bytes / bandwidth_));
    cost[memory] += sums * sharing_;
    return cost;
  }
  // D (m,n) = A (m,k) · B (k,n). A and B are read while others of their elements are multiplied; D is written (`out`
  // bytes an element) when that is done.
  Cost product(double m, double n, double k, double out) const {
    const auto [read, flops] = product_counts(m, n, k, operand_, 0);
    const double inner = std::max(flops / product_, read / bandwidth_);
    return timed(products, idleness(m, n) * (inner + m * n * out / bandwidth_));
  }
  // The factor by which a product takes longer on the CPU device: its processors compute whole tiles (cpu/gemm.h), and
  // at the end some have none.
  double idleness(double m, double n) const {
    if (processors_ <= 1) return 1;
    const double tiles = std::ceil(m / 512) * std::ceil(n / 384);
    return std::ceil(tiles / processors_) * processors_ / tiles;
  }
  Cost product(double m, double n, double k) const { return product(m, n, k, w_); }
  // The gradients of a weight (inputs, outputs), which are added to the sums of the micro-batches before; and of its
  // bias.
  Cost weight_product(double inputs, double outputs, bool has_bias = true) const {
    if (step_.lora.is_on()) return has_bias ? adapter(inputs, outputs) * 2 : Cost();
    const Cost weight = product(inputs, outputs, R_, gradient_bytes_ * (step_.micro_batches() > 1 ? 2 : 1));
    return has_bias ? weight + kernel({R_ * outputs * w_, R_ * outputs}) : weight;
  }

  // The cost that an adapter adds to a layer's product, and (with inputs and outputs exchanged) to its input gradient.
  // Its own gradients cost twice that, because these products are computed again first. All layers are counted, whichever
  // --lora-targets names.
  Cost adapter(double inputs, double outputs) const {
    return step_.lora.is_on() ? product(R_, step_.lora.rank, inputs) + product(R_, outputs, step_.lora.rank) : Cost();
  }

  // Messages of tensor parallelism, `meanwhile` seconds of which overlap computation.
  Cost sent(double seconds, double meanwhile = 0) const {
    Cost cost;
    cost[tp_total] = seconds;
    cost[tp_exposed] = device_.overlaps ? std::max(0.0, seconds - meanwhile) : seconds;
    return cost;
  }
  // A product in pieces whose rows are gathered before it: one piece travels while another is multiplied.
  Cost gather_then_product(double m, double n, double k) const { return in_pieces(m, n, k, true, 0); }
  // The same with sums that are scattered after it; `meanwhile` is computed while the last ones travel. Persistent
  // kernels that leave too few multiprocessors hold them up until they end.
  Cost product_then_scatter(double m, double n, double k, double meanwhile = 0) const {
    const int needed = SmOptions::taken(step_.sms.of_layers());  // NCCL begins when it has them all
    const bool hides = device_.persistent_sms == 0 || step_.sms.margin_in_pass(step_.mesh, false) >= needed;
    return in_pieces(m, n, k, hides, meanwhile);
  }
  // The factor by which persistent kernels take longer on the multiprocessors that the margin leaves them, averaged
  // over a step's passes. With ZeRO 0 and 1 weights and gradients travel in one micro-batch of a step.
  double slowdown() const {
    if (device_.persistent_sms == 0) return 1;
    const auto in_pass = [&](bool sends_data) {
      const double all = device_.persistent_sms;  // (kernels keep half of them at least: kernels/device/multiprocessors.h)
      return all / std::max(all - step_.sms.margin_in_pass(step_.mesh, sends_data), all / 2);
    };
    const double sending = step_.zero >= 2 ? 1 : 1.0 / step_.micro_batches();
    return sending * in_pass(true) + (1 - sending) * in_pass(false);
  }

  Cost gelu_forward() const { return kernel(gelu_forward_counts(4 * R_ * c_, w_)); }
  Cost layernorm_forward() const { return kernel(layernorm_forward_counts(r_ * C_, w_, norm_passes_), r_ * device_.norm_row); }
  Cost layernorm_backward() const { return kernel(layernorm_backward_counts(r_ * C_, w_, norm_passes_), r_ * device_.norm_row); }

  // A block's forward without its last product, which recomputation leaves out.
  Cost activations() const {
    return cast(R_ * C_, 1) * 2 + gathered_maximum() * 2 + cast(R_ * c_, 1) + maximum_of_attention(R_ * c_) + layernorm_forward() * 2 +
           gather_then_product(R_, 3 * c_, C_) + attention_forward() + product_then_scatter(R_, C_, c_) +
           gather_then_product(R_, 4 * c_, C_) + gelu_forward() +
           adapter(C_, 3 * c_) + adapter(c_, C_) + adapter(C_, 4 * c_);
  }
  Cost maximum_of_attention(double count) const {
    const bool by_library = step_.mesh.cp == 1 && (step_.attention == "auto" || step_.attention == "cudnn");
    return by_library ? maximum(count) : Cost();
  }
  Cost gathered_maximum() const { return N_ > 1 ? maximum(R_ * C_) : Cost(); }
  virtual Cost recomputed() const {
    return step_.recompute == "block" ? activations() : step_.recompute == "gelu" ? gelu_forward() : Cost();
  }
  // The backward of half a block: LayerNorm, a product with `wide` columns, `between`, a product of `inner` columns.
  virtual Cost half_backward(double wide, const Cost& between, double inner) const;

  // Causal: half of the pairs are computed. Forward has two products, backward five.
  virtual Cost attention_forward() const { return fused_attention(2, rates_.forward, 4, w_); }
  virtual Cost attention_backward() const { return fused_attention(5, rates_.backward, 8, w_ + 4); }

  const StepOptions& step_;
  const Cluster& cluster_;
  const Device& device_ = cluster_.device;
  double sharing_ = cluster_.ranks_per_device;
  double processors_ = device_.processors / sharing_;
  bool is_fp32_ = step_.dtype == "fp32";
  double slowdown_ = slowdown();
  double product_ = device_.peak(is_fp32_) / sharing_ * device_.product_share / slowdown_ * (step_.fp8 ? device_.fp8 : 1);
  double operand_ = step_.fp8 ? 1 : bytes_of(step_.dtype);  // bytes of an element of a product's operands
  double elements_ = device_.fp32 * device_.elements / sharing_;
  double bandwidth_ = device_.bandwidth * device_.bandwidth_share / sharing_;
  const AttentionRates& rates_ = device_.attention(step_.attention, is_fp32_);
  double w_ = bytes_of(step_.dtype), N_ = step_.mesh.tp, C_ = step_.shape.channels, c_ = C_ / N_, T_ = step_.seq_len;
  double R_ = double(step_.micro_batch) * T_ / step_.mesh.cp, r_ = R_ / N_;  // rows; where they are split over tp
  double Vs_ = round_up((step_.shape.vocabulary + step_.mesh.tp - 1) / step_.mesh.tp, 128);
  double loss_row_ = device_.loss_row * std::clamp(Vs_ * w_ / 2048, 1.0, 8.0);
  double pieces_ = step_.tp_pieces;
  Ring tp_ = ring_of(cluster_, 1, step_.mesh.tp), cp_ = ring_of(cluster_, step_.mesh.tp, step_.mesh.cp);
  double rows_ = tp_.gather(R_ * C_ * w_);  // seconds to gather or scatter (R,C)
  double gradient_bytes_ = 4;               // of an element of a weight's gradient
  double norm_passes_ = 4;                  // tensors (r,C) that a LayerNorm reads and writes
  bool gathers_for_head_ = true, overlaps_ = device_.overlaps;

 private:
  Cost in_pieces(double m, double n, double k, bool hides, double meanwhile) const;
  // Reads and writes a number of tensors (R,c). Context parallelism: keys and values (`bytes` per element) travel
  // during the attention to the previous ones, and the last gradients travel back without overlap. In Ulysses four
  // tensors travel before and after.
  Cost fused_attention(double products, const AttentionRates::Table& rates, double tensors, double bytes) const;
};

// The forecast of runtime/planner/forecast.h with these kernels; inner: the kernels of blocks in eight bits, if --fp8
// is given.
Forecast forecast(const StepOptions& step, const Cluster& cluster, const Kernels& kernels, const Kernels& inner);
inline Forecast forecast(const StepOptions& step, const Cluster& cluster, const Kernels& kernels) {
  return forecast(step, cluster, kernels, kernels);
}
