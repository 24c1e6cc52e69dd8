// Gradients and weights as codes of a few bits, for messages between ranks (extensions/compression/compressed_reduction.cuh). A run of 256
// values has one scale s; b is the number of bits of a code, 8 or 4:
//
//   s = max|x| / (2^(b−1) − 1), rounded up to bf16     code = round(x / s), to the nearest, ties to even
//   received: code · s             residual: error = x − code · s, which the next message adds
//
// With 8 significant bits of s and at most 8 of a code, code · s is exact in fp32. So is the error: code · s is 0, or
// within a factor of 2 of x (Sterbenz). The largest negative code, −2^(b−1), stands for a value that is not finite and
// is read as NaN: it leaves the other values of its run as they are, and no error.
//
// A message of `count` values, a multiple of 64, has count·b/8 bytes of codes, in int4 the lower half of a byte first,
// then the bf16 scales, and padding up to 16 bytes.
//   quantize     a warp for each run, 8 values for each thread; reads 8 bytes per value, writes 4 + b/8
//   dequantize   reads b/8 bytes per value of each message, writes 4 (and reads 4 more when adding)
#pragma once

#include <algorithm>

#include "kernels/device/common.cuh"

constexpr int scale_run = 256;          // values with one scale
constexpr int codes_of_thread = scale_run / 32;

// Pieces of an array, each of which is a message: piece k begins at element k·stride.
struct Pieces {
  int number;
  size_t count, stride;  // elements; both are multiples of 64

  Pieces(int number, size_t count, size_t stride) : number(number), count(count), stride(stride) {}
  Pieces(int number, size_t count) : Pieces(number, count, count) {}  // one after the other
  size_t all() const { return size_t(number) * count; }
};

template <int bits>
constexpr int largest_code = (1 << (bits - 1)) - 1;

// The bytes of a message.
inline size_t message_bytes(size_t count, int bits) {
  return round_up(count * bits / 8 + ceil_div(count, size_t(scale_run)) * sizeof(__nv_bfloat16), size_t(16));
}

// The address of value i's scale.
template <class Byte>
__device__ inline auto* scale_in(Byte* message, size_t count, size_t i, int bits) {
  using Scale = std::conditional_t<std::is_const_v<Byte>, const __nv_bfloat16, __nv_bfloat16>;
  return reinterpret_cast<Scale*>(message + count * bits / 8) + i / scale_run;
}

// x is not negative.
__device__ inline float rounded_up_to_bf16(float x) {
  return __uint_as_float((__float_as_uint(x) + 0xffffu) & 0xffff0000u);
}

// The arguments are those of quantize() below. A row of the grid has a message.
template <int bits>
__global__ void __launch_bounds__(pack_block)
quantize_kernel(uint8_t* messages, const float* values, float* errors, Pieces pieces, size_t bytes, const float* unit,
                bool adds) {
  const size_t count = pieces.count;
  constexpr int N = codes_of_thread, largest = largest_code<bits>;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  const size_t at = blockIdx.y * pieces.stride + i, at_error = blockIdx.y * count + i;
  const float error_unit = errors ? *unit : 1.0f;
  float x[N] = {}, error[N] = {};
  if (i < count) load(values + at, x);  // on a GPU two loads
  if (i < count && errors) load(errors + at_error, error);
  float maximum = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (adds) x[k] += error[k] * error_unit;
    maximum = fmaxf(maximum, isfinite(x[k]) ? fabsf(x[k]) : 0.0f);
  }
  const float scale = rounded_up_to_bf16(warp_reduce_max(maximum) / largest);
  if (i >= count) return;
  alignas(N) uint32_t words[bits * N / 32] = {};
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const bool finite = isfinite(x[k]);
    const float rounded = finite && scale > 0 ? fminf(fmaxf(rintf(x[k] / scale), -largest), largest) : 0.0f;
    const int code = finite ? int(rounded) : -largest - 1;
    words[k * bits / 32] |= (uint32_t(code) & (2 * largest + 1)) << (k * bits % 32);
    const float left_out = finite ? (x[k] - rounded * scale) / error_unit : 0.0f;
    error[k] = adds ? left_out : error[k] + left_out;
  }
  uint8_t* const message = messages + blockIdx.y * bytes;
  store_pack(message + i * bits / 8, reinterpret_cast<const PackWords<uint8_t, bits * N / 8>&>(words));
  if (i % scale_run == 0) *scale_in(message, count, i, bits) = from_float<__nv_bfloat16>(scale);
  if (errors) store(errors + at_error, error);
}

// The arguments are those of dequantize() below.
template <int bits, class Out>
__global__ void __launch_bounds__(pack_block)
dequantize_kernel(Out* out, const uint8_t* messages, Pieces pieces, size_t bytes, int terms, bool adds) {
  constexpr int N = codes_of_thread, per_word = 32 / bits;
  const size_t count = pieces.count;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N, at = blockIdx.y * pieces.stride + i;
  if (i >= count) return;
  float sum[N] = {}, before[N] = {};
  if (adds) load(out + at, before);
  const uint8_t* message = messages + size_t(blockIdx.y) * terms * bytes;
#pragma unroll 4
  for (int term = 0; term < terms; ++term, message += bytes) {
    alignas(N) uint32_t words[bits * N / 32];
    reinterpret_cast<PackWords<uint8_t, bits * N / 8>&>(words) = load_pack<bits * N / 8>(message + i * bits / 8);
    const float scale = to_float(*scale_in(message, count, i, bits));
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int code = int(words[k / per_word] << (32 - bits - k % per_word * bits)) >> (32 - bits);
      sum[k] += code < -largest_code<bits> ? NAN : code * scale;
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) sum[k] = adds ? before[k] + sum[k] : sum[k];
  store(out + at, sum);
}

// Calls function(std::integral_constant<int, bits>).
template <class Function>
void with_bits(int bits, Function function) {
  if (bits == 8) function(std::integral_constant<int, 8>{});
  else function(std::integral_constant<int, 4>{});
}

inline dim3 quantize_grid(const Pieces& pieces) {
  return {pack_blocks(ceil_div(pieces.count, size_t(codes_of_thread))), unsigned(pieces.number)};
}

// How the residuals ("errors") of earlier messages are used (null: there are none, and none are kept).
enum class Feedback {
  add,    // they are added to the values, and those of this message take their place
  keep,   // this message's are added to them
};

// messages (number, message_bytes(count, bits)) = these pieces of values as codes. errors (pieces, count): in units of
// *unit, the loss scale, which may change between steps; it is not read if there are no errors.
inline void quantize(uint8_t* messages, const float* values, float* errors, const Pieces& pieces, int bits,
                     const float* unit, Feedback feedback, cudaStream_t stream) {
  KernelRange range("quantize", stream, {(4.0 + (errors ? 8 : 0) + bits / 8.0) * pieces.all(), 6.0 * pieces.all()});
  if (errors) range.writes(errors, pieces.all());
  with_bits(bits, [&](auto b) {
    quantize_kernel<b><<<quantize_grid(pieces), pack_block, 0, stream>>>(
        messages, values, errors, pieces, message_bytes(pieces.count, bits), unit, errors && feedback == Feedback::add);
  });
}

// These pieces of out = the sums of `terms` messages each, in their order: messages (number, terms, ...). add: out += them
template <class Out>
void dequantize(Out* out, const uint8_t* messages, const Pieces& pieces, int terms, int bits, bool add, cudaStream_t stream) {
  const double moved = terms * bits / 8.0 + (add ? 2 : 1) * sizeof(Out);
  const BytesAndFlops counts = {moved * pieces.all(), 2.0 * terms * pieces.all()};
  KernelRange range("dequantize", stream, counts, {{out, pieces.count, add}});
  with_bits(bits, [&](auto b) {
    dequantize_kernel<b, Out><<<quantize_grid(pieces), pack_block, 0, stream>>>(
        out, messages, pieces, message_bytes(pieces.count, bits), terms, add);
  });
}

[[maybe_unused]] static
__global__ void clear_if_left_out_kernel(float* errors, size_t count, const float* factor) {
  if (*factor >= 0) return;
  const size_t threads = size_t(gridDim.x) * blockDim.x;
  for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads) errors[i] = 0;
}

// errors (count) = 0, if *factor says that the step's update is left out (kernels/norm.cuh): its gradients and their
// errors are dropped. Usually nothing is read or written.
inline void clear_if_left_out(float* errors, size_t count, const float* factor, cudaStream_t stream) {
  KernelRange range("clear_if_left_out", stream, {});
  clear_if_left_out_kernel<<<std::min(pack_blocks(count), 1024u), pack_block, 0, stream>>>(errors, count, factor);
}
