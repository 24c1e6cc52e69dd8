// The messages of ranks that sum up their numbers: the numbers themselves, or 8 bits of each.
//
// Both kinds of wire have the same calls, so that an algorithm is written once:
//
//   pack(range)                 makes the range's numbers ready to be sent
//   packed(range)               where they lie then; where a rank puts the finished sums that others send
//   arrived(range, sender)      where the partial sums go that come in for the range
//   add(range, senders)         numbers += the sums from `senders` senders, in their order
//   unpack(range)               numbers = the finished sums
//
// A range counts blocks of 256 elements. The arrays have space for whole blocks, so no kernel has to check where the
// numbers end.
#pragma once

#include "dev/ladders/device.cuh"
#include "test/buffer.cuh"

namespace ladder {

constexpr int block_elements = 256;

// Blocks [first, last).
struct Range {
  size_t first, last;

  size_t size() const { return last - first; }
  Range part(size_t i, size_t parts) const { return {first + size() * i / parts, first + size() * (i + 1) / parts}; }
};

constexpr int wire_block = 256;  // threads
inline unsigned wire_grid(size_t threads) { return unsigned(ceil_div(threads, size_t(wire_block))); }

// ---- the numbers themselves

// data (count) += the `senders` rows of arrived (senders, row).
template <class T>
__global__ void add_kernel(T* data, const T* arrived, size_t row, int senders, size_t count) {
  constexpr int N = pack_width<T>;
  const size_t i = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (i >= count) return;
  float sum[N], x[N];
  load(data + i, sum);
  for (int s = 0; s < senders; ++s) {
    load(arrived + s * row + i, x);
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] += x[k];
  }
  store(data + i, sum);
}

template <class T>
class Plain {
 public:
  // data: `count` numbers; `room` blocks may have arrived and not been added yet
  Plain(T* data, size_t count, size_t room, cudaStream_t stream)
      : data_(data), count_(count), arrived_(room * block_elements), stream_(stream) {}

  Range whole() const { return {0, ceil_div(count_, size_t(block_elements))}; }
  size_t bytes(Range range) const { return (end(range.last) - end(range.first)) * sizeof(T); }
  void* packed(Range range) const { return data_ + range.first * block_elements; }
  void* arrived(Range range, int sender = 0) const { return arrived_ + sender * range.size() * block_elements; }
  void pack(Range) {}
  void unpack(Range) {}

  void add(Range range, int senders = 1) {
    const size_t elements = range.size() * block_elements;
    if (elements == 0 || senders == 0) return;
    add_kernel<T><<<wire_grid(elements / pack_width<T>), wire_block, 0, stream_>>>(
        data_ + range.first * block_elements, arrived_.data(), elements, senders, elements);
    CUDA_CHECK(cudaGetLastError());
  }

 private:
  size_t end(size_t block) const { return std::min(block * block_elements, count_); }

  T* data_;
  size_t count_;
  Buffer<T> arrived_;
  cudaStream_t stream_;
};

// ---- 8 bits of each

// A block of numbers x: round(x / scale) with scale = max|x| / 127, so each is off by scale/2 = max|x| / 254 at most.
struct Packet {
  int8_t codes[block_elements];
  float scale;
};
constexpr int code_pack = 4;  // codes that a thread reads or writes at once: packets are aligned to 4 bytes
constexpr int packet_threads = block_elements / code_pack;

// One warp per packet. A number that is not finite makes its whole block NaN, so that it is not taken for a sum.
template <class T>
__global__ void pack_kernel(Packet* packets, const T* data, size_t count) {
  constexpr int parts = block_elements / 32 / code_pack;
  const size_t packet = (size_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (packet >= count) return;
  const int lane = threadIdx.x % 32;
  float x[parts][code_pack], largest = 0;
  for (int part = 0; part < parts; ++part) {
    load(data + packet * block_elements + (part * 32 + lane) * code_pack, x[part]);
    for (float value : x[part]) {
      const float magnitude = isfinite(value) ? fabsf(value) : INFINITY;
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  largest = warp_reduce_max(largest);
  const float codes_per_unit = largest > 1e-36f ? 127 / largest : 0;  // for smaller numbers it would be infinite
  for (int part = 0; part < parts; ++part) {
    Pack<int8_t, code_pack> codes;
    for (int k = 0; k < code_pack; ++k)
      codes.values[k] = isfinite(x[part][k]) ? int8_t(rintf(x[part][k] * codes_per_unit)) : 0;
    *reinterpret_cast<Pack<int8_t, code_pack>*>(packets[packet].codes + (part * 32 + lane) * code_pack) = codes;
  }
  if (lane == 0) packets[packet].scale = largest / 127;
}

// data (count packets' numbers) = the sum of the `senders` rows of packets (senders, row), plus data where `add`.
template <class T>
__global__ void unpack_kernel(T* data, const Packet* packets, size_t row, int senders, size_t count, bool add) {
  const size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const size_t packet = i / packet_threads, first = i % packet_threads * code_pack;
  if (packet >= count) return;
  float sum[code_pack] = {};
  if (add) load(data + i * code_pack, sum);
  for (int s = 0; s < senders; ++s) {
    const Packet& arrived = packets[s * row + packet];
    const auto codes = *reinterpret_cast<const Pack<int8_t, code_pack>*>(arrived.codes + first);
    for (int k = 0; k < code_pack; ++k) sum[k] += arrived.scale * float(codes.values[k]);
  }
  store(data + i * code_pack, sum);
}

template <class T>
class EightBits {
 public:
  EightBits(T* data, size_t count, size_t room, cudaStream_t stream)
      : data_(data), packets_(ceil_div(count, size_t(block_elements))), arrived_(room), stream_(stream) {}

  Range whole() const { return {0, packets_.size()}; }
  size_t bytes(Range range) const { return range.size() * sizeof(Packet); }
  void* packed(Range range) const { return packets_ + range.first; }
  void* arrived(Range range, int sender = 0) const { return arrived_ + sender * range.size(); }

  void pack(Range range) {
    if (range.size() == 0) return;
    pack_kernel<T><<<wire_grid(range.size() * 32), wire_block, 0, stream_>>>(packets_ + range.first, numbers(range),
                                                                              range.size());
    CUDA_CHECK(cudaGetLastError());
  }
  void add(Range range, int senders = 1) { unpack(range, arrived_, senders, true); }
  void unpack(Range range) { unpack(range, packets_ + range.first, 1, false); }

 private:
  T* numbers(Range range) const { return data_ + range.first * block_elements; }

  void unpack(Range range, const Packet* packets, int senders, bool add) {
    if (range.size() == 0 || senders == 0) return;
    unpack_kernel<T><<<wire_grid(range.size() * packet_threads), wire_block, 0, stream_>>>(
        numbers(range), packets, range.size(), senders, range.size(), add);
    CUDA_CHECK(cudaGetLastError());
  }

  T* data_;
  Buffer<Packet> packets_, arrived_;
  cudaStream_t stream_;
};

}  // namespace ladder
