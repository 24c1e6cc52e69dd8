// Why ring attention deals tokens out in zigzag (extensions/context_parallel/sequence_split.h): times the attention of each rank of a ring, if ranks
// have an early and a late run of the sequence each (zigzag), and if they have one run each (neighbours):
//
//   make DEVICE=cpu build/cpu/ring_balance && OMP_NUM_THREADS=1 build/cpu/ring_balance [ranks, 4] [tokens, 4096] [turns, 5]
//
// One process does the work of all ranks, step after step. With one run each, rank r computes its own square of queries
// and keys, seen causally, and the r squares of the ranks before it. The fastest turn counts. Messages, and putting
// parts together, are not timed: both ways have them in common.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "dev/random_buffer.cuh"
#include "extensions/context_parallel/kernels/ring.cuh"

namespace {

constexpr int heads = 4, head_size = 64, channels = heads * head_size;

// The work of a rank, step by step.
using Parts = std::vector<RingPart>;

Parts zigzag_parts(int rank, int ranks, const AttentionSizes& own) {
  Parts parts;
  for (int number = 0; number < ranks; ++number) parts.push_back(ring_part({rank, ranks, number}, own));
  return parts;
}

Parts neighbours_parts(int rank, int, const AttentionSizes& own) {
  Parts parts(size_t(rank) + 1, RingPart{0, own});
  for (int number = 1; number <= rank; ++number) parts[size_t(number)].sizes.causal = false;
  return parts;
}

struct Tensors {
  explicit Tensors(int rows) : qkv(size_t(rows) * 3 * channels), dout(size_t(rows) * channels), out(size_t(rows) * channels),
                               dqkv(size_t(rows) * 3 * channels), lse(size_t(rows) * heads), row_dots(size_t(rows) * heads) {}
  RandomBuffer<float> qkv, dout;
  Buffer<float> out, dqkv, lse, row_dots;
};

template <class T>
QkvHeads<T> heads_of(const RingPart& part, T* qkv, const AttentionSizes& own) {
  QkvHeads<T> heads_of_part = packed_qkv(qkv, own.keys, channels);
  heads_of_part.q = rows_from(heads_of_part.q, part.first_query);
  return heads_of_part;
}

template <class T>
Heads<T> rows_of(const RingPart& part, T* tensor, const AttentionSizes& own) {
  return rows_from(packed_heads(tensor, own.queries, channels), part.first_query);
}

void forward(const RingPart& part, const Tensors& t, const AttentionSizes& own) {
  const float* qkv = t.qkv;
  attention_forward(rows_of(part, t.out.data(), own), t.lse, heads_of(part, qkv, own), part.sizes, nullptr);
}

void backward(const RingPart& part, const Tensors& t, const AttentionSizes& own) {
  const float *qkv = t.qkv, *dout = t.dout, *out = t.out;
  attention_backward(heads_of(part, t.dqkv.data(), own), t.row_dots, rows_of(part, dout, own), rows_of(part, out, own),
                     heads_of(part, qkv, own), t.lse, part.sizes, nullptr);
}

double milliseconds(const auto& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  CUDA_CHECK(cudaStreamSynchronize(nullptr));
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

struct Times {
  double forward = 1e30, backward = 1e30;
};

struct Way {
  const char* name;
  Parts (*parts)(int rank, int ranks, const AttentionSizes& own);
  std::vector<Times> times;  // of each rank
};

void print(const char* direction, const Way& way, double Times::*time) {
  double sum = 0, slowest = 0;
  std::printf("%-9s %-11s", direction, way.name);
  for (const Times& rank : way.times) {
    std::printf(" %8.1f", rank.*time);
    sum += rank.*time;
    slowest = std::max(slowest, rank.*time);
  }
  std::printf(" %19.2f\n", slowest * double(way.times.size()) / sum);
}

}  // namespace

int main(int count, char** arguments) {
  const int ranks = count > 1 ? std::atoi(arguments[1]) : 4, tokens = count > 2 ? std::atoi(arguments[2]) : 4096;
  const int turns = count > 3 ? std::atoi(arguments[3]) : 5;
  if (ranks < 1 || tokens < 2 * ranks || turns < 1) {
    std::fprintf(stderr, "ring_balance [ranks, 1 or more] [tokens, 2 or more a rank] [turns, 1 or more]\n");
    return 2;
  }
  const AttentionSizes own = square_attention(1, tokens / (2 * ranks) * 2, heads, head_size);
  const Tensors tensors(own.queries);
  const std::vector<Times> none(static_cast<size_t>(ranks));
  Way ways[] = {{"zigzag", zigzag_parts, none}, {"neighbours", neighbours_parts, none}};
  for (int turn = 0; turn < turns; ++turn)
    for (int rank = 0; rank < ranks; ++rank)
      for (Way& way : ways) {
        const Parts parts = way.parts(rank, ranks, own);
        Times& fastest = way.times[size_t(rank)];
        const auto time = [&](auto compute) {
          return milliseconds([&] { for (const RingPart& part : parts) compute(part, tensors, own); });
        };
        fastest.forward = std::min(fastest.forward, time(forward));
        fastest.backward = std::min(fastest.backward, time(backward));
      }
  std::printf("fp32, %d heads of %d, %d tokens: ms\n%-21s", heads, head_size, tokens, "");
  for (int rank = 0; rank < ranks; ++rank) std::printf("   rank %d", rank);
  std::printf("   slowest over mean\n");
  for (const Way& way : ways) print("forward", way, &Times::forward);
  for (const Way& way : ways) print("backward", way, &Times::backward);
}
