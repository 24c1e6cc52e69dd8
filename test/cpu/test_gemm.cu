// The CPU device's two ways to hand a product to oneDNN, whichever it prefers on this machine: exactly, on integers.
#include <omp.h>

#include <atomic>
#include <stdexcept>

#include "cpu/host_memory.h"
#include "cpu/workers.h"
#include "kernels/matmul.cuh"
#include "test/kernel_test.cuh"
#include "test/skip.h"

namespace {

using bf16 = __nv_bfloat16;
using cpu::Operands;

template <class Out>
std::vector<Out> multiply(Operands operands, const GemmShape& s, bool with_bias, int largest) {
  const Buffer<bf16> a(random_integers<bf16>(size_t(s.m) * s.k, largest)), bias(random_integers<bf16>(s.n, largest, 3));
  const Buffer<bf16> b(random_integers<bf16>(size_t(s.k) * s.n, largest, 2));
  Buffer<Out> d(size_t(s.m) * s.n);
  if (s.accumulate) d = random_integers<Out>(d.size(), largest, 4);
  cpu::gemm_tiles(d.data(), a.data(), b.data(), with_bias ? bias.data() : nullptr, s, operands);
  return d.get();
}

// Products in place are compared with float64 in test_matmul.
template <class Out>
void check(int m, int n, int k) {
  for (int choice = 0; choice < 16; ++choice) {
    const GemmShape s = {m, n, k, bool(choice & 1), bool(choice & 2), bool(choice & 4)};
    const bool with_bias = choice & 8;
    CAPTURE(m);
    CAPTURE(n);
    CAPTURE(k);
    CAPTURE(choice);
    const auto in_place = multiply<Out>(Operands::in_place, s, with_bias, 4);
    CHECK(same_bits(multiply<Out>(Operands::dense, s, with_bias, 4), in_place));
    // Sums of large numbers are rounded. They are added in the same order for any number of threads.
    std::vector<Out> first;
    for (int threads : {1, 2, 5, 16}) {
      omp_set_num_threads(threads);
      const auto d = multiply<Out>(Operands::dense, s, with_bias, 1 << 20);
      if (first.empty()) first = d;
      CHECK(same_bits(d, first));
    }
  }
}

}  // namespace

TEST_CASE("dense tiles give what tiles in place give") {
  if (!cpu::by_blocks(cpu::cut_product<bf16, bf16>({64, 64, 64}, false, Operands::dense)))
    return skip("oneDNN has no block kernels for bf16 on this CPU");
  for (int k : {1, 9, 64, 200}) {
    check<bf16>(1, 51, k);
    check<float>(37, 8, k);
    check<bf16>(513, 401, k);  // several tiles each way, none of whose sides is a multiple of 64
    check<float>(513, 401, k);
  }
}

template <class In, class Out>
void check_cast(const GemmShape& s, bool with_bias) {
  CAPTURE(s.m);
  CAPTURE(s.transpose_a);
  CAPTURE(s.transpose_b);
  CAPTURE(s.accumulate);
  const Buffer<In> a(random_integers<In>(size_t(s.m) * s.k, 4)), b(random_integers<In>(size_t(s.k) * s.n, 4, 2)), bias(random_integers<In>(s.n, 4, 3));
  const std::vector<Out> before = random_integers<Out>(size_t(s.m) * s.n, 4, 4);
  Buffer<Out> d(before);
  cpu::gemm_cast(d.data(), a.data(), b.data(), with_bias ? bias.data() : nullptr, s);
  const std::vector<In> as = a.get(), bs = b.get(), biases = bias.get();
  const std::vector<Out> found = d.get();
  size_t wrong = 0;
  for (int i = 0; i < s.m; ++i)
    for (int j = 0; j < s.n; ++j) {
      double sum = (s.accumulate ? double(to_float(before[size_t(i) * s.n + j])) : 0) + (with_bias ? double(to_float(biases[j])) : 0);
      for (int p = 0; p < s.k; ++p)
        sum += double(to_float(as[s.transpose_a ? size_t(p) * s.m + i : size_t(i) * s.k + p])) *
               double(to_float(bs[s.transpose_b ? size_t(j) * s.k + p : size_t(p) * s.n + j]));
      wrong += to_float(found[size_t(i) * s.n + j]) != to_float(from_float<Out>(float(sum)));
    }
  CHECK(wrong == 0);
}

TEST_CASE("operands that oneDNN can't multiply are cast to float, a tile at a time") {
  for (int choice = 0; choice < 8; ++choice)
    for (const int m : {3, 530}) {  // several tiles
      const GemmShape s = {m, 391, 9, bool(choice & 1), bool(choice & 2), bool(choice & 4)};
      check_cast<__half, __half>(s, choice % 3 == 0);
      check_cast<bf16, float>(s, choice % 3 == 1);
      if (m == 3) check_cast<bf16, float>({m, 21, 9000, s.transpose_a, s.transpose_b, s.accumulate}, true);  // in three parts
    }
  // The logits' matrices, of 25 MB: no float copy of them is made.
  const auto most = [] { return 1024 * number_after("/proc/self/status", "VmHWM:", 0); };
  const GemmShape s = {64, 200'000, 64, false, true};
  const Buffer<__half> a(random_integers<__half>(size_t(s.m) * s.k, 4)), b(random_integers<__half>(size_t(s.k) * s.n, 4, 2)), d(size_t(s.m) * s.n);
  std::memset(static_cast<void*>(d.data()), 0, d.size() * sizeof(__half));
  omp_set_num_threads(2);  // each of which needs memory for a tile
  const size_t before = most();
  cpu::gemm_cast<__half, __half>(d.data(), a.data(), b.data(), nullptr, s);
  CHECK(most() - before < (8 << 20));
}

TEST_CASE("what a part of parallel work throws, the caller gets") {
  for (int threads : {1, 4}) {
    omp_set_num_threads(threads);
    for (int i = 0; i < 100; ++i)
      CHECK_THROWS_WITH(cpu::parallel_for(50, 1, [](size_t number) { if (number % 7 == 3) throw std::runtime_error("no"); }), "no");
    std::atomic<int> done = 0;
    cpu::parallel_for(50, 1, [&](size_t) { ++done; });
    CHECK(done == 50);
    CHECK(omp_get_max_threads() == threads);
  }
}

TEST_CASE("packed columns") {
  const int rows = 35, columns = 70;
  const auto b = random_values<bf16>(rows * columns);
  for (int threads : {1, 3}) {
    omp_set_num_threads(threads);
    const bf16* packed = cpu::pack_in_parallel(b.data(), rows, columns);
    bool right = cpu::packed_size(rows, columns) == 64 * 128;
    for (int row = 0; row < 64; ++row)
      for (int column = 0; column < 128; ++column) {
        const float value = packed[column / 64 * 64 * 64 + row / 2 * 128 + column % 64 * 2 + row % 2];
        right = right && value == (row < rows && column < columns ? float(b[row * columns + column]) : 0.0f);
      }
    CHECK(right);
  }
}
