#include "runtime/planner/kernels.h"

Ring ring_of(const Cluster& c, int stride, int size, int all) {
  if (size == 1) return {};
  const int host = c.ranks_per_host();
  const double inside = c.inside.bandwidth / c.ranks_per_device;
  if (all <= host && (c.hosts == 1 || host % all == 0)) return {double(size), inside * c.link_share, c.inside.latency};
  const int members = std::clamp(host / stride, 1, size), rings = host / members;
  double bandwidth = c.between.bandwidth / rings;
  if (members > 1) bandwidth = std::min(bandwidth, inside);
  const double hosts = double(size) / members;
  const double latency = (c.between.latency * hosts + c.inside.latency * (size - hosts)) / size;
  return {double(size), bandwidth * c.link_share, latency};
}

Cost Kernels::head() const {
  Cost cost = layernorm_forward() + sent(gathers_for_head_ ? rows_ : 0);
  cost = cost + product(R_, Vs_, C_) + kernel(cross_entropy_counts(R_ * Vs_, w_), R_ * loss_row_);
  if (N_ > 1) cost += kernel({R_ * Vs_ * w_, 2 * R_ * Vs_}) + sent(tp_.gather(12 * R_ * N_));
  return cost + weight_product(Vs_, C_, false) + product(R_, C_, Vs_) + sent(rows_) + layernorm_backward();
}

Cost Kernels::in_pieces(double m, double n, double k, bool hides, double meanwhile) const {
  Cost cost = product(m, n, k);
  if (N_ == 1) return cost;
  const double rows = pieces_ * tp_.gather(R_ * C_ * w_ / pieces_);  // each piece has the latency of a message
  const double alone = rows / pieces_ + (pieces_ - 1) * std::max(0.0, rows - cost[products]) / pieces_;
  cost[launches] *= pieces_;
  return cost + sent(rows, hides ? rows - alone + meanwhile : 0);
}

Cost Kernels::half_backward(double wide, const Cost& between, double inner) const {
  const Cost first = weight_product(C_, wide), last = weight_product(inner, C_);
  const double regathered = step_.recompute == "block" ? 0 : rows_;  // the output of LayerNorm
  Cost cost = last + between + sent(regathered, last.seconds() + between.seconds());
  cost += cast(R_ * C_, 2) + cast(R_ * wide, 2) + cast(R_ * C_, 1) + cast(R_ * inner, 1) + gathered_maximum() * 2;
  cost += product_then_scatter(R_, C_, wide, first.seconds()) + first + layernorm_backward() +
          gather_then_product(R_, inner, C_) + adapter(wide, C_) + adapter(C_, inner);
  cost[weights] = first[products] + last[products];
  return cost;
}

Cost Kernels::fused_attention(double products, const AttentionRates::Table& rates, double tensors, double bytes) const {
  const double rate = AttentionRates::at(rates, step_.shape.head_size(), T_) / sharing_ / slowdown_;
  const double flops = products * R_ * (T_ + device_.attention_block) * c_;
  Cost cost = timed(attention, std::max(flops / rate, tensors * R_ * c_ * w_ / bandwidth_));
  if (cp_.ranks == 1) return cost;
  if (step_.cp_method == "ulysses") {
    cost[cp_total] = cost[cp_exposed] = cp_.gather(4 * R_ * c_ * w_);
    return cost;
  }
  const double hops = cp_.ranks - 1, hop = cp_.send(2 * R_ * c_ * bytes);
  const double home = bytes > w_ ? cp_.send(2 * R_ * c_ * 4) : 0;
  cost[cp_total] = cost[cp_exposed] = hops * hop;
  const double waits = hops * std::max(0.0, hop - cost[attention] / cp_.ranks) + home;
  if (device_.overlaps) cost[cp_exposed] = std::min(cost[cp_total], waits);
  cost[launches] *= cp_.ranks;
  return cost;
}
