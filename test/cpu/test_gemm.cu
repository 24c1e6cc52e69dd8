// The CPU device's two ways to hand a product to oneDNN, whichever it prefers on this machine: exactly, on integers.
#include <omp.h>

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
