// Times the matrix products of a step of gpt2 on the CPU device in both ways (Operands in cpu/gemm.h), alternately, and
// names oneDNN's kernels:
//
//   make DEVICE=cpu build/cpu/products && OMP_NUM_THREADS=1 build/cpu/products [tokens, 256] [turns, 9]
//
// The seconds are processor time, because other programs change it least. The results are medians.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "kernels/matmul.cuh"
#include "test/buffer.cuh"

namespace {

using cpu::Operands;
constexpr size_t beyond_caches = size_t(128) << 20;

double processor_seconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + values.size() / 2);
  return values[values.size() / 2];
}

struct Sums {
  double in_place = 0, dense = 0, chosen = 0;
};

// Prints a line and adds `count` such products to the sums. The operands are larger than the caches together, as in a
// step.
template <class In, class Out>
void compare(const std::string& name, const GemmShape& s, bool with_bias, int turns, int count, Sums& sums) {
  const size_t bytes = (size_t(s.m) * s.k + size_t(s.k) * s.n) * sizeof(In) + size_t(s.m) * s.n * sizeof(Out);
  const size_t sets = beyond_caches / bytes + 1;
  const Buffer<In> a(random_values<In>(sets * s.m * s.k)), b(random_values<In>(sets * s.k * s.n));
  const Buffer<In> bias(random_values<In>(s.n));
  Buffer<Out> d(sets * s.m * s.n);
  const double flops = 2.0 * s.m * s.n * s.k;
  const int repeats = std::max(1, int(1e10 / flops));
  std::vector<double> seconds[2];
  for (int turn = -1, set = 0; turn < turns; ++turn)  // the first is not counted
    for (Operands operands : {Operands::in_place, Operands::dense}) {
      const double start = processor_seconds();
      for (int i = 0; i < repeats; ++i, set = (set + 1) % int(sets))
        cpu::gemm_tiles<In, Out>(d + size_t(set) * s.m * s.n, a + size_t(set) * s.m * s.k, b + size_t(set) * s.k * s.n,
                                 with_bias ? bias.data() : nullptr, s, operands);
      if (turn >= 0) seconds[operands == Operands::dense].push_back((processor_seconds() - start) / repeats);
    }
  const double in_place = median(seconds[0]), dense = median(seconds[1]);
  const bool takes_dense = cpu::better_dense<In, Out>(s, with_bias);
  const auto kernel = [&](Operands operands) {
    return cpu::cut_product<In, Out>(s, with_bias, operands).products[0][0]->implementation;
  };
  std::printf("%-20s %6d %6d %6d  %9.3f ms %5.0f %-9s  %9.3f ms %5.0f %-25s  %5.2f  %s\n", name.c_str(), s.m, s.n, s.k,
              in_place * 1e3, flops / in_place / 1e9, kernel(Operands::in_place).c_str(), dense * 1e3,
              flops / dense / 1e9, kernel(Operands::dense).c_str(), in_place / dense,
              takes_dense ? "dense" : "in place");
  std::fflush(stdout);
  sums.in_place += count * in_place;
  sums.dense += count * dense;
  sums.chosen += count * (takes_dense ? dense : in_place);
}

}  // namespace

int main(int count, char** arguments) {
  const int tokens = count > 1 ? std::atoi(arguments[1]) : 256, turns = count > 2 ? std::atoi(arguments[2]) : 9;
  using T = __nv_bfloat16;
  constexpr int C = 768, V = 50304, layers = 12;
  std::printf("%-20s %6s %6s %6s  in place: ms, GFLOP/s, kernel; dense: the same; speedup; taken\n", "bf16", "m", "n",
              "k");
  Sums sums;
  struct Linear {
    std::string name;
    int inputs, outputs;
  };
  for (const auto& [name, inputs, outputs] :
       {Linear{"qkv", C, 3 * C}, {"projection", C, C}, {"up", C, 4 * C}, {"down", 4 * C, C}}) {
    const GemmShape input = {.m = tokens, .n = inputs, .k = outputs, .transpose_b = true};
    const GemmShape weight = {.m = inputs, .n = outputs, .k = tokens, .transpose_a = true};
    compare<T, T>(name, {tokens, outputs, inputs}, true, turns, layers, sums);
    compare<T, T>(name + ", input", input, false, turns, layers, sums);
    compare<T, float>(name + ", weight", weight, false, turns, layers, sums);
  }
  compare<T, T>("head", {.m = tokens, .n = V, .k = C, .transpose_b = true}, false, turns, 1, sums);
  compare<T, T>("head, input", {tokens, C, V}, false, turns, 1, sums);
  compare<T, float>("head, weight", {.m = V, .n = C, .k = tokens, .transpose_a = true}, false, turns, 1, sums);
  std::printf("a step: in place %.1f ms, dense %.1f ms, as taken %.1f ms\n", sums.in_place * 1e3, sums.dense * 1e3,
              sums.chosen * 1e3);
}
