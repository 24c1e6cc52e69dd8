// Counts the memory accesses of kernels, as a profiler does on a GPU: requests of warps, the 32-byte sectors of global
// memory they touch, conflicts between the banks of shared memory, barriers, shuffles, instructions of tensor cores.
// The counts are exact and repeatable, and name the lines. A normal build pays nothing: only VARIANT=counts has them.
//
// How accesses are seen. The counting build compiles kernels with -fsanitize=thread, so g++ calls a function such as
// __tsan_read4(address) before each access. But it does not link ThreadSanitizer: these functions are defined here
// (access_counts.cpp). They look up the address. Memory that cudaMalloc returned is global. The block's dynamic shared
// memory and the worker's thread_local variables, which is how __shared__ variables are declared here, are shared
// memory. Any other memory (stacks, constants, the host's) belongs to a single thread and is not counted.
//
// How accesses become requests of warps. The lanes of a warp run one after another, so accesses are kept until the
// lanes meet: at __syncthreads, at a collective of the whole warp, at the block's end. Then the lanes' n-th executions
// of the same instruction since their last meeting form one request. An instruction is a return address together with
// the calls that led there, so a function that is called in two places counts as two, as if it were inlined. A lane
// that leaves a loop early is missing in later requests, as on a GPU. One case differs: on a GPU, a lane that skips an
// iteration is missing in that request; here its next execution takes that place, unless the lanes meet in the loop, so
// fewer requests may be counted.
//
// The cost of a request. Global memory: the sectors that its lanes touch; no cache is modelled. Shared memory has 32
// banks, each 4 bytes wide. In one wavefront, each bank gives one word to all lanes that want it. Accesses of 8 bytes
// are served by half-warps, accesses of 16 bytes by quarter-warps. Atomics cost the same: that a lane waits for the
// result of another is not modelled.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cpu {

struct MemoryCounts {
  int64_t requests = 0;      // number of instructions of warps
  int64_t threads = 0;       // number of accesses of threads
  int64_t bytes = 0;         // bytes that threads asked for
  int64_t transactions = 0;  // global memory: sectors of 32 bytes; shared memory: wavefronts
  int64_t ideal = 0;         // sectors that could hold the distinct bytes asked for; wavefronts without bank conflicts

  MemoryCounts& operator+=(const MemoryCounts& other);
  bool operator==(const MemoryCounts&) const = default;
};

struct AccessCounts {
  MemoryCounts global_loads{}, global_stores{}, global_atomics{}, shared_loads{}, shared_stores{}, shared_atomics{};
  int64_t barriers = 0;             // __syncthreads, counted once per warp
  int64_t shuffles = 0;             // instructions of warps that a GPU needs for shuffles, votes and reductions
  int64_t matrix_instructions = 0;  // of warps; ldmatrix counts as a shared load of 16 bytes per thread

  AccessCounts& operator+=(const AccessCounts& other);
  bool operator==(const AccessCounts&) const = default;
};

// The counts of one line of a kernel. Accesses in helpers such as load() and atomicAdd() (kernels/device/common.cuh,
// kernels/device/instructions.cuh and cpu/) are counted for the line that calls the helper.
struct LineCounts {
  std::string file;  // relative to the repository; ?? where addr2line (binutils) or the debug information is missing
  int line;
  AccessCounts counts;
};

#if defined(CPU_COUNT_ACCESSES)
constexpr bool counts_accesses = true;
void start_counting();                     // waits for the device; resets the counts
AccessCounts stop_counting();              // waits for the device; of all kernels since start_counting
std::vector<LineCounts> counts_by_line();  // of the last counting, most transactions first
#else
constexpr bool counts_accesses = false;
inline void start_counting() {}
inline AccessCounts stop_counting() { return {}; }
inline std::vector<LineCounts> counts_by_line() { return {}; }
#endif

}  // namespace cpu
