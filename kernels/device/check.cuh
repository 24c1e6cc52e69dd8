// Turns the error codes of CUDA's calls into exceptions.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

// Throws when a CUDA call fails; the message names the call, the place and CUDA's reason.
#define CUDA_CHECK(call) check_cuda((call), #call, __FILE__, __LINE__)

inline void check_cuda(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + " at " + file + ":" + std::to_string(line) + ": " +
                           cudaGetErrorString(error));
}

// The answer of a query: is the work done? Throws if it failed.
inline bool is_done(cudaError_t answer) {
  if (answer != cudaErrorNotReady) CUDA_CHECK(answer);
  else cudaGetLastError();  // CUDA may remember this answer, and the next launcher would take it for its own error
  return answer == cudaSuccess;
}

// Has the event been recorded? Throws if work before it failed.
inline bool is_ready(cudaEvent_t event) { return is_done(cudaEventQuery(event)); }
// Has the stream finished all its work? Throws if work in it failed.
inline bool is_ready(cudaStream_t stream) { return is_done(cudaStreamQuery(stream)); }
