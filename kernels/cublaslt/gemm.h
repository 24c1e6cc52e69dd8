// The matrix product of the GPU, by cuBLASLt. kernels/matmul.cuh has the contract.
//
// cuBLASLt thinks in columns: a row-major (m,n) matrix is a column-major (n,m) one. So D = op(A)·op(B) is asked for as
// Dᵀ = op(B)ᵀ·op(A)ᵀ: the operands change places, m and n too, and a bias over n is one over Dᵀ's rows, as its epilogue
// wants it. Sums are in fp32; fp32 inputs are multiplied in full fp32, not TF32.
// Plans (layouts and the first algorithm that the heuristic proposes) are kept by shape and type: the same job takes
// the same algorithms, and so gives the same bits.
#pragma once

#include <cublasLt.h>

#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include "kernels/common.cuh"

#define CUBLAS_CHECK(call) check_cublas((call), #call, __FILE__, __LINE__)

inline void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string(call) + " at " + file + ":" + std::to_string(line) + ": " +
                           cublasLtGetStatusString(status));
}

constexpr size_t gemm_workspace_bytes = 32 << 20;  // what NVIDIA recommends for Hopper

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

struct Plan {
  cublasLtMatmulDesc_t operation;
  cublasLtMatrixLayout_t a, b, d;
  cublasLtMatmulHeuristicResult_t algorithm;
};

template <class Value>
void set_attribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)));
}

// The largest power of two up to 16 bytes that divides the row length: the alignment cuBLASLt may count on.
inline uint32_t row_alignment(int columns, size_t element_bytes) {
  size_t bytes = columns * element_bytes;
  return uint32_t(std::min<size_t>(16, bytes & (~bytes + 1)));
}

inline cublasLtMatmulHeuristicResult_t choose_algorithm(const Plan& plan, const uint32_t (&alignments)[3],
                                                        const GemmShape& shape) {
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
  cublasLtMatmulHeuristicResult_t result;
  int found = 0;
  CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(context().handle, plan.operation, plan.a, plan.b, plan.d, plan.d,
                                              preference, 1, &result, &found));
  CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
  if (!found)
    throw std::runtime_error("cuBLASLt has no algorithm for a matrix product of m=" + std::to_string(shape.m) + " n=" +
                             std::to_string(shape.n) + " k=" + std::to_string(shape.k));
  return result;
}

template <class In, class Out>
Plan make_plan(const GemmShape& s, bool has_bias, const In* bias) {
  Plan plan;
  CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  // First operand: B, whose rows are cuBLASLt's columns; second: A.
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (has_bias) {
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, data_type<In>);
    set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  }
  const int b_columns = s.transpose_b ? s.k : s.n, b_rows = s.transpose_b ? s.n : s.k;
  const int a_columns = s.transpose_a ? s.m : s.k, a_rows = s.transpose_a ? s.k : s.m;
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.a, data_type<In>, b_columns, b_rows, b_columns));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.b, data_type<In>, a_columns, a_rows, a_columns));
  CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&plan.d, data_type<Out>, s.n, s.m, s.n));
  plan.algorithm = choose_algorithm(plan, {row_alignment(b_columns, sizeof(In)), row_alignment(a_columns, sizeof(In)),
                                           row_alignment(s.n, sizeof(Out))}, s);
  return plan;
}

template <class In, class Out>
Plan& cached_plan(const GemmShape& shape, const In* bias) {
  static std::map<std::tuple<GemmShape, bool>, Plan> cache;
  auto key = std::make_tuple(shape, bias != nullptr);
  auto found = cache.find(key);
  if (found == cache.end()) found = cache.emplace(key, make_plan<In, Out>(shape, bias != nullptr, bias)).first;
  return found->second;
}

}  // namespace cublaslt

inline void use_gemm_workspace(void* workspace) { cublaslt::context().workspace = workspace; }

template <class In, class Out>
void gemm(Out* d, const In* a, const In* b, const In* bias, const GemmShape& shape, cudaStream_t stream) {
  cublaslt::Plan& plan = cublaslt::cached_plan<In, Out>(shape, bias);
  if (bias) cublaslt::set_attribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
  if (!cublaslt::context().workspace) CUDA_CHECK(cudaMalloc(&cublaslt::context().workspace, gemm_workspace_bytes));
  const float alpha = 1, beta = shape.accumulate ? 1 : 0;
  CUBLAS_CHECK(cublasLtMatmul(cublaslt::context().handle, plan.operation, &alpha, b, plan.a, a, plan.b, &beta, d, plan.d,
                              d, plan.d, &plan.algorithm.algo, cublaslt::context().workspace,
                              gemm_workspace_bytes, stream));
}
