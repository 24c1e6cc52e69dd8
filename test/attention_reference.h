// Attention (kernels/attention/attention.cuh has the maths) in float64, with every matrix stored.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "kernels/attention/attention_shape.h"
#include "test/bounds.h"

// `..._terms` bound the effect of roundings on `out` and dqkv. If P, dS, `out` and the result are each rounded once,
// with a relative error of at most u, an element changes by at most u times its terms, which are sums of absolute
// values.
struct AttentionReference {
  std::vector<double> out, lse, dqkv, out_terms, dqkv_terms;
};

// qkv and dqkv (B, T, 3, NH, HS), where T is the number of queries or of keys, whichever is larger: the rows that are
// left over are not read, and zero in dqkv. dout and out (B, queries, NH, HS), lse (B, NH, queries).
inline AttentionReference attention_reference(const std::vector<double>& qkv, const std::vector<double>& dout,
                                              const AttentionSizes& s) {
  const int T = std::max(s.queries, s.keys), H = s.head_size, C = s.heads * H;
  AttentionReference r{std::vector<double>(dout.size()), std::vector<double>(size_t(s.batch) * s.heads * s.queries),
                       std::vector<double>(qkv.size()), std::vector<double>(dout.size()),
                       std::vector<double>(qkv.size())};
  const double scale = 1 / std::sqrt(double(H));
  for (int b = 0; b < s.batch; ++b)
    for (int h = 0; h < s.heads; ++h)
      for (int t = 0; t < s.queries; ++t) {
        const int seen = s.causal ? std::min(s.past + t + 1, s.keys) : s.keys;
        const size_t row = size_t(b) * s.queries + t;
        auto at = [&](int t2, int part) { return (size_t(b) * T + t2) * 3 * C + part * C + h * H; };
        const size_t q = at(t, 0), o = row * C + h * H;
        std::vector<double> p(seen), dp(seen);
        double sum = 0, dot = 0, dot_terms = 0;
        for (int j = 0; j < seen; ++j) {
          for (int d = 0; d < H; ++d) p[j] += scale * qkv[q + d] * qkv[at(j, 1) + d];
          p[j] = std::exp(p[j]);
          sum += p[j];
        }
        r.lse[(size_t(b) * s.heads + h) * s.queries + t] = std::log(sum);
        for (int j = 0; j < seen; ++j) {
          p[j] /= sum;
          for (int d = 0; d < H; ++d) {
            r.out[o + d] += p[j] * qkv[at(j, 2) + d];
            r.out_terms[o + d] += p[j] * std::abs(qkv[at(j, 2) + d]);
            dp[j] += dout[o + d] * qkv[at(j, 2) + d];
            r.dqkv[at(j, 2) + d] += p[j] * dout[o + d];
            r.dqkv_terms[at(j, 2) + d] += p[j] * std::abs(dout[o + d]);
          }
          dot += p[j] * dp[j];
        }
        for (int d = 0; d < H; ++d) {  // backward reads `out` as it was rounded
          r.out_terms[o + d] += std::abs(r.out[o + d]);
          dot_terms += std::abs(dout[o + d]) * r.out_terms[o + d];
        }
        for (int j = 0; j < seen; ++j)
          for (int d = 0; d < H; ++d) {
            const double ds = p[j] * (dp[j] - dot) * scale, terms = std::abs(ds) + p[j] * scale * dot_terms;
            r.dqkv[q + d] += ds * qkv[at(j, 1) + d];
            r.dqkv[at(j, 1) + d] += ds * qkv[q + d];
            r.dqkv_terms[q + d] += terms * std::abs(qkv[at(j, 1) + d]);
            r.dqkv_terms[at(j, 1) + d] += terms * std::abs(qkv[q + d]);
          }
      }
  for (size_t i = 0; i < r.dqkv.size(); ++i) r.dqkv_terms[i] += std::abs(r.dqkv[i]);
  return r;
}

// Largest |actual − expected| in units of what is allowed: `relative` of the element's terms and `absolute`.
inline double worst_excess(const std::vector<double>& actual, const std::vector<double>& expected,
                           const std::vector<double>& terms, double relative, double absolute) {
  if (actual.size() != expected.size()) return INFINITY;
  double worst = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(actual[i] - expected[i]) / (relative * terms[i] + absolute);
    if (!(error <= worst)) worst = std::isnan(error) ? INFINITY : error;
  }
  return worst;
}

inline double attention_sum_error(const AttentionSizes& s) {
  return attention_sum_error(std::max(s.queries, s.keys), s.head_size);
}
