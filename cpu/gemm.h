// The matrix product of the CPU device, by oneDNN. kernels/matmul.cuh has the contract.
//
// Deterministic for any number of threads: D is cut into tiles whose size depends on the shape alone, each tile is one
// single-threaded oneDNN matmul over the whole of K, and the workers take the tiles. (Left to itself oneDNN splits by
// the number of threads, and its bits change with it.)
//
// A tile is a window of larger matrices: its rows are not adjacent in memory. But oneDNN's fastest kernels for bf16,
// which use AMX if the CPU has it, need dense tiles, so for these the operands are packed first, see Operands.
//
// bf16 needs a CPU for which oneDNN has bf16 kernels (AVX-512). On others, and for fp16, inputs are cast to float
// first. Operands in eight bits are cast to bf16, in which they are exact; matmul_fp8.cuh describes the rounding of
// sums on both devices, and cpu/tensor_core_sums.h that of a Hopper GPU (GPT_CPU_SUMS=hopper).
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/cuda_bf16.h"
#include "cpu/cuda_fp16.h"
#include "cpu/cuda_fp8.h"
#include "cpu/cuda_runtime.h"
#include "cpu/log.h"
#include "cpu/switches.h"
#include "cpu/tensor_core_sums.h"
#include "cpu/workers.h"

constexpr size_t gemm_workspace_bytes = 0;  // oneDNN's scratchpads are host memory of the threads
// A library's belongs to the current device.
inline void use_gemm_workspace(void*) {
  if (int device; cudaGetDevice(&device) != cudaSuccess) cpu::fatal("use_gemm_workspace: %s", cudaGetErrorString(cudaGetLastError()));
}
inline std::string gemm_library() { return ""; }
inline bool gemm_has_fp8_tiles() { return true; }
template <class Float>
constexpr bool gemm_has_epilogues = false;
template <class... Arguments>
bool gemm_gelu(const Arguments&...) { return false; }
template <class... Arguments>
bool gemm_gelu_gradient(const Arguments&...) { return false; }
template <class... Arguments>
bool gemm_column_sums(const Arguments&...) { return false; }

namespace cpu {

template <class Float>
constexpr dnnl::memory::data_type dnnl_type = std::is_same_v<Float, float>           ? dnnl::memory::data_type::f32
                                              : std::is_same_v<Float, __nv_bfloat16> ? dnnl::memory::data_type::bf16
                                                                                 : dnnl::memory::data_type::f16;

inline const dnnl::engine& dnnl_engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

// How a tile's matrices lie in memory: the distance in elements from row to row of A, B and D (of Aᵀ and Bᵀ if the
// product transposes them), and whether B is packed.
struct Layout {
  int lda, ldb, ldd;
  bool b_is_packed = false;
  auto operator<=>(const Layout&) const = default;
};
inline Layout rows_in_place(const GemmShape& s) {
  return {s.transpose_a ? s.m : s.k, s.transpose_b ? s.k : s.n, s.n};
}

// One prepared product: a tile's shape and layout, and oneDNN's primitive for them (none if it has none on this CPU).
struct TileProduct {
  GemmShape shape;
  Layout layout;
  dnnl::matmul primitive;
  std::string implementation;
  dnnl::memory::desc a, b, bias, d, scratchpad;
};

template <class In, class Out>
TileProduct prepare_tile(const GemmShape& tile, const Layout& layout, bool has_bias) {
  using Dims = dnnl::memory::dims;
  const OneThread one_thread;  // as a tile has: oneDNN plans for OpenMP's number
  TileProduct p;
  p.shape = tile;
  p.layout = layout;
  p.a = {Dims{tile.m, tile.k}, dnnl_type<In>, tile.transpose_a ? Dims{1, layout.lda} : Dims{layout.lda, 1}};
  p.b = {Dims{tile.k, tile.n}, dnnl_type<In>, tile.transpose_b ? Dims{1, layout.ldb} : Dims{layout.ldb, 1}};
  if (layout.b_is_packed) p.b = {Dims{tile.k, tile.n}, dnnl_type<In>, dnnl::memory::format_tag::BA16a64b2a};
  p.d = {Dims{tile.m, tile.n}, dnnl_type<Out>, Dims{layout.ldd, 1}};
  if (has_bias) p.bias = {Dims{1, tile.n}, dnnl_type<In>, Dims{tile.n, 1}};
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  dnnl::post_ops after;
#if DNNL_VERSION_MAJOR >= 3
  if (tile.alpha != 1) after.append_eltwise(dnnl::algorithm::eltwise_linear, tile.alpha, 0);
#else
  if (tile.alpha != 1) after.append_eltwise(1, dnnl::algorithm::eltwise_linear, tile.alpha, 0);
#endif
  if (tile.accumulate) after.append_sum(1.0f);
  if (after.len() > 0) attributes.set_post_ops(after);
  const bool may_be_empty = true;
#if DNNL_VERSION_MAJOR >= 3
  dnnl::matmul::primitive_desc description =
      has_bias ? dnnl::matmul::primitive_desc(dnnl_engine(), p.a, p.b, p.bias, p.d, attributes, may_be_empty)
               : dnnl::matmul::primitive_desc(dnnl_engine(), p.a, p.b, p.d, attributes, may_be_empty);
#else
  dnnl::matmul::primitive_desc description(
      has_bias ? dnnl::matmul::desc(p.a, p.b, p.bias, p.d) : dnnl::matmul::desc(p.a, p.b, p.d), attributes,
      dnnl_engine(), may_be_empty);
#endif
  if (!description) return p;
  p.implementation = description.impl_info_str();
  p.scratchpad = description.scratchpad_desc();
  p.primitive = dnnl::matmul(description);
  return p;
}

// Keeps every primitive, because creating one takes milliseconds.
template <class In, class Out>
const TileProduct& cached_tile(const GemmShape& tile, const Layout& layout, bool has_bias) {
  static std::map<std::tuple<GemmShape, Layout, bool>, TileProduct> cache;
  auto key = std::make_tuple(tile, layout, has_bias);
  auto found = cache.find(key);
  if (found == cache.end()) found = cache.emplace(key, prepare_tile<In, Out>(tile, layout, has_bias)).first;
  return found->second;
}

// Memory that is reused from tile to tile.
class Scratch {
 public:
  template <class T>
  T* of(size_t count) {
    const size_t lines = (count * sizeof(T) + sizeof(CacheLine) - 1) / sizeof(CacheLine);
    if (lines_.size() < lines) lines_.resize(lines);
    return reinterpret_cast<T*>(lines_.data());
  }

 private:
  struct alignas(64) CacheLine {
    char bytes[64];
  };
  std::vector<CacheLine> lines_;
};

template <class In, class Out>
void multiply(const TileProduct& p, Out* d, const In* a, const In* b, const In* bias) {
  thread_local dnnl::stream stream(dnnl_engine());
  thread_local Scratch scratch;
  auto memory = [](const dnnl::memory::desc& description, const void* data) {
    return dnnl::memory(description, dnnl_engine(), const_cast<void*>(data));
  };
  const char* scratchpad = scratch.of<char>(p.scratchpad.get_size());
  std::unordered_map<int, dnnl::memory> arguments = {{DNNL_ARG_SRC, memory(p.a, a)},
                                                     {DNNL_ARG_WEIGHTS, memory(p.b, b)},
                                                     {DNNL_ARG_DST, memory(p.d, d)},
                                                     {DNNL_ARG_SCRATCHPAD, memory(p.scratchpad, scratchpad)}};
  if (bias) arguments.emplace(DNNL_ARG_BIAS, memory(p.bias, bias));
  p.primitive.execute(stream, arguments);
}

template <class To, class From>
void copy_rows(To* to, int to_stride, const From* from, int from_stride, int rows, int width) {
  for (int row = 0; row < rows; ++row, to += to_stride, from += from_stride)
    if constexpr (std::is_same_v<To, From>) std::memcpy(static_cast<void*>(to), from, width * sizeof(To));
    else for (int i = 0; i < width; ++i) to[i] = To(float(from[i]));
}

// oneDNN's layout BA16a64b2a: blocks of 64 columns, in which pairs of rows are interleaved,
//
//   packed[column / 64][row / 2][column % 64][row % 2]
//
// Rows are padded with zeros to a multiple of 32, columns to a multiple of 64.
constexpr int packed_columns = 64, packed_rows = 32;
inline size_t packed_size(int rows, int columns) {
  const auto round_up = [](int size, int unit) { return size_t(size + unit - 1) / unit * unit; };
  return round_up(rows, packed_rows) * round_up(columns, packed_columns);
}

// Packs `columns` columns of a matrix whose rows are ldb elements apart.
template <class Float>
void pack(Float* packed, const Float* b, int ldb, int rows, int columns) {
  static const Float zeros[packed_columns] = {};
  for (int first = 0; first < columns; first += packed_columns, b += packed_columns) {
    const int width = std::min(packed_columns, columns - first);
    Float* const end = packed + packed_size(rows, packed_columns);
    if (width < packed_columns) std::fill(packed, end, Float(0.0f));
    for (int row = 0; packed < end; row += 2, packed += 2 * packed_columns) {
      const Float* even = row < rows ? b + size_t(row) * ldb : zeros;
      const Float* odd = row + 1 < rows ? even + ldb : zeros;
      for (int column = 0; column < width; ++column) {
        packed[2 * column] = even[column];
        packed[2 * column + 1] = odd[column];
      }
    }
  }
}

// Packs a whole matrix (rows, columns) on all threads. The result is valid until the next call.
template <class Float>
const Float* pack_in_parallel(const Float* b, int rows, int columns) {
  static Scratch scratch;
  Float* packed = scratch.of<Float>(packed_size(rows, columns));
  parallel_for((columns + packed_columns - 1) / packed_columns, 1, [&](size_t block) {
    const int first = int(block) * packed_columns;
    pack(packed + packed_size(rows, first), b + first, columns, rows, std::min(packed_columns, columns - first));
  });
  return packed;
}

// Multiplies one tile. `given` is the layout of its matrices; a matrix for which the product needs another layout is
// copied.
template <class In, class Out>
void run_tile(const TileProduct& p, const Layout& given, Out* d, const In* a, const In* b, const In* bias) {
  thread_local Scratch scratch_a, scratch_b, scratch_d;
  const auto& [m, n, k, transpose_a, transpose_b, accumulate, _, alpha] = p.shape;
  const Layout& wanted = p.layout;
  if (given.lda != wanted.lda) {
    const int rows = transpose_a ? k : m;
    In* copy = scratch_a.of<In>(size_t(rows) * wanted.lda);
    copy_rows(copy, wanted.lda, a, given.lda, rows, wanted.lda);
    a = copy;
  }
  if (wanted.b_is_packed && !given.b_is_packed) {
    In* copy = scratch_b.of<In>(packed_size(k, n));
    pack(copy, b, given.ldb, k, n);
    b = copy;
  }
  if (given.ldd == wanted.ldd) return multiply(p, d, a, b, bias);
  Out* copy = scratch_d.of<Out>(size_t(m) * n);
  if (accumulate) copy_rows(copy, n, d, given.ldd, m, n);
  multiply(p, copy, a, b, bias);
  copy_rows(d, given.ldd, copy, n, m, n);
}

// The size of tiles along a side: about equal, at most `largest`, and a multiple of 64 unless one tile covers the side.
inline int tile_side(int side, int largest) {
  if (side <= largest) return side;
  int tiles = (side + largest - 1) / largest;
  return ((side + tiles - 1) / tiles + 63) / 64 * 64;
}

// How a product's matrices are given to oneDNN:
//
//   in place  as windows, without copies.
//   dense     The thread that computes a tile copies its part of Aᵀ and its result. B is packed: by that thread, too,
//             if there is only one row of tiles, else by all threads before. A Bᵀ needs no copy, because its tiles are
//             whole rows. The result of a product with Aᵀ is a weight gradient, in float; copying it would take long,
//             so its tiles are whole rows, too.
//   cast      The thread that computes a tile casts its part of A and B to float, and its result back (gemm_cast). So a large product,
//             such as the logits', needs no whole copy of a matrix.
enum class Operands { in_place, dense, cast };

// A product that is cut into tiles. Tiles at the lower and right edges may be smaller.
struct Cut {
  int tile_m, tile_n, tiles_m, tiles_n;
  const TileProduct* products[2][2];  // [at the lower edge][at the right edge]
};

template <class In, class Out>
Cut cut_product(const GemmShape& s, bool has_bias, Operands operands) {
  const bool dense = operands == Operands::dense, whole_rows = dense && s.transpose_a;
  Cut cut;
  // A weight gradient that would be a single tile is cut, too, so that no thread has it alone while the others wait.
  const bool is_small = !dense && s.transpose_a && s.m <= 512 && s.n <= 384;
  cut.tile_m = tile_side(s.m, is_small ? 64 : whole_rows ? 128 : 512);
  cut.tile_n = whole_rows ? s.n : tile_side(s.n, 384);
  cut.tiles_m = (s.m + cut.tile_m - 1) / cut.tile_m;
  cut.tiles_n = (s.n + cut.tile_n - 1) / cut.tile_n;
  for (bool lower : {false, true})
    for (bool right : {false, true}) {
      GemmShape tile = s;
      tile.m = lower ? s.m - (cut.tiles_m - 1) * cut.tile_m : cut.tile_m;
      tile.n = right ? s.n - (cut.tiles_n - 1) * cut.tile_n : cut.tile_n;
      Layout layout = rows_in_place(operands == Operands::in_place ? s : tile);
      layout.b_is_packed = dense && !s.transpose_b;
      cut.products[lower][right] = &cached_tile<In, Out>(tile, layout, has_bias);
    }
  return cut;
}

// Does oneDNN multiply all tiles by its kernels named brg, which multiply blocks?
inline bool by_blocks(const Cut& cut) {
  for (const auto& products : cut.products)
    for (const TileProduct* p : products)
      if (!p->implementation.starts_with("brg")) return false;
  return true;
}

// Are dense tiles faster, copies included (dev/results/2026-11-22-products.md)? They are not for floats, not if the B
// to be packed is larger than the caches, and not for a long Aᵀ with AVX-512.
template <class In, class Out>
bool better_dense(const GemmShape& s, bool has_bias) {
  if (sizeof(In) > 2 || (!s.transpose_b && size_t(s.k) * s.n * sizeof(In) > 64 << 20)) return false;
  const Cut cut = cut_product<In, Out>(s, has_bias, Operands::dense);
  const bool by_amx = cut.products[0][0]->implementation.find("amx") != std::string::npos;
  return by_blocks(cut) && (!s.transpose_a || s.k <= 512 || by_amx);
}

// Calls work(is it at the lower edge, at the right edge, its first row, its first column) for each tile, on all threads.
template <class Work>
void for_tiles(const Cut& cut, Work work) {
  parallel_for(size_t(cut.tiles_m) * cut.tiles_n, 1, [&](size_t tile) {
    const int i = int(tile % cut.tiles_m), j = int(tile / cut.tiles_m);
    work(i == cut.tiles_m - 1, j == cut.tiles_n - 1, size_t(i) * cut.tile_m, size_t(j) * cut.tile_n);
  });
}

template <class In, class Out>
void gemm_tiles(Out* d, const In* a, const In* b, const In* bias, const GemmShape& s, Operands operands) {
  const Cut cut = cut_product<In, Out>(s, bias, operands);  // before the threads start, because its cache has no lock
  Layout layout = rows_in_place(s);
  if (cut.products[0][0]->layout.b_is_packed && cut.tiles_m > 1) {
    b = pack_in_parallel(b, s.k, s.n);
    layout.b_is_packed = true;
  }
  for_tiles(cut, [&](bool lower, bool right, size_t row, size_t column) {
    const size_t b_start = layout.b_is_packed ? packed_size(s.k, column) : s.transpose_b ? column * layout.ldb : column;
    run_tile(*cut.products[lower][right], layout, d + row * layout.ldd + column, a + (s.transpose_a ? row : row * layout.lda), b + b_start,
             bias ? bias + column : nullptr);
  });
}

template <class In, class Out>
void gemm_tiles(Out* d, const In* a, const In* b, const In* bias, const GemmShape& s) {
  gemm_tiles(d, a, b, bias, s, better_dense<In, Out>(s, bias) ? Operands::dense : Operands::in_place);
}

// Can oneDNN multiply type In on this CPU? (bf16 needs AVX-512.)
template <class In>
bool dnnl_multiplies() {
  static const bool works = bool(prepare_tile<In, float>({16, 16, 16}, {16, 16, 16}, false).primitive);
  return works;
}

// Of a long sum a thread casts, multiplies and adds up 4,096 terms at a time.
template <class In, class Out>
void gemm_cast(Out* d, const In* a, const In* b, const In* bias, const GemmShape& s) {
  constexpr int terms = 4096;
  const Layout layout = rows_in_place(s);
  std::vector<Cut> parts;
  for (GemmShape part = s; part.k > 0; part.k -= terms, part.accumulate = true) {
    GemmShape now = part;
    now.k = std::min(part.k, terms);
    parts.push_back(cut_product<float, float>(now, bias && parts.empty(), Operands::cast));
  }
  for_tiles(parts[0], [&](bool lower, bool right, size_t row, size_t column) {
    thread_local Scratch scratch_a, scratch_b, scratch_bias, scratch_d;
    const auto cast = [](Scratch& scratch, const auto* from, int stride, int rows, int width) {
      float* const to = scratch.of<float>(size_t(rows) * width);
      copy_rows(to, width, from, stride, rows, width);
      return to;
    };
    const int m = parts[0].products[lower][right]->shape.m, n = parts[0].products[lower][right]->shape.n;
    Out* const to = d + row * layout.ldd + column;
    float* const sums = s.accumulate ? cast(scratch_d, to, layout.ldd, m, n) : scratch_d.of<float>(size_t(m) * n);
    for (size_t part = 0; part < parts.size(); ++part) {
      const TileProduct& product = *parts[part].products[lower][right];
      const int k = product.shape.k;
      const size_t first = part * terms;
      const In* const of_a = s.transpose_a ? a + first * layout.lda + row : a + row * layout.lda + first;
      const In* const of_b = s.transpose_b ? b + column * layout.ldb + first : b + first * layout.ldb + column;
      multiply<float, float>(product, sums, cast(scratch_a, of_a, layout.lda, s.transpose_a ? k : m, s.transpose_a ? m : k),
                             cast(scratch_b, of_b, layout.ldb, s.transpose_b ? n : k, s.transpose_b ? k : n),
                             bias && part == 0 ? cast(scratch_bias, bias + column, n, 1, n) : nullptr);
    }
    copy_rows(to, layout.ldd, sums, n, m, n);
  });
}

// The codes of a matrix (rows, columns). Both formats are exact in 16 bits of bf16, too; units of tiles need a float.
template <class In>
const In* decode(Scratch& scratch, const Fp8Matrix& matrix, size_t rows, size_t columns) {
  static const auto tables = [] {
    std::vector<In> all(512);
    for (int code = 0; code < 256; ++code)
      all[size_t(code)] = In(E4M3::to_float(uint8_t(code))), all[size_t(256 + code)] = In(E5M2::to_float(uint8_t(code)));
    return all;
  }();
  const In* const table = &tables[matrix.format == Fp8Format::e4m3 ? 0 : 256];
  const uint8_t* const codes = static_cast<const uint8_t*>(matrix.codes);
  In* const values = scratch.of<In>(rows * columns);
  parallel_for(rows, 16, [&](size_t row) {
    for (size_t j = row * columns; j < (row + 1) * columns; ++j) {
      values[j] = table[codes[j]];
      if (matrix.units != Fp8Units::one) values[j] = In(float(values[j]) * matrix.unit_of(row, j % columns, rows, columns));
    }
  });
  return values;
}

// sums (m,n) = A·Bᵀ as Hopper's tensor cores add them up: without fast_sums, 128 products at a time are added to a float,
// which is where units of tiles are multiplied, too. (That it is 128 with one unit, too, is an assumption.)
inline void gemm_like_hopper(float* sums, const Fp8Matrix& a, const Fp8Matrix& b, const GemmShape& s) {
  static Scratch scratch_a, scratch_b;
  const size_t m = size_t(s.m), n = size_t(s.n), k = size_t(s.k);
  const bool has_tiles = a.units != Fp8Units::one;
  const auto least = [](const Fp8Matrix& matrix) { return matrix.format == Fp8Format::e4m3 ? -6 : -14; };
  const float* const codes_a = decode<float>(scratch_a, {a.codes, a.format, nullptr}, m, k);
  const float* const codes_b = decode<float>(scratch_b, {b.codes, b.format, nullptr}, n, k);
  parallel_for(m, 1, [&](size_t i) {
    for (size_t j = 0; j < n; ++j) {
      float sum = 0, part = 0;
      for (size_t p = 0; p < k; p += products_of_an_instruction) {
        part = add_products(part, {codes_a + i * k + p, least(a)}, {codes_b + j * k + p, least(b)},
                            int(std::min(k - p, size_t(products_of_an_instruction))));
        const size_t end = p + products_of_an_instruction;
        if (end < k && (s.fast_sums || end % 128 != 0)) continue;
        sum = std::fma(part, has_tiles ? a.unit_of(i, p, m, k) * b.unit_of(j, p, n, k) : 1.0f, sum);
        part = 0;
      }
      sums[i * n + j] = sum;
    }
  });
}

template <class In, class Out>
void gemm_decoded(Out* d, const Fp8Matrix& a, const Fp8Matrix& b, const __nv_bfloat16* bias, const GemmShape& s) {
  static Scratch scratch_a, scratch_b, scratch_sums;
  float* const sums = scratch_sums.of<float>(size_t(s.m) * s.n);
  const GemmShape plain = {s.m, s.n, s.k, false, true};
  if (switches().hopper_sums) gemm_like_hopper(sums, a, b, s);
  else gemm_tiles(sums, decode<In>(scratch_a, a, size_t(s.m), size_t(s.k)), decode<In>(scratch_b, b, size_t(s.n), size_t(s.k)),
                  static_cast<const In*>(nullptr), plain);
  const float unit = a.units == Fp8Units::one ? *a.unit * *b.unit : 1;
  parallel_for(size_t(s.m), 1, [&](size_t row) {
    const float* const from = sums + row * s.n;
    Out* const to = d + row * s.n;
    for (int j = 0; j < s.n; ++j)
      to[j] = Out(from[j] * unit + (bias ? float(bias[j]) : 0.0f) + (s.accumulate ? float(to[j]) : 0.0f));
  });
}

// Issues a product to the stream: compute() does it. code: tells the kinds of operands apart; bytes: of one of their elements
template <class Out, class Compute>
void issue_product(const std::type_info& code, size_t bytes, const GemmShape& s, cudaStream_t stream, Compute compute) {
  ++counts.products;
  log("product %d %d %d %d %zu %zu", number_of(stream), s.m, s.n, s.k, bytes, sizeof(Out));
  load(&code, (size_t(s.m) << 42) ^ (size_t(s.n) << 21) ^ size_t(s.k));
  enqueue(stream, [=] {
    if (switches().computes) compute();
    return true;
  });
}

}  // namespace cpu

template <class Out>
void gemm_fp8(Out* d, const Fp8Matrix& a, const Fp8Matrix& b, const __nv_bfloat16* bias, const GemmShape& shape,
              cudaStream_t stream) {
  cpu::issue_product<Out>(typeid(Fp8Matrix), 1, shape, stream, [=] {
    if (a.units == Fp8Units::one && cpu::dnnl_multiplies<__nv_bfloat16>()) cpu::gemm_decoded<__nv_bfloat16>(d, a, b, bias, shape);
    else cpu::gemm_decoded<float>(d, a, b, bias, shape);
  });
}

template <class In, class Out>
void gemm(Out* d, const In* a, const In* b, const In* bias, const GemmShape& shape, cudaStream_t stream) {
  cpu::issue_product<Out>(typeid(In), sizeof(In), shape, stream, [=] {
    if (cpu::dnnl_multiplies<In>()) cpu::gemm_tiles(d, a, b, bias, shape);
    else cpu::gemm_cast(d, a, b, bias, shape);
  });
}
