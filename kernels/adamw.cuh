// AdamW (Loshchilov, Hutter, arXiv:1711.05101), as PyTorch defines it. With g the clipped gradient, t counting from 1:
//   m = β1·m + (1−β1)·g;   v = β2·v + (1−β2)·g²
//   w = w·(1 − lr·weight_decay) − lr · (m / (1−β1^t)) / (√(v / (1−β2^t)) + ε)
//
// If *factor is negative (GradientSummary::left_out), the update is not applied: everything stays as it is, t included.
// So t is counted on the device, and the host need not know yet whether earlier steps were applied.
//
// Elementwise, one pack of floats per thread. The weights that are updated are float: the fp32 model itself, or the
// master copy of a 16-bit model, whose working weights are rounded from it. Without a master copy the 16-bit weights
// themselves are updated, by stochastic rounding: to the neighbour above or below, with a probability that depends on
// the distance, so that updates smaller than half a unit in the last place are kept on average (Gupta et al.,
// arXiv:1502.02551). Moments can be bf16, too (--moments bf16), and are rounded in the same way, for the same reason: with
// β2 = 0.999 the second moment changes by a thousandth in a step, and a unit in the last place of bf16 is 0.4 to 0.8 %.
// Moves 28 bytes per element in fp32 (reads w, g, m, v; writes w, m, v), 30 with a master copy of bf16 or fp16, 24 with
// stochastic rounding; 8 less with bf16 moments. 15 FLOPs per element.
#pragma once

#include "kernels/counts.h"
#include "kernels/device/common.cuh"
#include "kernels/random.cuh"
#include "kernels/update.h"

// The optimizer's counters, in device memory.
struct AdamWState {
  int updates = 0;                         // t: the updates applied so far, the present one included
  float correction1 = 0, correction2 = 0;  // 1 / (1 − β1^t), 1 / (1 − β2^t)
};

// The device's GradientSummary::applied(), for the factor alone.
__device__ inline bool is_applied(const float* factor) { return *factor >= 0; }

[[maybe_unused]] static
__global__ void adamw_count_kernel(AdamWState* state, const float* factor, float beta1, float beta2) {
  if (!is_applied(factor)) return;
  const double t = ++state->updates;
  state->correction1 = float(1 / (1 - pow(double(beta1), t)));
  state->correction2 = float(1 / (1 - pow(double(beta2), t)));
}

// Updates w, m and v of one pack by its gradient g.
template <int N>
__device__ inline void adamw_update(float (&w)[N], float (&m)[N], float (&v)[N], const float (&g)[N], float factor,
                                    bool decays, const AdamW& o, const AdamWState& state) {
  const float decay = decays ? o.learning_rate * o.weight_decay : 0.0f;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const float gradient = g[k] * factor;
    m[k] = o.beta1 * m[k] + (1 - o.beta1) * gradient;
    v[k] = o.beta2 * v[k] + (1 - o.beta2) * gradient * gradient;
    const float denominator = sqrtf(v[k] * state.correction2) + o.epsilon;
    w[k] -= decay * w[k] + o.learning_rate * (m[k] * state.correction1) / denominator;
  }
}

// The first `decayed` of `count` elements have weight decay. Both numbers are multiples of the pack (units are padded).
template <class Float>
__global__ void adamw_kernel(Float* weights, float* masters, float* first, float* second, const float* gradients,
                             const float* factor, const AdamWState* state, size_t count, size_t decayed,
                             AdamW options) {
  constexpr int N = pack_width<float>;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count || !is_applied(factor)) return;
  float w[N], m[N], v[N], g[N];
  load(masters + i, w);
  load(first + i, m);
  load(second + i, v);
  load(gradients + i, g);
  adamw_update(w, m, v, g, *factor, i < decayed, options, *state);
  store(masters + i, w);
  store(first + i, m);
  store(second + i, v);
  if constexpr (!std::is_same_v<Float, float>) store(weights + i, w);
}

// Rounds x to bf16, up or down: adds 16 random bits to the 16 bits that are dropped, then truncates.
__device__ inline __nv_bfloat16 round_stochastically(float x, uint32_t random16) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return __float2bfloat16_rn(x);  // infinity, NaN
  return __float2bfloat16_rn(__uint_as_float((bits + random16) & 0xffff0000u));
}

// The random bits of a range of one tensor: from element `begin` of the part that this rank holds. An element takes its
// bits by its number in the whole tensor, with its key + t, so every rank that holds it rounds it alike. All tensors
// need different keys.
struct RandomBits {
  uint64_t for_weights, for_moments;  // keys
  size_t begin;
  Part part;
};

template <class Float, class Moment>
__global__ void adamw_stochastic_kernel(Float* weights, float* masters, Moment* first, Moment* second,
                                        const float* gradients, const float* factor, const AdamWState* state,
                                        size_t count, bool decays, AdamW options, RandomBits random) {
  constexpr int N = pack_width<float>;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count || !is_applied(factor)) return;
  float w[N], m[N], v[N], g[N];
  if (masters) load(masters + i, w);
  else load(weights + i, w);
  load(first + i, m);
  load(second + i, v);
  load(gradients + i, g);
  adamw_update(w, m, v, g, *factor, decays, options, *state);
  if constexpr (sizeof(Moment) == 2) {
    ElementBits bits(random.for_moments + uint64_t(state->updates), random.part, random.begin + i);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const uint32_t word = bits.next();
      m[k] = to_float(round_stochastically(m[k], word & 0xffff));
      v[k] = to_float(round_stochastically(v[k], word >> 16));
    }
  }
  store(first + i, m);
  store(second + i, v);
  if (masters) {
    store(masters + i, w);
  } else {
    ElementBits bits(random.for_weights + uint64_t(state->updates), random.part, random.begin + i);
#pragma unroll
    for (int k = 0; k < N; ++k) w[k] = to_float(round_stochastically(w[k], bits.next() >> 16));
  }
  if constexpr (!std::is_same_v<Float, float>) store(weights + i, w);
}

// Begins an update: increments t and computes the corrections, unless *factor says that the update is left out.
inline void adamw_count(AdamWState* state, const float* factor, const AdamW& options, cudaStream_t stream) {
  KernelRange range("adamw_count", stream, {16, 10});
  adamw_count_kernel<<<1, 1, 0, stream>>>(state, factor, options.beta1, options.beta2);
}

// Updates one contiguous range of parameters. All arrays have `count` elements, in device memory; *factor is the clip
// factor. In fp32 only `masters` are written, which usually are `weights`.
template <class Float>
void adamw(Float* weights, float* masters, float* first, float* second, const float* gradients, const float* factor,
           const AdamWState* state, size_t count, size_t decayed, const AdamW& options, cudaStream_t stream) {
  KernelRange range("adamw", stream, adamw_counts(double(count), sizeof(Float)), {{masters, count}, {first, count}, {second, count}});
  if constexpr (!std::is_same_v<Float, float>) range.writes(weights, count);
  adamw_kernel<Float><<<float_pack_blocks(count), pack_block, 0, stream>>>(
      weights, masters, first, second, gradients, factor, state, count, decayed, options);
}

// The same for numbers that are rounded stochastically: bf16 weights without a master copy (masters: null), bf16
// moments, or both. `count` elements of one tensor, a multiple of the pack. Weight decay applies to all of them or to
// none.
template <class Float, class Moment>
void adamw_stochastic(Float* weights, float* masters, Moment* first, Moment* second, const float* gradients,
                      const float* factor, const AdamWState* state, size_t count, bool decays, const AdamW& options,
                      const RandomBits& random, cudaStream_t stream) {
  KernelRange range("adamw_stochastic", stream, adamw_counts(double(count), sizeof(Float), sizeof(Moment), masters));
  if (masters) range.writes(masters, count);
  range.writes(first, count);
  range.writes(second, count);
  if constexpr (!std::is_same_v<Float, float>) range.writes(weights, count);
  adamw_stochastic_kernel<<<float_pack_blocks(count), pack_block, 0, stream>>>(
      weights, masters, first, second, gradients, factor, state, count, decays, options, random);
}
