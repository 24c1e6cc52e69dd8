// Which library multiplies matrices: cuBLASLt on a GPU, oneDNN on the CPU device. kernels/matmul.cuh describes the
// functions of both. A test gives the CPU device a stand-in for cuBLASLt (test/cpu/cublaslt), to run the host's code of
// the GPU's products.
#pragma once

#if defined(__CUDACC__) || defined(GPT_CUBLASLT)
#include "kernels/gemm/cublaslt.h"
#else
#include "cpu/gemm.h"
#endif
