// The instructions that kernels/device/instructions.cuh wraps, as the CPU device executes them. That file has their
// contracts and includes this one.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr bool is_cpu_device = true;
inline bool loads_kernels_late() { return cpu::switches().loads_late; }

#if defined(CPU_LIKE_A_GPU)  // to count the work of a GPU's threads
constexpr int pack_bytes = 16;
constexpr bool has_tensor_cores = true;
constexpr int row_lanes = 32, long_row_block = 512, packs_at_once = 4, kept_packs = 8, column_sum_parts = 64, sum_block = 256, kept_row_block = 512;
#else
constexpr int pack_bytes = 64;            // a cache line and an AVX-512 register
constexpr bool has_tensor_cores = false;  // they are emulated, for tests only: loops over packs are faster
constexpr int long_row_block = 256;       // with more threads, barriers between fibers cost more time than they save
constexpr int packs_at_once = 1;          // nothing is gained by loads in flight
constexpr int row_lanes = 1;              // a loop, where the lanes of a warp would be 32 fibers that wait for each other
constexpr int kept_packs = 0;             // they are kept in cache
constexpr int column_sum_parts = 2;
constexpr int sum_block = 4;
constexpr int kept_row_block = 0;         // reading a row again costs less than barriers between threads
#endif

template <class T, int N>
using PackWord = T;
template <class T, int N>
constexpr bool splits_words = false;  // conversions of whole packs are vector instructions
inline void split_word(uint32_t, float&, float&) {}

// `omp simd` keeps g++ from unrolling these loops before it can turn them into calls of libmvec's vector functions.
template <int N>
inline void exp_pack(float (&x)[N]) {
#pragma omp simd
  for (int k = 0; k < N; ++k) x[k] = expf(x[k]);
}

template <class T, int N>
inline void sigmoid_pack(float (&x)[N]) {
#pragma omp simd
  for (int k = 0; k < N; ++k) x[k] = 1.0f / (1.0f + expf(-x[k]));
}

// The same tree in one collective: fibers wait once instead of five times, and the result has the same bits.
inline float warp_reduce_sum(float value, cpu::Location where = cpu::Location::current()) {
  return cpu::reduce(0xffffffffu, value, cpu::Reduction::sum, where);
}

inline float warp_reduce_max(float value, cpu::Location where = cpu::Location::current()) {
  return cpu::reduce(0xffffffffu, value, cpu::Reduction::max, where);
}

// One collective for all sums.
template <int count>
inline void warp_reduce_sums(float (&values)[count], cpu::Location where = cpu::Location::current()) {
  struct Lane {
    float values[count];
  } lane;
  std::memcpy(lane.values, values, sizeof lane);
  cpu::counting::record(cpu::counting::Event::shuffle, nullptr, 5 * count);  // the shuffles that a GPU needs
  cpu::warp_instruction(lane, [](Lane (&lanes)[32]) {
    for (int offset = 16; offset > 0; offset /= 2)
      for (int l = 0; l < offset; ++l)
        for (int i = 0; i < count; ++i) lanes[l].values[i] += lanes[l + offset].values[i];
    for (int l = 1; l < 32; ++l) lanes[l] = lanes[0];
  }, where);
  std::memcpy(values, lane.values, sizeof lane);
}

inline float larger(float x, float y) { return x > y ? x : y; }

template <int N>
inline float largest(const float (&x)[N]) {
  float found = -INFINITY;
#pragma omp simd reduction(max : found)
  for (int k = 0; k < N; ++k) found = x[k] > found ? x[k] : found;
  return found;
}

template <__nv_fp8_interpretation_t format, int N>
inline void encode_fp8(const float (&x)[N], uint32_t (&words)[N / 4]) {
  uint8_t codes[N];
#pragma omp simd
  for (int k = 0; k < N; ++k) codes[k] = __nv_cvt_float_to_fp8(x[k], __NV_SATFINITE, format);
  std::memcpy(words, codes, N);
}

inline void raise_maximum(uint32_t* maximum, uint32_t found) {
  if (found > std::atomic_ref(*maximum).load(std::memory_order_relaxed)) atomicMax(maximum, found);
}

// 2ˣ = 2^floor(x) · 2^f by arithmetic alone, so that loops of it become vector instructions (g++ 12 calls exp2f one by
// one). 2^f, 0 <= f < 1, is a polynomial: of all polynomials of degree 6 that begin with 1, the one with the least
// relative error, 2·10⁻⁹. Results below 2⁻¹²⁶ are 0, as on a GPU. Masks instead of branches, as g++ would turn a
// condition into jumps.
inline float exp2_approximate(float x) {
  constexpr float coefficients[] = {2.1612509e-4f, 1.24679517e-3f, 9.67544131e-3f, 5.548528582e-2f, 2.4022930861e-1f,
                                    6.9314706326e-1f, 1};
  const float whole = floorf(x);
  float power = 0;
  for (float coefficient : coefficients) power = power * (x - whole) + coefficient;
  power *= std::bit_cast<float>((uint32_t(int(whole)) + 127) << 23);
  const uint32_t too_small = -uint32_t(x < -126), too_large = -uint32_t(x >= 128);
  return std::bit_cast<float>((std::bit_cast<uint32_t>(power) & ~(too_small | too_large)) | (too_large & 0x7f800000u));
}

template <int N>
inline void exp2_pack(float (&x)[N]) {
#pragma omp simd
  for (int k = 0; k < N; ++k) x[k] = exp2_approximate(x[k]);
}

using SharedAddress = uintptr_t;
inline SharedAddress shared_address(const void* shared) { return reinterpret_cast<SharedAddress>(shared); }

// The bytes arrive as late as possible: when the thread waits. Until then NaN is stored there, so that a kernel that
// reads too early computes NaN. The access counters count this store as the store of the copy.
template <int bytes>
inline void copy_async(void* shared, const void* global, bool inside) {
  struct alignas(bytes) [[gnu::may_alias]] Piece {
    uint32_t words[bytes / 4];
  } nan;
  for (uint32_t& word : nan.words) word = 0xffffffffu;
  *static_cast<Piece*>(shared) = nan;
  if (inside) cpu::counting::record(cpu::counting::Event::load, global, bytes);
  cpu::defer(cpu::Deferred::copies, [shared, from = inside ? global : nullptr] {
    const cpu::counting::Hidden hidden;
    if (from) std::memcpy(shared, from, bytes);
    else std::memset(shared, 0, bytes);
  });
}

inline void commit_copies() { cpu::commit(cpu::Deferred::copies); }

template <int groups>
void wait_for_copies() {
  cpu::finish(cpu::Deferred::copies, groups);
}

inline void wait_for_copies() {
  commit_copies();
  wait_for_copies<0>();
}

// Each lane first reads the row whose address it gives, so that the race detector sees the access. Then the lanes
// exchange the elements.
template <bool transposed>
inline void load_matrices(uint32_t (&registers)[4], SharedAddress row, cpu::Location where) {
  struct alignas(16) [[gnu::may_alias]] Lane {
    uint16_t elements[8];  // the row that the lane reads; later elements 2i and 2i + 1 are register i
  } lane = *reinterpret_cast<const Lane*>(row);
  cpu::warp_instruction(lane, [](Lane (&lanes)[32]) {
    Lane rows[32];
    std::memcpy(rows, lanes, sizeof rows);
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 8; ++i) {
        const int matrix = i / 2, r = l / 4, c = 2 * (l % 4) + i % 2;
        lanes[l].elements[i] = transposed ? rows[8 * matrix + c].elements[r] : rows[8 * matrix + r].elements[c];
      }
  }, where);
  std::memcpy(registers, &lane, sizeof lane);
}

inline void load_matrices(uint32_t (&registers)[4], SharedAddress row, cpu::Location where = cpu::Location::current()) {
  load_matrices<false>(registers, row, where);
}

inline void load_matrices_transposed(uint32_t (&registers)[4], SharedAddress row,
                                     cpu::Location where = cpu::Location::current()) {
  load_matrices<true>(registers, row, where);
}

template <class T>
inline void multiply_m16n8k16(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                              cpu::Location where = cpu::Location::current()) {
  struct Lane {
    float sum[4];
    uint16_t a[8], b[4];
  } lane;
  const uint32_t b_registers[2] = {b0, b1};
  std::memcpy(lane.sum, sum, sizeof lane.sum);
  std::memcpy(lane.a, a, sizeof lane.a);
  std::memcpy(lane.b, b_registers, sizeof lane.b);
  cpu::counting::record(cpu::counting::Event::matrix_instruction, nullptr, 1);
  cpu::warp_instruction(lane, [](Lane (&lanes)[32]) {
    float a[16][16], b[16][8], sum[16][8];
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 8; ++i) {
        const int r = i / 2, pair = 2 * (l % 4) + i % 2;
        a[l / 4 + 8 * (r % 2)][pair + 8 * (r / 2)] = T::from_bits(lanes[l].a[i]);
        if (i < 4) b[pair + 8 * r][l / 4] = T::from_bits(lanes[l].b[i]);
        if (i < 4) sum[l / 4 + 8 * r][pair] = lanes[l].sum[i];
      }
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < 16; ++k)
        for (int column = 0; column < 8; ++column) sum[row][column] += a[row][k] * b[k][column];
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) lanes[l].sum[i] = sum[l / 4 + 8 * (i / 2)][2 * (l % 4) + i % 2];
  }, where);
  std::memcpy(sum, lane.sum, sizeof lane.sum);
}
