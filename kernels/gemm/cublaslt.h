// The matrix product of the GPU, by cuBLASLt. kernels/matmul.cuh has the contract.
//
// cuBLASLt is column-major: a row-major (m,n) matrix is a column-major (n,m) one. So D = op(A)·op(B) is computed as
// Dᵀ = op(B)ᵀ·op(A)ᵀ: the operands change places, m and n too. A bias over n then is a bias over the rows of Dᵀ, as
// cuBLASLt's epilogue needs it. Sums are in fp32; fp32 inputs are multiplied in full fp32, not TF32.
//
// Products leave SMs free, as many as kernels/device/multiprocessors.h says. Plans (layouts and algorithms) are kept by
// shape, type, epilogue and this margin. Of the algorithms that the heuristic proposes, the fastest is taken
// (kernels/gemm/gemm_choices.cuh): when a plan is made in the rehearsal, and no earlier start has chosen for this
// product, each one multiplies the given operands a few times, and D is overwritten. A product that adds to D takes
// the algorithm of the same product without the sum. A product that was not rehearsed takes the heuristic's first
// algorithm. If an algorithm fails when it is used, it is removed, and the next one is tried.
#pragma once

#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/device/common.cuh"
#include "kernels/device/multiprocessors.h"
#include "kernels/gemm/bias.cuh"
#include "kernels/gemm/gemm_choices.cuh"
#include "kernels/gemm/gemm_shape.h"

#define CUBLAS_CHECK(call) check_cublas((call), #call, __FILE__, __LINE__)

inline void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string(call) + " at " + file + ":" + std::to_string(line) + ": " +
                           cublasLtGetStatusString(status));
}

constexpr size_t gemm_workspace_bytes = gpu_gemm_workspace_bytes;
template <class Float>
constexpr bool gemm_has_epilogues = sizeof(Float) == 2;

// The name of the device, the version of cuBLASLt, and the size of its workspace. A process has only one device, and
// asking for it takes a millisecond, so this asks once.
inline const std::string& gemm_library() {
  static const std::string name = [] {
    int device = 0;
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    return properties.name + std::string(", cuBLASLt ") + std::to_string(cublasLtGetVersion()) + " with " +
           std::to_string(gemm_workspace_bytes >> 20) + " MiB of workspace";
  }();
  return name;
}

inline bool gemm_has_fp8_tiles() { return cublasLtGetVersion() >= 120900; }

namespace cublaslt {

template <class Float>
constexpr cudaDataType data_type = std::is_same_v<Float, float>           ? CUDA_R_32F
                                   : std::is_same_v<Float, __nv_bfloat16> ? CUDA_R_16BF
                                                                      : CUDA_R_16F;
inline cudaDataType type_of(Fp8Format format) { return format == Fp8Format::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2; }

// CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, _VEC128_32F, _BLK128x128_32F
inline int32_t scale_mode(Fp8Units units) { return units == Fp8Units::one ? 0 : units == Fp8Units::tiles ? 4 : 5; }

// The handle and the workspace that products on one stream share. Both belong to a device.
struct Context {
  Context() { CUBLAS_CHECK(cublasLtCreate(&handle)); }
  void* workspace() {
    if (!lent && !own) CUDA_CHECK(cudaMalloc(&own, gemm_workspace_bytes));
    return lent ? lent : own;
  }

  cublasLtHandle_t handle;
  void *lent = nullptr, *own = nullptr;
};

inline Context& context() {
  static std::map<int, Context> instances;
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  return instances[device];
}

// The operation that is fused with a product, before the result is written to memory.
enum class Epilogue { none, bias, gelu, gelu_gradient, column_sums };

template <class In, class Out>
struct Operands {
  Out* d;
  const In *a, *b;
  const void* bias = nullptr;         // the bias that is added, or for column_sums the sums that are written
  const void* before_gelu = nullptr;  // written by gelu, read by gelu_gradient
  cudaDataType type_a = data_type<In>, type_b = data_type<In>;
  const float *unit_a = nullptr, *unit_b = nullptr;  // of operands in eight bits, which are bytes here
  Fp8Units units_a = Fp8Units::one, units_b = Fp8Units::one;
};

// A struct with a name, because nvcc 13.0 can't compile containers of cuBLASLt's nameless struct.
struct Algorithm {
  cublasLtMatmulAlgo_t data;
  bool operator==(const Algorithm& other) const { return std::ranges::equal(data.data, other.data.data); }
};

struct ProductPlan {
  cublasLtMatmulDesc_t operation;
  cublasLtMatrixLayout_t a, b, d;
  std::vector<Algorithm> algorithms;                     // those that may work, the chosen one first
  cublasStatus_t problem = CUBLAS_STATUS_NOT_SUPPORTED;  // the reason, if none works
};

template <class Value>
void set_attribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)));
}

template <class In, class Out>
void set_pointers(const ProductPlan& plan, const Operands<In, Out>& o) {
  if (o.bias) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias);
  if (o.before_gelu)
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, o.before_gelu);
  if (!o.unit_a) return;
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, o.unit_b);
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, o.unit_a);
}

template <class In, class Out>
cublasStatus_t multiply(const ProductPlan& plan, const Algorithm& algorithm, const Operands<In, Out>& o,
                        float alpha, bool accumulate, cudaStream_t stream) {
  const float beta = accumulate ? 1 : 0;
  const cublasStatus_t status =
      cublasLtMatmul(context().handle, plan.operation, &alpha, o.b, plan.a, o.a, plan.b, &beta, o.d, plan.d, o.d,
                     plan.d, &algorithm.data, context().workspace(), gemm_workspace_bytes, stream);
  if (status != CUBLAS_STATUS_SUCCESS) cudaGetLastError();  // clears the error, which the next launcher would report
  return status;
}

// The largest power of two up to 16 bytes that divides the length of a row: the alignment that cuBLASLt may rely on.
inline uint32_t row_alignment(int columns, size_t element_bytes) {
  size_t bytes = columns * element_bytes;
  return uint32_t(std::min<size_t>(16, bytes & (~bytes + 1)));
}

// A number of the algorithm's configuration; 0: it has none.
inline uint32_t number_of(const Algorithm& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  uint32_t number = 0;
  size_t written = 0;
  cublasLtMatmulAlgoConfigGetAttribute(&algorithm.data, attribute, &number, sizeof number, &written);
  return number;
}

// Are sums rounded once, when they are complete? An algorithm may split each sum over k into parts. Two of the schemes
// that bring these together (INPLACE, OUTPUT_TYPE) keep them in the type of D, which may have 16 bits. And a bias
// might be added to a sum that is already rounded to 16 bits.
inline bool rounds_once(const Algorithm& algorithm, bool has_bias, bool is_d_float) {
  if (number_of(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1) return true;
  const uint32_t scheme = number_of(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
  return !has_bias && (is_d_float || scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
}

// Asks the heuristic for algorithms, best guess first: at first for those that add parts in float, then for all, and
// takes those that round once. The lists differ, also in algorithms that split nothing, and on an H200 each of them had
// the fastest of some weight gradients.
inline void find_candidates(ProductPlan& plan, const uint32_t (&alignments)[3], bool has_bias, bool is_d_float) {
  constexpr int most = 8;
  cublasLtMatmulPreference_t preference;
  CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, gemm_workspace_bytes);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments[0]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments[1]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments[2]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments[2]);
  for (const uint32_t schemes : {CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, CUBLASLT_REDUCTION_SCHEME_MASK}) {
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
    cublasLtMatmulHeuristicResult_t results[most];
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        context().handle, plan.operation, plan.a, plan.b, plan.d, plan.d, preference, most, results, &found);
    if (status != CUBLAS_STATUS_SUCCESS) plan.problem = status, found = 0;
    for (int i = 0; i < found; ++i) {
      const Algorithm algorithm = {results[i].algo};
      if (results[i].state == CUBLAS_STATUS_SUCCESS && rounds_once(algorithm, has_bias, is_d_float) &&
          std::ranges::count(plan.algorithms, algorithm) == 0)
        plan.algorithms.push_back(algorithm);
    }
  }
  CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
}

// The algorithm as text, for checkpoints: the version of cuBLASLt, because only that version understands the bits, and
// the bits.
inline std::string text_of(const Algorithm& algorithm) {
  std::ostringstream text;
  text << cublasLtGetVersion() << std::hex;
  for (uint64_t word : algorithm.data.data) text << ' ' << word;
  return text.str();
}

// The algorithm that the text describes; none if this card and library can't use it.
inline std::optional<Algorithm> algorithm_of(const std::string& text, const ProductPlan& plan) {
  std::istringstream words(text);
  size_t version = 0;
  Algorithm algorithm;
  words >> version >> std::hex;
  for (uint64_t& word : algorithm.data.data) words >> word;
  if (!words || version != cublasLtGetVersion()) return {};
  cublasLtMatmulHeuristicResult_t result;
  const cublasStatus_t status = cublasLtMatmulAlgoCheck(context().handle, plan.operation, plan.a, plan.b, plan.d,
                                                        plan.d, &algorithm.data, &result);
  if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > gemm_workspace_bytes) return {};
  return algorithm;
}

// The fastest algorithm of those that work, as text; "none" if none works. D is overwritten.
template <class In, class Out>
std::string fastest(const ProductPlan& plan, const Operands<In, Out>& o, cudaStream_t stream) {
  std::vector<bool> works(plan.algorithms.size(), true);
  const std::vector<double> seconds = best_seconds_of_each(stream, works.size(), [&](size_t i) {
    works[i] = works[i] && multiply(plan, plan.algorithms[i], o, 1, false, stream) == CUBLAS_STATUS_SUCCESS;
  });
  std::string best = "none";
  double least = INFINITY;
  for (size_t i = 0; i < works.size(); ++i)
    if (works[i] && seconds[i] < least) best = text_of(plan.algorithms[i]), least = seconds[i];
  return best;
}

// The name of the product in gemm_choices(), the same with and without `accumulate`.
template <class In, class Out>
std::string name_of(const GemmShape& s, Epilogue epilogue, const Operands<In, Out>& o = {}) {
  std::string name = "product";
  for (int part : {s.m, s.n, s.k, int(s.transpose_a), int(s.transpose_b), int(epilogue), int(o.type_a), int(data_type<Out>)})
    name += ' ' + std::to_string(part);
  if (!o.unit_a) return name;
  name += ' ' + std::to_string(int(o.type_b)) + (s.fast_sums ? " fast" : "");
  return o.units_a == Fp8Units::one ? name : name + (o.units_b == Fp8Units::blocks ? " blocks" : " tiles");
}

// Puts the chosen algorithm, if there is one, before the others.
template <class In, class Out>
void choose_algorithm(ProductPlan& plan, const GemmShape& s, Epilogue epilogue, const Operands<In, Out>& o,
                      cudaStream_t stream) {
  const std::string choice =
      gemm_choices().choose(name_of(s, epilogue, o), [&] { return fastest(plan, o, stream); });
  if (const auto chosen = algorithm_of(choice, plan)) plan.algorithms.insert(plan.algorithms.begin(), *chosen);
}

template <class In, class Out>
ProductPlan make_plan(const GemmShape& s, Epilogue epilogue, const Operands<In, Out>& o, cudaStream_t stream) {
  ProductPlan plan;
  CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  // cuBLASLt is column-major: its first operand is B, the second is A.
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  constexpr cublasLtEpilogue_t epilogues[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS,
                                              CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU,
                                              CUBLASLT_EPILOGUE_BGRADA};  // sums over its first operand, which is B
  const cudaDataType bias_type = epilogue == Epilogue::column_sums ? CUDA_R_32F : o.unit_a ? CUDA_R_16BF : data_type<In>;
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogues[int(epilogue)]);
  if (o.bias) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_type);
  if (o.before_gelu) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t(s.n));
  if (SmMargin::current() > 0)
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, int32_t(persistent_blocks()));
  if (o.unit_a) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(s.fast_sums));
  if (o.units_a != Fp8Units::one) {  // names that cuBLASLt has from CUDA 12.9 on: ..._DESC_A_SCALE_MODE and ..._B_SCALE_MODE
    set_attribute(plan.operation, cublasLtMatmulDescAttributes_t(31), scale_mode(o.units_b));
    set_attribute(plan.operation, cublasLtMatmulDescAttributes_t(32), scale_mode(o.units_a));
  }
  set_pointers(plan, o);
  const int b_columns = s.transpose_b ? s.k : s.n, b_rows = s.transpose_b ? s.n : s.k;
  const int a_columns = s.transpose_a ? s.m : s.k, a_rows = s.transpose_a ? s.k : s.m;
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.a, o.type_b, b_columns, b_rows, b_columns));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.b, o.type_a, a_columns, a_rows, a_columns));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.d, data_type<Out>, s.n, s.m, s.n));
  find_candidates(
      plan,
      {row_alignment(b_columns, sizeof(In)), row_alignment(a_columns, sizeof(In)), row_alignment(s.n, sizeof(Out))},
      epilogue == Epilogue::bias || epilogue == Epilogue::gelu, sizeof(Out) == sizeof(float));
  choose_algorithm(plan, s, epilogue, o, stream);
  return plan;
}

// Multiplies. Returns success, or the reason why no algorithm can do it.
template <class In, class Out>
cublasStatus_t run(const GemmShape& shape, Epilogue epilogue, const Operands<In, Out>& o, cudaStream_t stream) {
  static std::map<std::tuple<GemmShape, Epilogue, cudaDataType, cudaDataType, Fp8Units, Fp8Units, int, int, bool>, ProductPlan> plans;
  const auto key = std::make_tuple(shape, epilogue, o.type_a, o.type_b, o.units_a, o.units_b, SmMargin::current(),
                                   gemm_choices().lessons, gemm_choices().times);
  auto found = plans.find(key);
  if (found == plans.end()) found = plans.emplace(key, make_plan(shape, epilogue, o, stream)).first;
  ProductPlan& plan = found->second;
  set_pointers(plan, o);
  while (!plan.algorithms.empty()) {
    const cublasStatus_t status = multiply(plan, plan.algorithms[0], o, shape.alpha, shape.accumulate, stream);
    if (status == CUBLAS_STATUS_SUCCESS) return status;
    plan.problem = status;
    plan.algorithms.erase(plan.algorithms.begin());
  }
  return plan.problem;
}

inline void check_product(cublasStatus_t status, const GemmShape& s) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error("cuBLASLt can't do a matrix product of m=" + std::to_string(s.m) +
                             " n=" + std::to_string(s.n) + " k=" + std::to_string(s.k) + ": " +
                             cublasLtGetStatusString(status));
}

// D = the product, plus the bias, if it is not null: in the epilogue, or where no algorithm has that, written before.
template <class In, class Out, class Bias>
void run_with_bias(GemmShape s, Operands<In, Out> o, const Bias* bias, cudaStream_t stream) {
  if (bias) {
    o.bias = bias;
    if (run(s, Epilogue::bias, o, stream) == CUBLAS_STATUS_SUCCESS) return;
    bias_rows(o.d, bias, s.m, s.n, s.accumulate, stream);
    o.bias = nullptr, s.accumulate = true;
  }
  check_product(run(s, Epilogue::none, o, stream), s);
}

}  // namespace cublaslt

inline void use_gemm_workspace(void* workspace) { cublaslt::context().lent = workspace; }

template <class In, class Out>
void gemm(Out* d, const In* a, const In* b, const In* bias, GemmShape s, cudaStream_t stream) {
  cublaslt::run_with_bias<In, Out>(s, {d, a, b}, bias, stream);
}

template <class Out>
void gemm_fp8(Out* d, const Fp8Matrix& a, const Fp8Matrix& b, const __nv_bfloat16* bias, const GemmShape& s, cudaStream_t stream) {
  using namespace cublaslt;
  const Operands<uint8_t, Out> operands = {d, static_cast<const uint8_t*>(a.codes), static_cast<const uint8_t*>(b.codes), nullptr,
                                           nullptr, type_of(a.format), type_of(b.format), a.unit, b.unit, a.units, b.units};
  run_with_bias(s, operands, bias, stream);
}

// cuBLASLt needs the rows of gelu's input to start at multiples of 16 bytes.
template <class Float>
bool gemm_gelu(Float* d, Float* before, const Float* a, const Float* b, const Float* bias, const GemmShape& shape,
               cudaStream_t stream) {
  using namespace cublaslt;
  return bias && shape.n % 8 == 0 &&  // one of the same shape may have been prepared with a bias
         run<Float, Float>(shape, Epilogue::gelu, {d, a, b, bias, before}, stream) == CUBLAS_STATUS_SUCCESS;
}

template <class Float>
bool gemm_gelu_gradient(Float* d, const Float* before, const Float* a, const Float* b, const GemmShape& shape,
                        cudaStream_t stream) {
  using namespace cublaslt;
  return shape.n % 8 == 0 &&
         run<Float, Float>(shape, Epilogue::gelu_gradient, {d, a, b, nullptr, before}, stream) == CUBLAS_STATUS_SUCCESS;
}

template <class Float>
bool gemm_column_sums(float* d, float* sums, const Float* a, const Float* b, const GemmShape& shape,
                      cudaStream_t stream) {
  using namespace cublaslt;
  return run<Float, float>(shape, Epilogue::column_sums, {d, a, b, sums}, stream) == CUBLAS_STATUS_SUCCESS;
}
