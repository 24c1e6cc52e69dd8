// CUDA's runtime, with CUDA's names, for a machine without a GPU: for kernels (qualifiers, barriers, shuffles, atomics,
// maths) and for the host (memory, streams, events). All names have the meaning that the CUDA C++ Programming Guide and
// the Runtime API reference give them; cpu/README.md lists the features that are not modelled. A name that is missing
// here is a compile error, and never silently does nothing.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/device.h"

#define __device__
#define __host__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

// How __shared__ variables are declared. With AddressSanitizer they are plain static variables, because g++ puts red
// zones neither around thread_local arrays nor around arrays of inline functions and templates, unless the function is
// static; one worker runs all blocks in that build. constinit: no constructor runs, as on the GPU, so no use has to
// check whether it has run.
#if defined(__SANITIZE_ADDRESS__)
#define __global__ static inline
#define __shared__ static constinit
#else
#define __global__ inline
#define __shared__ static thread_local constinit
#endif

// ---- maths

// Declares that glibc has vector versions (libmvec) of these, so that loops over them vectorise without -ffast-math.
#if defined(__x86_64__) && defined(__GLIBC__) && (__GLIBC__ > 2 || __GLIBC_MINOR__ >= 35)
extern "C" {
[[gnu::simd("notinbranch")]] float expf(float) noexcept;
[[gnu::simd("notinbranch")]] float logf(float) noexcept;
}
#endif

using std::isfinite;
using std::max;
using std::min;
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint32_t(uint64_t(a) * b >> 32); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }

// ---- waiting for other threads

inline void __syncthreads(cpu::Location where = cpu::Location::current()) { cpu::sync_threads(where); }

inline void __syncwarp(unsigned mask = 0xffffffffu, cpu::Location where = cpu::Location::current()) {
  cpu::sync_warp(mask, where);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, cpu::Location where = cpu::Location::current()) {
  return cpu::shuffle(mask, value, (cpu::lane() & ~(width - 1)) + (source & (width - 1)), where);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, cpu::Location where = cpu::Location::current()) {
  int lane = cpu::lane(), source = lane ^ lanes;
  return cpu::shuffle(mask, value, source < (lane & ~(width - 1)) + width ? source : lane, where);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   cpu::Location where = cpu::Location::current()) {
  int lane = cpu::lane(), source = lane + int(delta);
  return cpu::shuffle(mask, value, source < (lane & ~(width - 1)) + width ? source : lane, where);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 cpu::Location where = cpu::Location::current()) {
  int lane = cpu::lane(), source = lane - int(delta);
  return cpu::shuffle(mask, value, source >= (lane & ~(width - 1)) ? source : lane, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, cpu::Location where = cpu::Location::current()) {
  return cpu::ballot(mask, predicate, where);
}

inline int __any_sync(unsigned mask, int predicate, cpu::Location where = cpu::Location::current()) {
  return cpu::ballot(mask, predicate, where) != 0;
}

inline int __all_sync(unsigned mask, int predicate, cpu::Location where = cpu::Location::current()) {
  return cpu::ballot(mask, predicate, where) == mask;
}

#define CPU_REDUCE(NAME, T, REDUCTION)                                                                  \
  inline T __reduce_##NAME##_sync(unsigned mask, T value, cpu::Location where = cpu::Location::current()) { \
    return cpu::reduce(mask, value, cpu::Reduction::REDUCTION, where);                                  \
  }
CPU_REDUCE(add, int, sum)
CPU_REDUCE(add, unsigned, sum)
CPU_REDUCE(max, int, max)
CPU_REDUCE(max, unsigned, max)
CPU_REDUCE(min, int, min)
CPU_REDUCE(min, unsigned, min)
CPU_REDUCE(and, unsigned, bit_and)
CPU_REDUCE(or, unsigned, bit_or)
CPU_REDUCE(xor, unsigned, bit_xor)
#undef CPU_REDUCE

// ---- atomics: relaxed, as CUDA's are; __threadfence orders them

template <class T>
T atomicAdd(T* address, T value) {
  cpu::counting::record(cpu::counting::Event::atomic, address, sizeof(T));
  return std::atomic_ref(*address).fetch_add(value, std::memory_order_relaxed);
}

template <class T>
T atomicExch(T* address, T value) {
  cpu::counting::record(cpu::counting::Event::atomic, address, sizeof(T));
  return std::atomic_ref(*address).exchange(value, std::memory_order_relaxed);
}

template <class T>
T atomicCAS(T* address, T expected, T desired) {
  cpu::counting::record(cpu::counting::Event::atomic, address, sizeof(T));
  std::atomic_ref(*address).compare_exchange_strong(expected, desired, std::memory_order_relaxed);
  return expected;
}

template <class T>
T atomicMax(T* address, T value) {
  cpu::counting::record(cpu::counting::Event::atomic, address, sizeof(T));
  std::atomic_ref target(*address);
  T old = target.load(std::memory_order_relaxed);
  while (old < value && !target.compare_exchange_weak(old, value, std::memory_order_relaxed)) {}
  return old;
}

template <class T>
T atomicMin(T* address, T value) {
  cpu::counting::record(cpu::counting::Event::atomic, address, sizeof(T));
  std::atomic_ref target(*address);
  T old = target.load(std::memory_order_relaxed);
  while (value < old && !target.compare_exchange_weak(old, value, std::memory_order_relaxed)) {}
  return old;
}

void __threadfence();

// ---- the host's side

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
};
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice,
                      cudaMemcpyDefault };
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventDisableTiming = 2 };
enum { cudaHostRegisterDefault = 0 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrIntegrated = 18,  // 1: the device uses the host's memory
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
typedef struct CUevent_st* cudaEvent_t;

struct cudaUUID_t {
  char bytes[16];
};

struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  int l2CacheSize;  // 0: there is none
};

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceGetPCIBusId(char* id, int bytes, int device);  // empty: a processor is on no such bus
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes);

// Functions of the driver by their names: of cuda.h here, that one is cuModuleGetLoadingMode.
#define CUDART_VERSION 13000
enum { cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found);

cudaError_t cudaMalloc(void** pointer, size_t bytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void* pointer);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
// `rows` rows of `width` bytes, whose beginnings are a pitch apart.
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                              cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
inline cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes); }

// Priorities are stored, but have no effect: streams take turns.
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream);
// Graphs of one stream: operations that it gets between begin and end are recorded, and not executed.
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
typedef struct CUgraph_st* cudaGraph_t;
typedef struct CUgraph_st* cudaGraphExec_t;
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
inline cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

template <class T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(pointer), bytes);
}

// The launch of a kernel as a call. Its only attribute is the number of blocks in a cluster; y and z are 1.
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const dim3 cluster = config->numAttrs ? config->attrs->val.clusterDim : dim3();
  cpu::launcher("of cudaLaunchKernelEx", kernel, cpu::address_of(kernel), config->gridDim, config->blockDim,
                config->dynamicSmemBytes, config->stream,
                cluster.y == 1 && cluster.z == 1 ? cluster.x : 0)(Parameters(arguments)...);
  return cudaPeekAtLastError();
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  if (bytes < 0 || size_t(bytes) > cpu::most_shared_bytes) return cudaErrorInvalidValue;
  cpu::allowed_shared_bytes(cpu::address_of(kernel)) = size_t(bytes);
  return cudaSuccess;
}
