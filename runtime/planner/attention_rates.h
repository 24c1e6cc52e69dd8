// Rates of causal attention in 16 bits, by implementation, size of a head and length of a sample.
//
// Numbers are TFLOP/s, 2 products forward and 5 backward, half of them masked: published by authors, or measured with our own
// kernels. runtime/planner/forecast.md names the sources, and which of these numbers are derived from others.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

struct AttentionRates {
  // Rates for 512, 1,024, ... 16,384 tokens; first with heads of 64 channels, then of 128.
  using Lengths = std::array<double, 6>;
  using Table = std::array<Lengths, 2>;
  Table forward = {}, backward = {};

  // FLOP/s at any size: linear in the logarithm of the tokens and in the channels, within the table; narrower heads are
  // slower in proportion.
  static double at(const Table& rates, double channels, double tokens) {
    const double place = std::clamp(std::log2(tokens / 512), 0.0, 5.0), wide = std::clamp(channels / 64 - 1, 0.0, 1.0);
    const size_t before = std::min(size_t(place), size_t(4));
    const auto of = [&](const Lengths& row) { return std::lerp(row[before], row[before + 1], place - double(before)); };
    return std::lerp(of(rates[0]), of(rates[1]), wide) * std::min(channels / 64, 1.0);
  }

  AttentionRates operator*(double factor) const {
    AttentionRates scaled = *this;
    for (auto* pass : {&scaled.forward, &scaled.backward})
      for (Lengths& row : *pass)
        for (double& rate : row) rate *= factor;
    return scaled;
  }

  // The same rate for each length and each head of 64 channels or more.
  static constexpr AttentionRates flat(double forward, double backward) {
    AttentionRates all;
    for (Lengths& row : all.forward) row.fill(forward);
    for (Lengths& row : all.backward) row.fill(backward);
    return all;
  }
};

// FlashAttention-2 on an A100: the rates of kernels without Hopper's instructions
inline constexpr AttentionRates flash_on_a100 = {{{{97, 131, 154, 172, 182, 188}, {109, 146, 170, 190, 200, 208}}},
                                                 {{{85, 115, 135, 151, 159, 165}, {96, 128, 150, 167, 176, 182}}}};
// Our own kernels on Hopper: those without Hopper's instructions (own), and those of --attention hopper. Measured in steps on an
// H200 (dev/results/2026-11-26-h200.md) with heads of 64 and 1,024 tokens: 199 and 168 (own), 245 and 221 (hopper); and of 128
// and 2,048 tokens: 477 and 337 (hopper). All else is in the proportions of FlashAttention-2's and FlashAttention-3's
// rates on an H100.
inline constexpr AttentionRates own_on_hopper = {{{{156, 199, 228, 247, 256, 260}, {166, 226, 259, 277, 289, 291}}},
                                                 {{{121, 168, 207, 231, 247, 259}, {144, 194, 237, 266, 279, 303}}}};
inline constexpr AttentionRates hopper_on_hopper = {{{{182, 245, 343, 388, 425, 437}, {267, 387, 477, 530, 551, 564}}},
                                                    {{{145, 221, 307, 361, 395, 407}, {159, 255, 337, 396, 420, 429}}}};
// cuDNN, deterministic, on an H100 and H200
inline constexpr AttentionRates cudnn_on_hopper = {{{{225, 288, 334, 363, 379, 388}, {315, 410, 484, 591, 644, 673}}},
                                                   {{{158, 237, 294, 326, 349, 358}, {170, 256, 326, 417, 476, 510}}}};
// cuDNN on a GB200
inline constexpr AttentionRates cudnn_on_blackwell = {
    {{{510, 652, 757, 865, 926, 985}, {714, 929, 1097, 1408, 1574, 1708}}},
    {{{387, 580, 719, 795, 848, 812}, {416, 626, 797, 1017, 1157, 1157}}}};
