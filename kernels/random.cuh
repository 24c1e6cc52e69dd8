// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011), and from it the initial weights. A number depends only on (key, counter), so any rank can produce any
// part of a tensor, in any order, on any device.
#pragma once

#include <string>

#include "kernels/device/common.cuh"
#include "kernels/device/part.h"

// Four uniform 32-bit numbers for (key, counter).
__device__ inline uint4 philox(uint64_t key, uint64_t counter) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  uint4 c = make_uint4(uint32_t(counter), uint32_t(counter >> 32), 0, 0);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    uint32_t low0 = 0xD2511F53u * c.x, high0 = __umulhi(0xD2511F53u, c.x);
    uint32_t low1 = 0xCD9E8D57u * c.z, high1 = __umulhi(0xCD9E8D57u, c.z);
    c = make_uint4(high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// Standard normal quantile of p = (bits + 0.5) / 2^32, by the rational approximation of Wichura (AS 241, PPND7,
// Applied Statistics 37, 1988; relative error about 1e-7), in double so that every device rounds to the same float.
__device__ inline float normal_from_bits(uint32_t bits) {
  double p = (bits + 0.5) * (1.0 / 4294967296.0), q = p - 0.5;
  if (fabs(q) <= 0.425) {
    double r = 0.180625 - q * q;
    return float(q * (((5.9109374720e1 * r + 1.5929113202e2) * r + 5.0434271938e1) * r + 3.3871327179e0) /
                 (((6.7187563600e1 * r + 7.8757757664e1) * r + 1.7895169469e1) * r + 1.0));
  }
  const double r = sqrt(-log(q < 0 ? p : 1 - p)) - 1.6;  // at most 3.2: 32 bits reach no further into the tail
  const double z = (((1.7023821103e-1 * r + 1.3067284816e0) * r + 2.7568153900e0) * r + 1.4234372777e0) /
                   ((1.2021132975e-1 * r + 7.3700164250e-1) * r + 1.0);
  return float(q < 0 ? -z : z);
}

// The same of a uniform distribution, between -√3 and √3.
__device__ inline float uniform_from_bits(uint32_t bits) {
  return float(((bits + 0.5) * (2.0 / 4294967296.0) - 1) * 1.7320508075688772);
}

// The random bits of a tensor's elements: element i of the whole tensor has word i % 4 of Philox at
// (key, i / 4). next() returns them element by element, from element `local` of a part on. Neighbours share a call of
// Philox and the division that finds their place in the whole.
class ElementBits {
 public:
  __device__ ElementBits(uint64_t key, const Part& part, size_t local)
      : key_(key), width_(part.width), gap_(part.stride - part.width), element_(part.in_whole(local)),
        left_(part.width - local % part.width), group_(element_ / 4), words_(philox(key, group_)) {}

  __device__ uint32_t next() {
    if (element_ / 4 != group_) words_ = philox(key_, group_ = element_ / 4);
    const uint32_t even = element_ & 2 ? words_.z : words_.x, odd = element_ & 2 ? words_.w : words_.y;
    const uint32_t bits = element_ & 1 ? odd : even;
    ++element_;
    if (--left_ == 0) {
      element_ += gap_;
      left_ = width_;
    }
    return bits;
  }

 private:
  uint64_t key_;
  size_t width_, gap_;      // of the part's runs; elements between two of them
  size_t element_, left_;   // the next element of the whole tensor, and how many are left of its run
  size_t group_;            // words_ belong to elements 4·group_ to 4·group_ + 3
  uint4 words_;
};

// Each thread computes four elements. Elements [first, end) of the part are written, element `first` to out[0].
[[maybe_unused]] static
__global__ void random_kernel(float* out, size_t first, size_t end, uint64_t key, float standard_deviation, Part part,
                              bool is_uniform) {
  const size_t i = 4 * (first / 4 + size_t(blockIdx.x) * blockDim.x + threadIdx.x);
  if (i >= end) return;
  ElementBits bits(key, part, i);
  for (int k = 0; k < 4; ++k) {
    const uint32_t word = bits.next();
    if (i + k >= first && i + k < end) out[i + k - first] = standard_deviation * (is_uniform ? uniform_from_bits(word) : normal_from_bits(word));
  }
}

// The key of a tensor's random numbers: FNV-1a of its name, mixed with the seed.
inline uint64_t random_key(uint64_t seed, const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u ^ seed * 0x9e3779b97f4a7c15u;
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3u;
  return hash;
}

// out (count) = elements [first, first + count) of a part of a tensor drawn from normal(0, standard_deviation), or
// from the uniform distribution of that mean and deviation. An element depends only on the key and on its number in the
// whole tensor, so any rank can make any part. Writes 4·count bytes.
inline void fill_random(float* out, size_t first, size_t count, uint64_t key, float standard_deviation,
                        cudaStream_t stream, Part part = {}, bool is_uniform = false) {
  if (count == 0) return;
  KernelRange range(is_uniform ? "fill_uniform" : "fill_normal", stream, {4.0 * count, 0}, {{out, count}});
  const size_t groups = (first + count - 1) / 4 - first / 4 + 1;
  random_kernel<<<pack_blocks(groups), pack_block, 0, stream>>>(out, first, first + count, key, standard_deviation, part, is_uniform);
}
