// The matrix product of the CPU device, by oneDNN. kernels/matmul.cuh has the contract.
//
// Deterministic for any number of threads: D is cut into tiles whose size depends on the shape alone, each tile is one
// single-threaded oneDNN matmul over the whole of K, and the workers take the tiles. (Left to itself oneDNN splits by
// the number of threads, and its bits change with it.)
// bf16 needs a CPU that oneDNN has bf16 kernels for (AVX-512); elsewhere, and for fp16, inputs are widened to float.
#pragma once

#include <omp.h>

#include <algorithm>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <tuple>
#include <vector>

#include "cpu/cuda_bf16.h"
#include "cpu/cuda_fp16.h"
#include "cpu/cuda_runtime.h"
#include "cpu/workers.h"

constexpr size_t gemm_workspace_bytes = 0;  // oneDNN's scratchpads are host memory of the threads
inline void use_gemm_workspace(void*) {}
inline std::string gemm_library() { return "oneDNN"; }
template <class T>
constexpr bool gemm_has_epilogues = false;
template <class... Arguments>
bool gemm_gelu(const Arguments&...) { return false; }
template <class... Arguments>
bool gemm_gelu_gradient(const Arguments&...) { return false; }
template <class... Arguments>
bool gemm_column_sums(const Arguments&...) { return false; }

namespace cpu {

template <class T>
constexpr dnnl::memory::data_type dnnl_type = std::is_same_v<T, float>           ? dnnl::memory::data_type::f32
                                              : std::is_same_v<T, __nv_bfloat16> ? dnnl::memory::data_type::bf16
                                                                                 : dnnl::memory::data_type::f16;

inline const dnnl::engine& dnnl_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// oneDNN plans for as many threads as OpenMP would give it; a tile has one.
struct OneThread {
  OneThread() { omp_set_num_threads(1); }
  ~OneThread() { omp_set_num_threads(threads); }
  int threads = omp_get_max_threads();
};

// One prepared product: a tile's shape, the leading dimensions of the whole matrices, and the primitive for them.
struct TileProduct {
  dnnl::matmul primitive;
  dnnl::memory::desc a, b, bias, d, scratchpad;
};

template <class In, class Out>
TileProduct prepare_tile(const GemmShape& tile, int lda, int ldb, int ldd, bool has_bias) {
  using Dims = dnnl::memory::dims;
  OneThread one_thread;
  TileProduct p;
  p.a = {Dims{tile.m, tile.k}, dnnl_type<In>, tile.transpose_a ? Dims{1, lda} : Dims{lda, 1}};
  p.b = {Dims{tile.k, tile.n}, dnnl_type<In>, tile.transpose_b ? Dims{1, ldb} : Dims{ldb, 1}};
  p.d = {Dims{tile.m, tile.n}, dnnl_type<Out>, Dims{ldd, 1}};
  if (has_bias) p.bias = {Dims{1, tile.n}, dnnl_type<In>, Dims{tile.n, 1}};
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (tile.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
#if DNNL_VERSION_MAJOR >= 3
  dnnl::matmul::primitive_desc description =
      has_bias ? dnnl::matmul::primitive_desc(dnnl_engine(), p.a, p.b, p.bias, p.d, attributes)
               : dnnl::matmul::primitive_desc(dnnl_engine(), p.a, p.b, p.d, attributes);
#else
  dnnl::matmul::primitive_desc description(
      has_bias ? dnnl::matmul::desc(p.a, p.b, p.bias, p.d) : dnnl::matmul::desc(p.a, p.b, p.d), attributes,
      dnnl_engine());
#endif
  p.scratchpad = description.scratchpad_desc();
  p.primitive = dnnl::matmul(description);
  return p;
}

// Primitives take milliseconds to create: each is kept.
template <class In, class Out>
const TileProduct& cached_tile(const GemmShape& tile, int lda, int ldb, int ldd, bool has_bias) {
  static std::map<std::tuple<GemmShape, int, int, int, bool>, TileProduct> cache;
  auto key = std::make_tuple(tile, lda, ldb, ldd, has_bias);
  auto found = cache.find(key);
  if (found == cache.end()) found = cache.emplace(key, prepare_tile<In, Out>(tile, lda, ldb, ldd, has_bias)).first;
  return found->second;
}

template <class In, class Out>
void run_tile(const TileProduct& p, Out* d, const In* a, const In* b, const In* bias) {
  thread_local dnnl::stream stream(dnnl_engine());
  thread_local std::vector<char> scratchpad;
  if (scratchpad.size() < p.scratchpad.get_size()) scratchpad.resize(p.scratchpad.get_size());
  auto memory = [](const dnnl::memory::desc& description, const void* data) {
    return dnnl::memory(description, dnnl_engine(), const_cast<void*>(data));
  };
  std::unordered_map<int, dnnl::memory> arguments = {{DNNL_ARG_SRC, memory(p.a, a)},
                                                     {DNNL_ARG_WEIGHTS, memory(p.b, b)},
                                                     {DNNL_ARG_DST, memory(p.d, d)},
                                                     {DNNL_ARG_SCRATCHPAD, memory(p.scratchpad, scratchpad.data())}};
  if (bias) arguments.emplace(DNNL_ARG_BIAS, memory(p.bias, bias));
  p.primitive.execute(stream, arguments);
}

// Tiles of about equal size, at most `largest`, a multiple of 64 unless the whole side is one tile.
inline int tile_side(int side, int largest) {
  if (side <= largest) return side;
  int tiles = (side + largest - 1) / largest;
  return ((side + tiles - 1) / tiles + 63) / 64 * 64;
}

template <class In, class Out>
void gemm_tiles(Out* d, const In* a, const In* b, const In* bias, const GemmShape& s) {
  const int lda = s.transpose_a ? s.m : s.k, ldb = s.transpose_b ? s.k : s.n;
  const int tile_m = tile_side(s.m, 512), tile_n = tile_side(s.n, 384);
  const int tiles_m = (s.m + tile_m - 1) / tile_m, tiles_n = (s.n + tile_n - 1) / tile_n;
  // Created here, before the threads start: the cache is not locked.
  const TileProduct* products[2][2];
  for (int last_m = 0; last_m < 2; ++last_m)
    for (int last_n = 0; last_n < 2; ++last_n) {
      GemmShape tile = s;
      tile.m = last_m ? s.m - (tiles_m - 1) * tile_m : tile_m;
      tile.n = last_n ? s.n - (tiles_n - 1) * tile_n : tile_n;
      products[last_m][last_n] = &cached_tile<In, Out>(tile, lda, ldb, s.n, bias);
    }
  parallel_for(size_t(tiles_m) * tiles_n, 1, [&](size_t tile) {
    const int i = int(tile % tiles_m), j = int(tile / tiles_m);
    const size_t row = size_t(i) * tile_m, column = size_t(j) * tile_n;
    run_tile(*products[i == tiles_m - 1][j == tiles_n - 1], d + row * s.n + column,
             a + (s.transpose_a ? row : row * lda), b + (s.transpose_b ? column * ldb : column),
             bias ? bias + column : nullptr);
  });
}

// Whether oneDNN multiplies In on this CPU (bf16 needs AVX-512).
template <class In>
bool dnnl_multiplies() {
  if constexpr (std::is_same_v<In, float>) return true;
  static const bool works = [] {
    try {
      prepare_tile<In, float>({16, 16, 16}, 16, 16, 16, false);
      return true;
    } catch (const dnnl::error&) {
      return false;
    }
  }();
  return works;
}

template <class In>
std::vector<float> widen(const In* values, size_t count) {
  std::vector<float> wide(count);
  parallel_for(count, 1 << 16, [&](size_t i) { wide[i] = float(values[i]); });
  return wide;
}

template <class In, class Out>
void gemm_widened(Out* d, const In* a, const In* b, const In* bias, const GemmShape& s) {
  std::vector<float> wide_a = widen(a, size_t(s.m) * s.k), wide_b = widen(b, size_t(s.k) * s.n);
  std::vector<float> wide_bias = widen(bias, bias ? s.n : 0);
  const float* float_bias = bias ? wide_bias.data() : nullptr;
  if constexpr (std::is_same_v<Out, float>) {
    gemm_tiles(d, wide_a.data(), wide_b.data(), float_bias, s);
  } else {
    std::vector<float> wide_d = widen(d, s.accumulate ? size_t(s.m) * s.n : 0);
    wide_d.resize(size_t(s.m) * s.n);
    gemm_tiles(wide_d.data(), wide_a.data(), wide_b.data(), float_bias, s);
    parallel_for(wide_d.size(), 1 << 16, [&](size_t i) { d[i] = Out(wide_d[i]); });
  }
}

}  // namespace cpu

template <class In, class Out>
void gemm(Out* d, const In* a, const In* b, const In* bias, const GemmShape& shape, cudaStream_t stream) {
  ++cpu::counts.products;
  cpu::enqueue(stream, [=] {
    if (cpu::dnnl_multiplies<In>()) cpu::gemm_tiles(d, a, b, bias, shape);
    else cpu::gemm_widened(d, a, b, bias, shape);
    return true;
  });
}
