// Warp-level and architecture-specific instructions, each wrapped once by name. Only this file and the one of Hopper's
// instructions, extensions/hopper/kernels/hopper.cuh, ask which device they are compiled for. Each wrapper has a body for the CPU
// in cpu/instructions.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

// Tensor cores (PTX ISA, "Warp-level matrix instructions"; compute capability 8.0 and later). All 32 lanes call them
// together. Matrices have 16-bit elements of type T, two per register, the one of lower index in the lower half.
//
//   load_matrices             loads four 8×8 matrices from shared memory: lane 8i + r gives the address of row r (16
//                             bytes) of matrix i; register i of lane l gets row l/4, columns 2(l%4) and the next, of
//                             matrix i
//   load_matrices_transposed  loads the transposes of four matrices in the same way
//   multiply_m16n8k16         sum (16×8, float) += a (16×16) · b (16×8); lane l holds
//                               a[r]    row l/4 + 8(r%2), columns 2(l%4) + 8(r/2) and the next
//                               b[r]    rows 2(l%4) + 8r and the next, column l/4
//                               sum[i]  row l/4 + 8(i/2), column 2(l%4) + i%2

constexpr float log2_e = 1.4426950408889634f;

#if defined(__CUDACC__)

// Is it the host's processor that computes? (There are GPUs, too, that use the host's memory.)
constexpr bool is_cpu_device = false;

// May a kernel's first launch, or a library's first product, take time and wait for the device? (Even a program that
// loads all its kernels at the start has libraries that load theirs later.)
inline bool loads_kernels_late() { return true; }

constexpr int pack_bytes = 16;  // the widest load or store of a thread
constexpr bool has_tensor_cores = true;
constexpr int long_row_block = 512;  // threads that share a row of thousands of elements
constexpr int packs_at_once = 4;      // packs that a thread loads before it uses the first, where it loads many
constexpr int row_lanes = 32;         // threads that share a row of few packs: a warp
constexpr int kept_packs = 8;         // most packs of a row that a thread keeps in registers, if a warp has the row
constexpr int column_sum_parts = 64;  // threads that share the sum of a column
constexpr int sum_block = 256;        // threads of a block that adds up an array
constexpr int kept_row_block = 512;   // most threads that share a row which they keep in registers, one pack each

// The type of the words that a pack is loaded in (kernels/device/common.cuh).
template <class T, int N>
using PackWord = std::conditional_t<sizeof(T) * N % sizeof(uint32_t) == 0, uint32_t,
                                    std::conditional_t<sizeof(T) * N % sizeof(uint16_t) == 0, uint16_t, uint8_t>>;

// Two bf16 of a word are split by a shift and a mask. (As elements of an array they cost one instruction more.)
template <class T, int N>
constexpr bool splits_words = std::is_same_v<T, __nv_bfloat16> && N % 2 == 0;
__device__ inline void split_word(uint32_t word, float& lower, float& upper) {
  lower = __uint_as_float(word << 16);
  upper = __uint_as_float(word & 0xffff0000u);
}

// The larger one; if x is NaN, y.
__device__ inline float larger(float x, float y) { return fmaxf(x, y); }

// The largest element, NaN aside.
template <int N>
__device__ inline float largest(const float (&x)[N]) {
  float found = -INFINITY;
#pragma unroll
  for (int k = 0; k < N; ++k) found = larger(x[k], found);
  return found;
}

// A butterfly over the 32 lanes; every lane gets the result.
__device__ inline float warp_reduce_sum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

__device__ inline float warp_reduce_max(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    float other = __shfl_xor_sync(0xffffffffu, value, offset);
    value = larger(other, value);
  }
  return value;
}

// Sums each value over the 32 lanes.
template <int count>
__device__ inline void warp_reduce_sums(float (&values)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) values[i] = warp_reduce_sum(values[i]);
}

// x[k] = eˣ for every k.
template <int N>
__device__ inline void exp_pack(float (&x)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = expf(x[k]);
}

// 2ˣ, with an error of at most 2 units in the last place; results below 2⁻¹²⁶ are 0.
__device__ inline float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// x[k] = 2ˣ for every k, as exp2_approximate has it.
template <int N>
__device__ inline void exp2_pack(float (&x)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = exp2_approximate(x[k]);
}

// 1/x, with an error of at most one unit in the last place; results below 2⁻¹²⁶ are 0.
__device__ inline float reciprocal_approximate(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// x[k] = 1 / (1 + e⁻ˣ) for every k. If T has 16 bits, this takes four instructions per element; an IEEE division alone
// would take twice as many.
template <class T, int N>
__device__ inline void sigmoid_pack(float (&x)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k)
    if constexpr (sizeof(T) == 2) x[k] = reciprocal_approximate(1.0f + exp2_approximate(-log2_e * x[k]));
    else x[k] = 1.0f / (1.0f + expf(-x[k]));
}

// Raises *maximum to the largest `found` of the lanes that call this together, by one of them. If a cached copy of
// *maximum is as large already, nothing is sent to memory: a stale copy can only be too low.
__device__ inline void raise_maximum(uint32_t* maximum, uint32_t found) {
  const unsigned lanes = __activemask();
  found = __reduce_max_sync(lanes, found);
  if (int(threadIdx.x % 32) == __ffs(int(lanes)) - 1 && found > __ldca(maximum)) atomicMax(maximum, found);
}

// x in eight bits, the first of four in the lowest byte of a word: rounded to nearest even; numbers out of range become
// the largest one, and NaN stays NaN. Cards before 8.9 have no instruction for it.
template <__nv_fp8_interpretation_t format, int N>
__device__ inline void encode_fp8(const float (&x)[N], uint32_t (&words)[N / 4]) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const float *const y = x + 4 * i;
    const uint32_t lower = __nv_cvt_float2_to_fp8x2(make_float2(y[0], y[1]), __NV_SATFINITE, format);
    words[i] = lower | uint32_t(__nv_cvt_float2_to_fp8x2(make_float2(y[2], y[3]), __NV_SATFINITE, format)) << 16;
  }
}

using SharedAddress = uint32_t;
__device__ inline SharedAddress shared_address(const void* shared) {
  return SharedAddress(__cvta_generic_to_shared(shared));
}

// Starts a copy of 4 or 16 bytes; if `inside` is false, it writes zeros instead. The copy is complete when this thread
// has waited for its copies. Other threads see it after the next barrier.
template <int bytes>
__device__ inline void copy_async(void* shared, const void* global, bool inside) {
  const int from_global = inside ? bytes : 0;
  if constexpr (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(shared_address(shared)), "l"(global), "r"(from_global) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :: "r"(shared_address(shared)), "l"(global), "r"(from_global) : "memory");
}

__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Ends a group: all copies that this thread has started since its last commit; it may be empty. Groups complete in
// order, so a thread can wait for all groups except the last few.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int groups>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(groups) : "memory");
}

__device__ inline void load_matrices(uint32_t (&registers)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row) : "memory");
}

__device__ inline void load_matrices_transposed(uint32_t (&registers)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row) : "memory");
}

template <class T>
__device__ inline void multiply_m16n8k16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#else
#include "cpu/instructions.h"
#endif
