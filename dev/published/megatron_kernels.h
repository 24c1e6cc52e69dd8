// Megatron-LM before FlashAttention, for the tables of its papers: 2021 (arXiv:2104.04473, 2201.11990) and 2022 (2205.05198).
// No forecast of gpt.cu uses it. runtime/planner/forecast.md explains each difference.
#pragma once

#include "runtime/planner/kernels.h"

class MegatronKernels : public Kernels {
 public:
  // year: 2021 or 2022
  MegatronKernels(const StepOptions& step, const Cluster& cluster, int year) : Kernels(step, cluster), waits_(year == 2021) {
    if (has_whole_rows()) r_ = R_, gathers_for_head_ = false;
    norm_passes_ = 6;  // bias, dropout and the sum had a kernel of their own
    gradient_bytes_ = w_;
    pieces_ = 1;
    overlaps_ = false;
  }

 private:
  // Rows between products are not split over tp: each rank has all of them.
  bool has_whole_rows() const { return waits_ || step_.recompute == "block"; }

  Cost recomputed() const override {
    if (step_.recompute == "block") return forward();
    return step_.recompute == "attention" ? attention_forward() : Cost();
  }

  // Where each rank has whole rows, the last product gathers none, and the first one's sums are twice as many.
  Cost half_backward(double wide, const Cost& between, double inner) const override {
    const Cost first = weight_product(C_, wide), last = weight_product(inner, C_);
    const double meanwhile = waits_ ? 0 : first.seconds();
    Cost cost = last + between + product_then_scatter(R_, C_, wide, meanwhile) + first + layernorm_backward();
    if (has_whole_rows()) cost += product(R_, inner, C_) + sent(rows_, std::max(0.0, meanwhile - rows_));
    else cost += gather_then_product(R_, inner, C_) + sent(rows_, last.seconds() + between.seconds());
    cost[weights] = first[products] + last[products];
    return cost;
  }

  Cost attention_forward() const override { return scores(4, 6); }
  Cost attention_backward() const override { return scores(8, 9); }
  // Whole products of queries and keys. Their scores (B,NH,T,T) are written and read `passes` times, and the mask of
  // their dropout once, a byte for each score.
  Cost scores(double flops, double passes) const {
    const double bytes = R_ * T_ * step_.shape.heads / N_ * (passes * w_ + 1);
    return timed(attention, flops * R_ * T_ * c_ / product_ + bytes / bandwidth_);
  }

  bool waits_;
};
