// NCCL's interface, with NCCL's names, for ranks without a GPU: the data is sent over MPI (cpu/nccl.cpp). All names
// have the meaning that NVIDIA's NCCL user guide gives them; a name that is missing here is a compile error.
//
// As with NCCL, a call only issues the operation to its stream, and all ranks get the same bits. NCCL promises no more
// about sums: they are rounded to the element type at each addition, in an order that depends on the collective, on the
// size of the buffer, on the place in it and on the machines. A program that relies on more is wrong on some GPUs.
//
//   GPT_CPU_NCCL=direct   (default) Sums are added in rank order, in float for 16-bit types, and rounded once.
//   GPT_CPU_NCCL=ring     As strict as NCCL:
//     - Sums are rounded at each hop of a ring, which begins at another rank for each block (cpu/nccl_sums.h).
//     - A connection at first use blocks the host until all ranks are there. It is refused after the process
//       has launched a kernel: then a model has taken the memory that was left, and others may wait for this host.
//     - A communicator is not split while operations on it are under way, and its ranks end it together.
#pragma once

#include <cstddef>

#include "cpu/cuda_runtime.h"

enum ncclResult_t { ncclSuccess, ncclSystemError, ncclInvalidUsage, ncclInProgress };
enum ncclDataType_t { ncclUint8, ncclInt32, ncclUint64, ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16,
                      ncclFloat = ncclFloat32 };
enum ncclRedOp_t { ncclSum, ncclMax, ncclMin, ncclAvg };
constexpr int NCCL_SPLIT_NOCOLOR = -1;

struct ncclUniqueId {
  char internal[128];
};
struct ncclConfig_t {
  int maxCTAs, cgaClusterSize;
};
#define NCCL_CONFIG_INITIALIZER {}
typedef struct ncclComm* ncclComm_t;

ncclResult_t ncclGetUniqueId(ncclUniqueId* id);
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config);
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t* config);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error);  // no error: MPI ends the process instead
ncclResult_t ncclCommCount(ncclComm_t comm, int* count);
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank);
const char* ncclGetErrorString(ncclResult_t result);
const char* ncclGetLastError(ncclComm_t comm);

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count, ncclDataType_t type,
                               ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream);
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclGroupStart();
ncclResult_t ncclGroupEnd();

namespace cpu {
size_t nccl_bytes_sent();  // bytes that this process has given to MPI so far
size_t nccl_sends();       // its calls of ncclSend so far
size_t nccl_operations();  // operations that it has given to streams so far: a group is one for each of its streams
int nccl_ctas();           // CUDA blocks that the operations under way would have at most, each of which takes a multiprocessor
}
