// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2,
// 3", SC 2011), and from it the initial weights. A number depends only on (key, counter), so any rank can produce any
// slice of a tensor, in any order, on any device.
#pragma once

#include <string>

#include "kernels/device/common.cuh"

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

// Each thread computes four elements of the tensor by one call of Philox. Elements [first, end) are written, element
// `first` to out[0].
[[maybe_unused]] static
__global__ void normal_kernel(float* out, size_t first, size_t end, uint64_t key, float standard_deviation) {
  const size_t group = first / 4 + size_t(blockIdx.x) * blockDim.x + threadIdx.x, i = 4 * group;
  if (i >= end) return;
  const uint4 bits = philox(key, group);
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
  for (int k = 0; k < 4; ++k)
    if (i + k >= first && i + k < end) out[i + k - first] = standard_deviation * normal_from_bits(words[k]);
}

// The key of a tensor's random numbers: FNV-1a of its name, mixed with the seed.
inline uint64_t random_key(uint64_t seed, const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325u ^ seed * 0x9e3779b97f4a7c15u;
  for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3u;
  return hash;
}

// out (count) = elements [first, first + count) of a tensor drawn from normal(0, standard_deviation). Element i depends
// only on (key, i), so any rank can make any slice. Writes 4·count bytes.
inline void fill_normal(float* out, size_t first, size_t count, uint64_t key, float standard_deviation,
                        cudaStream_t stream) {
  if (count == 0) return;
  KernelRange range("fill_normal", stream, 4.0 * count, 0);
  range.writes(out, count);
  const size_t threads = 256, groups = (first + count - 1) / 4 - first / 4 + 1;
  normal_kernel<<<unsigned(ceil_div(groups, threads)), threads, 0, stream>>>(out, first, first + count, key,
                                                                            standard_deviation);
  CUDA_CHECK(cudaGetLastError());
}
