// Prints as JSON which grids our own kernels are launched with in a training step in bf16: for dev/machine_code.py, which
// reads the kernels' machine code, but does not know their launchers. It runs on the CPU device, where a launch can be
// rehearsed: the launcher computes its grid, and no thread runs, so that tensors need no memory. The build is the one that
// counts accesses, because it has a GPU's packs of 16 bytes and its tensor cores.
//
//   make DEVICE=cpu build/cpu/launches && build/cpu/launches
//
// Of each shape: a list of operations with the bytes and FLOPs of their formulas, the elements that one pass over their
// largest tensor has, how often a step of one micro-batch calls them, and their launches. Matrix products are a library's.
#include <cstdio>
#include <functional>

#include <nlohmann/json.hpp>

#include "kernels/adamw.cuh"
#include "kernels/attention.cuh"
#include "kernels/column_sum.cuh"
#include "kernels/cross_entropy.cuh"
#include "kernels/embedding.cuh"
#include "kernels/gelu.cuh"
#include "kernels/layernorm.cuh"
#include "kernels/norm.cuh"

static_assert(pack_bytes == 16, "the grids of a GPU: built with VARIANT=counts");

namespace {

using Json = nlohmann::ordered_json;
using Float = __nv_bfloat16;

struct Shape {
  const char* name;
  int B, T, L, NH, C, V;
};
constexpr Shape shapes[] = {{"gpt2", 64, 1024, 12, 12, 768, 50257}, {"gpt2-xl", 16, 1024, 48, 25, 1600, 50257}};
constexpr int most_logit_rows = 16384;  // --logit-chunks 0

// Addresses without memory. All begin at a multiple of what any launcher may ask for.
template <class T>
T* nowhere() {
  return reinterpret_cast<T*>(size_t(1) << 40);
}

Json triple(const dim3& d) { return Json{d.x, d.y, d.z}; }

// What `launch` launches.
Json operation(int calls, double elements, const std::function<void()>& launch) {
  Json launches = Json::array();
  cpu::rehearsal = [&](const cpu::Launch& l) {
    launches.push_back({{"kernel", l.kernel}, {"grid", triple(l.grid)}, {"block", triple(l.block)}, {"shared", l.shared_bytes}});
  };
  Profiler::instance().trace = true;
  launch();
  const TracedRange range = Profiler::instance().take_timeline().ranges.back();
  cpu::rehearsal = {};
  return {{"operation", range.name}, {"calls", calls}, {"elements", elements}, {"bytes", range.bytes}, {"flops", range.flops}, {"launches", launches}};
}

Json operations_of(const Shape& s) {
  const auto [name, B, T, L, NH, C, V] = s;
  const int R = B * T, padded = round_up(V, 128), chunks = ceil_div(R, most_logit_rows), logit_rows = ceil_div(R, chunks);
  const size_t block = 12 * size_t(C) * C + 13 * size_t(C), parameters = size_t(padded + T) * C + L * block + 2 * size_t(C);
  const double rows = R, row = C;
  Float* const x = nowhere<Float>();
  float* const f = nowhere<float>();
  int* const i = nowhere<int>();
  const cudaStream_t stream = nullptr;
  Json all = Json::array();
  const auto add = [&](int calls, double elements, const std::function<void()>& launch) {
    all.push_back(operation(calls, elements, launch));
  };
  add(1, rows * row, [&] { embedding_forward(x, i, x, x, {0, V}, neighbours(T), 0, R, C, stream); });
  add(2 * L + 1, rows * row, [&] { residual_layernorm_forward<Float>(x, x, f, f, x, x, x, x, R, C, stream); });
  add(L, rows * row, [&] { attention_forward<Float>(x, f, x, B, T, NH, C / NH, stream); });
  add(chunks, double(logit_rows) * padded, [&] { cross_entropy(x, f, f, i, logit_rows, V, padded, 1, f, true, stream); });
  add(2 * L + 1, rows * row, [&] { layernorm_backward<Float>(x, f, f, x, x, x, f, f, R, C, false, f, stream); });
  add(L, rows * row, [&] { attention_backward<Float>(x, f, x, x, x, f, B, T, NH, C / NH, stream); });
  // Where cuBLASLt has no epilogue for them: GELU, and the sum that is a bias's gradient.
  add(L, 4 * rows * row, [&] { gelu_forward(x, x, R, 4 * C, stream); });
  add(L, 4 * rows * row, [&] { gelu_backward(x, x, R, 4 * C, stream); });
  add(L, 4 * rows * row, [&] { column_sum<Float>(f, x, R, 4 * C, false, f, stream); });
  add(1, rows * row, [&] { embedding_backward<Float>(f, f, i, i, x, {0, V}, B, neighbours(T), T, C, false, stream); });
  add(L, double(block), [&] { square_sums(f, f, block, stream); });
  add(1, double(norm_partials(parameters)), [&] { add_up(nowhere<double>(), f, norm_partials(parameters), f, stream); });
  add(L, double(block), [&] { adamw(x, f, f, f, f, f, nowhere<AdamWState>(), block, block, {}, stream); });
  return all;
}

}  // namespace

int main() {
  Json all;
  for (const Shape& shape : shapes) all[shape.name] = operations_of(shape);
  std::printf("%s\n", all.dump(1).c_str());
}
