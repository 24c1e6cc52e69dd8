// cuBLASLt for tests on the CPU device, so that the host's code in kernels/gemm/cublaslt.h runs where there is no GPU.
// The part of NVIDIA's interface that it uses, with the same names; products are plain loops over columns. What the
// library proposes, how long each algorithm takes and how it fails is up to the test.
#pragma once

#include <unistd.h>

#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "cpu/cuda_bf16.h"
#include "cpu/cuda_fp16.h"
#include "cpu/cuda_fp8.h"
#include "cpu/cuda_runtime.h"
#include "cpu/device.h"
#include "cpu/nccl.h"

enum cublasStatus_t { CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_EXECUTION_FAILED = 13, CUBLAS_STATUS_NOT_SUPPORTED = 15 };
enum cudaDataType { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14, CUDA_R_8F_E4M3 = 28, CUDA_R_8F_E5M2 = 29 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cublasLtEpilogue_t {
  CUBLASLT_EPILOGUE_DEFAULT = 1,
  CUBLASLT_EPILOGUE_BIAS = 4,
  CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 164,
  CUBLASLT_EPILOGUE_DGELU = 192,
  CUBLASLT_EPILOGUE_BGRADA = 256
};
enum cublasLtReductionScheme_t {
  CUBLASLT_REDUCTION_SCHEME_NONE = 0,
  CUBLASLT_REDUCTION_SCHEME_INPLACE = 1,
  CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2,
  CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE = 4,
  CUBLASLT_REDUCTION_SCHEME_MASK = 7
};
enum cublasLtMatmulDescAttributes_t {
  CUBLASLT_MATMUL_DESC_TRANSA,
  CUBLASLT_MATMUL_DESC_TRANSB,
  CUBLASLT_MATMUL_DESC_EPILOGUE,
  CUBLASLT_MATMUL_DESC_BIAS_POINTER,
  CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
  CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER,
  CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD,
  CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET,
  CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
  CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
  CUBLASLT_MATMUL_DESC_FAST_ACCUM,
  CUBLASLT_MATMUL_DESC_A_SCALE_MODE = 31,  // from CUDA 12.9 on, with these numbers
  CUBLASLT_MATMUL_DESC_B_SCALE_MODE = 32
};
enum cublasLtMatmulPreferenceAttributes_t {
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
  CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
};
enum cublasLtMatmulAlgoConfigAttributes_t { CUBLASLT_ALGO_CONFIG_SPLITK_NUM = 2, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME = 3 };

struct cublasLtMatmulAlgo_t {
  uint64_t data[8];  // data[0]: its number
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  cublasStatus_t state;
};
struct MatmulDesc {
  uint64_t attributes[CUBLASLT_MATMUL_DESC_B_SCALE_MODE + 1] = {};
};
struct MatrixLayout {
  cudaDataType type;
  uint64_t rows, columns;
  int64_t leading;
};
struct MatmulPreference {
  uint64_t attributes[6] = {};
};
struct cublasLtContext {
  int device;  // a handle is for one device
};
using cublasLtHandle_t = cublasLtContext*;
using cublasLtMatmulDesc_t = MatmulDesc*;
using cublasLtMatrixLayout_t = MatrixLayout*;
using cublasLtMatmulPreference_t = MatmulPreference*;

// The test sets how this library behaves, and sees what it was asked for.
struct FakeLibrary {
  struct Algorithm {
    int number = 1;
    int splits = 1;
    cublasLtReductionScheme_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
    int microseconds = 0;
  };
  std::vector<Algorithm> proposed = {{}};
  std::vector<Algorithm> proposed_for_any = {};  // where any scheme is allowed, in the place of `proposed`; empty: the same
  std::set<int> unsuitable;                    // numbers that no product can run on this card
  std::map<int, cublasStatus_t> failures;      // by epilogue: what running any algorithm returns
  std::map<int, cublasStatus_t> failing;       // by number of an algorithm: what running it returns
  size_t version = 130002;
  std::vector<int> ran;  // numbers, in the order of the calls that succeeded
  const void* workspace = nullptr;  // of the last call
  bool fast_sums = false;  // of the last product in eight bits
  int blocks = 0;       // of the last call's kernel, which is persistent
  int most_taken = 0;   // multiprocessors that a product and the collectives under way have asked for together, at most

  const Algorithm& of(const cublasLtMatmulAlgo_t& algorithm) const {
    for (const auto* list : {&proposed, &proposed_for_any})
      for (const Algorithm& known : *list)
        if (known.number == int(algorithm.data[0])) return known;
    static const Algorithm unknown;
    return unknown;
  }
};
inline FakeLibrary fake_library;

inline const char* cublasLtGetStatusString(cublasStatus_t status) {
  return status == CUBLAS_STATUS_EXECUTION_FAILED ? "execution failed" : "not supported";
}
inline size_t cublasLtGetVersion() { return fake_library.version; }
inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new cublasLtContext;
  cudaGetDevice(&(*handle)->device);
  return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t, cudaDataType) {
  *desc = new MatmulDesc;
  (*desc)->attributes[CUBLASLT_MATMUL_DESC_EPILOGUE] = CUBLASLT_EPILOGUE_DEFAULT;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                                     const void* value, size_t bytes) {
  return std::memcpy(&desc->attributes[attribute], value, bytes), CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                                 uint64_t columns, int64_t leading) {
  *layout = new MatrixLayout{type, rows, columns, leading};
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new MatmulPreference;
  (*preference)->attributes[CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK] = 7;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                           cublasLtMatmulPreferenceAttributes_t attribute,
                                                           const void* value, size_t bytes) {
  return std::memcpy(&preference->attributes[attribute], value, bytes), CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatmulPreference_t preference,
                                                     int most, cublasLtMatmulHeuristicResult_t* results, int* found) {
  *found = 0;
  const uint64_t schemes = preference->attributes[CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK];
  const bool any = schemes == CUBLASLT_REDUCTION_SCHEME_MASK && !fake_library.proposed_for_any.empty();
  for (const FakeLibrary::Algorithm& algorithm : any ? fake_library.proposed_for_any : fake_library.proposed) {
    const bool allowed = algorithm.splits == 1 || (schemes & algorithm.scheme);
    if (allowed && !fake_library.unsuitable.contains(algorithm.number) && *found < most)
      results[(*found)++] = {{{uint64_t(algorithm.number)}}, 0, CUBLAS_STATUS_SUCCESS};
  }
  return *found ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

inline cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              const cublasLtMatmulAlgo_t* algorithm,
                                              cublasLtMatmulHeuristicResult_t* result) {
  result->workspaceSize = 0;
  return fake_library.unsuitable.contains(int(algorithm->data[0])) ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                           cublasLtMatmulAlgoConfigAttributes_t attribute, void* value,
                                                           size_t bytes, size_t*) {
  const FakeLibrary::Algorithm& of = fake_library.of(*algorithm);
  const int number = attribute == CUBLASLT_ALGO_CONFIG_SPLITK_NUM ? of.splits : int(of.scheme);
  return std::memcpy(value, &number, bytes), CUBLAS_STATUS_SUCCESS;
}

// Elements of an array, whatever its type.
struct Elements {
  double operator[](size_t i) const {
    if (type == CUDA_R_32F) return static_cast<float*>(data)[i];
    if (type == CUDA_R_16F) return __half2float(static_cast<__half*>(data)[i]);
    if (type == CUDA_R_8F_E4M3) return float(static_cast<__nv_fp8_e4m3*>(data)[i]);
    if (type == CUDA_R_8F_E5M2) return float(static_cast<__nv_fp8_e5m2*>(data)[i]);
    return __bfloat162float(static_cast<__nv_bfloat16*>(data)[i]);
  }
  void set(size_t i, double value) const {
    if (type == CUDA_R_32F) static_cast<float*>(data)[i] = float(value);
    else if (type == CUDA_R_16F) static_cast<__half*>(data)[i] = __float2half_rn(float(value));
    else static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(float(value));
  }
  void* data;
  cudaDataType type;
};

// D (m,n) = op(A) (m,k) · op(B) (k,n) [+ D], all of them in columns, then what the epilogue asks for.
inline void fake_product(const MatmulDesc& desc, const MatrixLayout& a_layout, const void* a_data,
                         const MatrixLayout& b_layout, const void* b_data, const MatrixLayout& d_layout, void* d_data,
                         bool accumulate) {
  const auto of = [&](cublasLtMatmulDescAttributes_t attribute) { return desc.attributes[attribute]; };
  const auto pointer = [&](cublasLtMatmulDescAttributes_t attribute) { return reinterpret_cast<void*>(of(attribute)); };
  const bool at = of(CUBLASLT_MATMUL_DESC_TRANSA) == CUBLAS_OP_T, bt = of(CUBLASLT_MATMUL_DESC_TRANSB) == CUBLAS_OP_T;
  const Elements a = {const_cast<void*>(a_data), a_layout.type}, b = {const_cast<void*>(b_data), b_layout.type};
  const Elements d = {d_data, d_layout.type};
  const Elements bias = {pointer(CUBLASLT_MATMUL_DESC_BIAS_POINTER), cudaDataType(of(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE))};
  const Elements aux = {pointer(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER), d_layout.type};
  const auto epilogue = cublasLtEpilogue_t(of(CUBLASLT_MATMUL_DESC_EPILOGUE));
  const size_t m = d_layout.rows, n = d_layout.columns, k = at ? a_layout.rows : a_layout.columns;
  std::vector<double> rows(m * k), columns(n * k);  // of op(A), of op(B)
  for (size_t i = 0; i < m; ++i)
    for (size_t p = 0; p < k; ++p) rows[i * k + p] = a[at ? p + i * a_layout.leading : i + p * a_layout.leading];
  for (size_t j = 0; j < n; ++j)
    for (size_t p = 0; p < k; ++p) columns[j * k + p] = b[bt ? j + p * b_layout.leading : p + j * b_layout.leading];
  // Of operand i of N, sums over k: one unit (mode 0); a unit for 128 numbers along the sum, those of neighbouring i
  // together (4); or for 128 x 128, in rows that are padded to four (5).
  const auto apply_units = [&](std::vector<double>& all, size_t N, cublasLtMatmulDescAttributes_t units, cublasLtMatmulDescAttributes_t mode) {
    const float* const unit = static_cast<const float*>(pointer(units));
    if (!unit) return;
    const size_t padded = (k + 511) / 512 * 4;
    for (size_t i = 0; i < N; ++i)
      for (size_t p = 0; p < k; ++p)
        all[i * k + p] *= unit[of(mode) == 4 ? p / 128 * N + i : of(mode) == 5 ? i / 128 * padded + p / 128 : 0];
  };
  apply_units(rows, m, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_A_SCALE_MODE);
  apply_units(columns, n, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_MODE);
  const double scale = std::sqrt(2 / M_PI), cubic = 0.044715;
  for (size_t i = 0; i < m; ++i) {
    const double* const row = &rows[i * k];
    if (epilogue == CUBLASLT_EPILOGUE_BGRADA) bias.set(i, std::accumulate(row, row + k, 0.0));
    for (size_t j = 0; j < n; ++j) {
      double x = std::inner_product(row, row + k, &columns[j * k], accumulate ? d[i + j * d_layout.leading] : 0);
      if (epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) x += bias[i];
      const size_t at_aux = i + j * of(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
      if (epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS) {
        aux.set(at_aux, x);
        x = 0.5 * x * (1 + std::tanh(scale * (x + cubic * x * x * x)));
      }
      if (epilogue == CUBLASLT_EPILOGUE_DGELU) {
        const double y = aux[at_aux], t = std::tanh(scale * (y + cubic * y * y * y));
        x *= 0.5 * (1 + t) + 0.5 * y * (1 - t * t) * scale * (1 + 3 * cubic * y * y);
      }
      d.set(i + j * d_layout.leading, x);
    }
  }
}

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void*, const void* a,
                                     cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                                     const void* beta, const void*, cublasLtMatrixLayout_t, void* d,
                                     cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm,
                                     void* workspace, size_t, cudaStream_t stream) {
  int device = 0;
  cudaGetDevice(&device);
  if (handle->device != device) return CUBLAS_STATUS_EXECUTION_FAILED;
  const int number = int(algorithm->data[0]), epilogue = int(desc->attributes[CUBLASLT_MATMUL_DESC_EPILOGUE]);
  if (fake_library.failures.contains(epilogue)) return fake_library.failures[epilogue];
  if (fake_library.failing.contains(number)) return fake_library.failing[number];
  fake_library.ran.push_back(number);
  fake_library.workspace = workspace;
  int blocks = int(desc->attributes[CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET]);
  if (!blocks) cudaDeviceGetAttribute(&blocks, cudaDevAttrMultiProcessorCount, device);
  fake_library.blocks = blocks;
  // Hopper multiplies eight bits in one form alone
  const auto in_8_bits = [](const MatrixLayout& layout) { return layout.type == CUDA_R_8F_E4M3 || layout.type == CUDA_R_8F_E5M2; };
  if (in_8_bits(*a_layout) || in_8_bits(*b_layout)) {
    const bool is_tn = desc->attributes[CUBLASLT_MATMUL_DESC_TRANSA] == CUBLAS_OP_T && desc->attributes[CUBLASLT_MATMUL_DESC_TRANSB] == CUBLAS_OP_N;
    const bool has_e4m3 = a_layout->type == CUDA_R_8F_E4M3 || b_layout->type == CUDA_R_8F_E4M3;
    for (const auto pointer : {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER})
      if (desc->attributes[pointer] % 16 != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!is_tn || !has_e4m3 || a_layout->rows % 16 || a_layout->columns % 16) return CUBLAS_STATUS_NOT_SUPPORTED;
    fake_library.fast_sums = desc->attributes[CUBLASLT_MATMUL_DESC_FAST_ACCUM] & 0xff;
    const size_t modes[] = {desc->attributes[CUBLASLT_MATMUL_DESC_A_SCALE_MODE], desc->attributes[CUBLASLT_MATMUL_DESC_B_SCALE_MODE]};
    if ((modes[0] == 5 && modes[1] == 5) || (modes[0] == 0) != (modes[1] == 0) || (modes[0] && fake_library.fast_sums))
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  const bool accumulate = *static_cast<const float*>(beta) != 0;
  const int microseconds = fake_library.of(*algorithm).microseconds;
  cpu::enqueue(stream, [=, desc = *desc, a_layout = *a_layout, b_layout = *b_layout, d_layout = *d_layout] {
    if (microseconds) usleep(unsigned(microseconds));
    fake_library.most_taken = std::max(fake_library.most_taken, blocks + cpu::nccl_ctas());
    fake_product(desc, a_layout, a, b_layout, b, d_layout, d, accumulate);
    return true;
  });
  return CUBLAS_STATUS_SUCCESS;
}
