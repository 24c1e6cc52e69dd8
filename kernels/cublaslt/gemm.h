// The matrix product of the GPU, by cuBLASLt. kernels/matmul.cuh has the contract.
//
// cuBLASLt thinks in columns: a row-major (m,n) matrix is a column-major (n,m) one. So D = op(A)·op(B) is asked for as
// Dᵀ = op(B)ᵀ·op(A)ᵀ: the operands change places, m and n too, and a bias over n is one over Dᵀ's rows, as its epilogue
// wants it. Sums are in fp32; fp32 inputs are multiplied in full fp32, not TF32.
//
// Plans (layouts and an algorithm) are kept by shape, type and epilogue. Of the algorithms that the heuristic proposes,
// the fastest is taken: when a plan is made, each multiplies the operands at hand a few times. Products that are not
// worth it (kernels/matmul.cuh) have plans of their own, which take the first.
#pragma once

#include <cublasLt.h>

#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/common.cuh"
#include "kernels/event.cuh"

#define CUBLAS_CHECK(call) check_cublas((call), #call, __FILE__, __LINE__)

inline void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string(call) + " at " + file + ":" + std::to_string(line) + ": " +
                           cublasLtGetStatusString(status));
}

constexpr size_t gemm_workspace_bytes = 32 << 20;  // what NVIDIA recommends for Hopper
template <class T>
constexpr bool gemm_has_epilogues = sizeof(T) == 2;

// And the device that it runs on: this process's only one, asked once, as that takes a millisecond.
inline const std::string& gemm_library() {
  static const std::string name = [] {
    int device = 0;
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    return properties.name + std::string(", cuBLASLt ") + std::to_string(cublasLtGetVersion());
  }();
  return name;
}

namespace cublaslt {

template <class T>
constexpr cudaDataType data_type = std::is_same_v<T, float>           ? CUDA_R_32F
                                   : std::is_same_v<T, __nv_bfloat16> ? CUDA_R_16BF
                                                                      : CUDA_R_16F;

// The handle and the workspace that products on one stream share, for the whole run.
struct Context {
  Context() { CUBLAS_CHECK(cublasLtCreate(&handle)); }
  cublasLtHandle_t handle;
  void* workspace = nullptr;
};

inline Context& context() {
  static Context instance;
  return instance;
}

// What is done with a product on its way to memory.
enum class Epilogue { none, bias, gelu, gelu_gradient, column_sums };

template <class In, class Out>
struct Operands {
  Out* d;
  const In *a, *b;
  const void* bias = nullptr;         // added, or (column_sums) written
  const void* before_gelu = nullptr;  // written by gelu, read by gelu_gradient
};

// With a name of its own: nvcc 13.0 stumbles over containers of the nameless struct.
struct Algorithm {
  cublasLtMatmulAlgo_t data;
};

struct Plan {
  cublasLtMatmulDesc_t operation;
  cublasLtMatrixLayout_t a, b, d;
  std::optional<Algorithm> algorithm;  // none: cuBLASLt can't do this
};

template <class Value>
void set_attribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)));
}

template <class In, class Out>
void set_pointers(const Plan& plan, const Operands<In, Out>& o) {
  if (o.bias) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias);
  if (o.before_gelu)
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, o.before_gelu);
}

template <class In, class Out>
cublasStatus_t multiply(const Plan& plan, const Algorithm& algorithm, const Operands<In, Out>& o,
                        bool accumulate, cudaStream_t stream) {
  if (!context().workspace) CUDA_CHECK(cudaMalloc(&context().workspace, gemm_workspace_bytes));
  const float alpha = 1, beta = accumulate ? 1 : 0;
  return cublasLtMatmul(context().handle, plan.operation, &alpha, o.b, plan.a, o.a, plan.b, &beta, o.d, plan.d, o.d,
                        plan.d, &algorithm.data, context().workspace, gemm_workspace_bytes, stream);
}

// The largest power of two up to 16 bytes that divides the row length: the alignment cuBLASLt may count on.
inline uint32_t row_alignment(int columns, size_t element_bytes) {
  size_t bytes = columns * element_bytes;
  return uint32_t(std::min<size_t>(16, bytes & (~bytes + 1)));
}

// What the heuristic proposes, best guess first.
inline std::vector<Algorithm> candidates(const Plan& plan, const uint32_t (&alignments)[3]) {
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
  cublasLtMatmulHeuristicResult_t results[most];
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(context().handle, plan.operation, plan.a, plan.b, plan.d,
                                                               plan.d, preference, most, results, &found);
  CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) CUBLAS_CHECK(status);
  std::vector<Algorithm> algorithms;
  for (int i = 0; i < found; ++i)
    if (results[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back({results[i].algo});
  return algorithms;
}

// Seconds; infinite if the algorithm can't do it after all.
template <class In, class Out>
double time_of(const Plan& plan, const Algorithm& algorithm, const Operands<In, Out>& o, cudaStream_t stream) {
  bool works = true;
  const double seconds = best_seconds(stream, [&] {
    works = works && multiply(plan, algorithm, o, false, stream) == CUBLAS_STATUS_SUCCESS;
  });
  return works ? seconds : INFINITY;
}

// Its number among the candidates, as text; "none" if none of them works. D is overwritten, or, if it is a sum that
// must stay, a scratch one.
template <class In, class Out>
std::string fastest(const Plan& plan, const std::vector<Algorithm>& algorithms, Operands<In, Out> o,
                    const GemmShape& shape, cudaStream_t stream) {
  Out* scratch = nullptr;
  if (shape.accumulate) CUDA_CHECK(cudaMalloc(&scratch, size_t(shape.m) * shape.n * sizeof(Out)));
  if (scratch) o.d = scratch;
  size_t best = 0;
  double best_time = INFINITY;
  for (size_t i = 0; i < algorithms.size(); ++i) {
    const double time = time_of(plan, algorithms[i], o, stream);
    if (time < best_time) best = i, best_time = time;
  }
  CUDA_CHECK(cudaFree(scratch));
  return best_time < INFINITY ? std::to_string(best) : "none";
}

// Names the product, and all that the heuristic's proposals depend on.
template <class In, class Out>
std::string name_of(const GemmShape& s, Epilogue epilogue) {
  std::string name = gemm_library();
  for (int part : {s.m, s.n, s.k, int(s.transpose_a), int(s.transpose_b), int(s.accumulate), int(epilogue),
                   int(data_type<In>), int(data_type<Out>)})
    name += ' ' + std::to_string(part);
  return name;
}

template <class In, class Out>
Plan make_plan(const GemmShape& s, Epilogue epilogue, const Operands<In, Out>& o, cudaStream_t stream) {
  Plan plan;
  CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  // First operand: B, whose rows are cuBLASLt's columns; second: A.
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  constexpr cublasLtEpilogue_t epilogues[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS,
                                              CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_DGELU,
                                              CUBLASLT_EPILOGUE_BGRADA};  // of its first operand, which is B
  const cudaDataType bias_type = epilogue == Epilogue::column_sums ? CUDA_R_32F : data_type<In>;
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogues[int(epilogue)]);
  if (o.bias) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias_type);
  if (o.before_gelu) set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t(s.n));
  set_pointers(plan, o);
  const int b_columns = s.transpose_b ? s.k : s.n, b_rows = s.transpose_b ? s.n : s.k;
  const int a_columns = s.transpose_a ? s.m : s.k, a_rows = s.transpose_a ? s.k : s.m;
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.a, data_type<In>, b_columns, b_rows, b_columns));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.b, data_type<In>, a_columns, a_rows, a_columns));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.d, data_type<Out>, s.n, s.m, s.n));
  const std::vector<Algorithm> algorithms = candidates(
      plan, {row_alignment(b_columns, sizeof(In)), row_alignment(a_columns, sizeof(In)), row_alignment(s.n, sizeof(Out))});
  if (algorithms.empty()) return plan;
  const std::string choice = gemm_choices().choose(
      name_of<In, Out>(s, epilogue), "0", [&] { return fastest(plan, algorithms, o, s, stream); });
  if (choice != "none")
    plan.algorithm = algorithms[std::min<size_t>(std::strtoul(choice.c_str(), nullptr, 10), algorithms.size() - 1)];
  return plan;
}

// False if cuBLASLt can't.
template <class In, class Out>
bool run(const GemmShape& shape, Epilogue epilogue, const Operands<In, Out>& o, cudaStream_t stream) {
  static std::map<std::tuple<GemmShape, Epilogue, bool>, Plan> plans;
  const auto key = std::make_tuple(shape, epilogue, gemm_choices().by_timing);
  auto found = plans.find(key);
  if (found == plans.end()) found = plans.emplace(key, make_plan(shape, epilogue, o, stream)).first;
  const Plan& plan = found->second;
  if (!plan.algorithm) return false;
  set_pointers(plan, o);
  CUBLAS_CHECK(multiply(plan, *plan.algorithm, o, shape.accumulate, stream));
  return true;
}

}  // namespace cublaslt

inline void use_gemm_workspace(void* workspace) { cublaslt::context().workspace = workspace; }

template <class In, class Out>
void gemm(Out* d, const In* a, const In* b, const In* bias, const GemmShape& s, cudaStream_t stream) {
  using namespace cublaslt;
  if (!run<In, Out>(s, bias ? Epilogue::bias : Epilogue::none, {d, a, b, bias}, stream))
    throw std::runtime_error("cuBLASLt has no algorithm for a matrix product of m=" + std::to_string(s.m) + " n=" +
                             std::to_string(s.n) + " k=" + std::to_string(s.k));
}

// cuBLASLt wants rows of gelu's input to start at multiples of 16 bytes.
template <class T>
bool gemm_gelu(T* d, T* before, const T* a, const T* b, const T* bias, const GemmShape& shape, cudaStream_t stream) {
  using namespace cublaslt;
  return shape.n % 8 == 0 && run<T, T>(shape, Epilogue::gelu, {d, a, b, bias, before}, stream);
}

template <class T>
bool gemm_gelu_gradient(T* d, const T* before, const T* a, const T* b, const GemmShape& shape, cudaStream_t stream) {
  using namespace cublaslt;
  return shape.n % 8 == 0 && run<T, T>(shape, Epilogue::gelu_gradient, {d, a, b, nullptr, before}, stream);
}

template <class T>
bool gemm_column_sums(float* d, float* sums, const T* a, const T* b, const GemmShape& shape, cudaStream_t stream) {
  using namespace cublaslt;
  return run<T, float>(shape, Epilogue::column_sums, {d, a, b, sums}, stream);
}
