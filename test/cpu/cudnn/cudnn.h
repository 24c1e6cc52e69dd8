// cuDNN for tests on the CPU device, so that extensions/cudnn/kernels/attention.cpp runs where there is no GPU: what it uses
// of NVIDIA's interface, with the same names. cudnn_frontend.h has the graphs.
#pragma once

#include "cpu/cuda_runtime.h"

enum cudnnStatus_t { CUDNN_STATUS_SUCCESS = 0, CUDNN_STATUS_BAD_PARAM = 2000 };
struct cudnnContext {
  cudaStream_t stream = nullptr;
};
using cudnnHandle_t = cudnnContext*;

inline size_t cudnnGetVersion() { return 91900; }
inline const char* cudnnGetErrorString(cudnnStatus_t) { return "bad parameter"; }
inline cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) { return *handle = new cudnnContext, CUDNN_STATUS_SUCCESS; }
inline cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) { return handle->stream = stream, CUDNN_STATUS_SUCCESS; }
