// Memory of the CPU device: its devices' memory, and the host's pinned memory.
#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "cpu/block.h"
#include "cpu/host_memory.h"
#include "cpu/log.h"
#include "cpu/streams.h"
#include "cpu/switches.h"

namespace cpu {
namespace {

constexpr size_t huge_page = 2 << 20;

struct Allocation {
  size_t bytes;
  int device;
};
using Allocations = std::map<const char*, Allocation>;  // by address

std::mutex memory_mutex;
Allocations device_memory, pinned_memory;
std::optional<size_t> share;  // bytes of the host's memory that this process may allocate; set before the first one

// The allocation that p points into, and the bytes from p to its end; none: p points into none.
std::optional<Allocation> rest_of_allocation(const void* p, const Allocations& allocations = device_memory) {
  std::lock_guard lock(memory_mutex);
  const auto after = allocations.upper_bound(static_cast<const char*>(p));
  if (after == allocations.begin()) return {};
  const auto& [start, allocation] = *std::prev(after);
  const size_t offset = size_t(static_cast<const char*>(p) - start);
  if (offset >= allocation.bytes) return {};
  return Allocation{allocation.bytes - offset, allocation.device};
}

cudaError_t add(void* pointer, size_t bytes, Allocations& allocations) {
  std::lock_guard lock(memory_mutex);
  allocations[static_cast<char*>(pointer)] = {bytes, current_device()};
  return cudaSuccess;
}

cudaError_t remove(void* pointer, Allocations& allocations) {
  cudaDeviceSynchronize();
  std::lock_guard lock(memory_mutex);
  return remember(allocations.erase(static_cast<char*>(pointer)) ? cudaSuccess : cudaErrorInvalidValue);
}

// The unused bytes of this process's share of the host's memory. Allocations count at once, although the operating
// system counts memory only when it is used.
size_t share_left() {
  std::lock_guard lock(memory_mutex);
  if (!share) share = host_memory_left();
  size_t used = 0;
  for (const Allocations* allocations : {&device_memory, &pinned_memory})
    for (const auto& [start, allocation] : *allocations) used += allocation.bytes;
  return *share - std::min(*share, used);
}

// Free bytes. The stacks of fibers take a part of a limit of this process (ulimit): a worker runs a block at a time, and
// makes a stack for each of its threads that waits. They come with the first kernels, so they are left out from the
// start.
size_t free_bytes() {
  const size_t most = size_t(omp_get_max_threads()) * max_threads, left = process_memory_left();
  const size_t to_come = (most - std::min(most, Fiber::stacks.load())) * stack_bytes;
  return std::min({host_memory_left(), left - std::min(left, to_come), share_left()});
}

}  // namespace

bool is_device_memory(const void* p) { return rest_of_allocation(p).has_value(); }

bool is_foreign(const void* p) {
  const auto rest = rest_of_allocation(p);
  return rest && rest->device != current_device();
}

bool is_out_of_bounds(const void* p, size_t bytes) {
  const auto rest = rest_of_allocation(p);
  return rest && (bytes > rest->bytes || rest->device != current_device());
}

void share_memory(size_t ranks) {
  std::lock_guard lock(memory_mutex);
  share = host_memory_left() / ranks;
}

}  // namespace cpu

using cpu::remember, cpu::is_out_of_bounds;

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = cpu::free_bytes();
  *total_bytes = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  return cpu::call_driver();
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (const cudaError_t error = cpu::call_driver()) return error;
  if (bytes > cpu::free_bytes()) return remember(cudaErrorMemoryAllocation);
  if (cpu::switches().loads_late) cpu::drain_device();
  const size_t alignment = bytes >= cpu::huge_page ? cpu::huge_page : 256;
  if (posix_memalign(pointer, alignment, bytes) != 0) return remember(cudaErrorMemoryAllocation);
  ++cpu::counts.allocations;
  cpu::counts.allocated_bytes += bytes;
  // Huge pages: with 4 KB pages, streaming kernels spend much of their time on address translation.
  if (alignment == cpu::huge_page) madvise(*pointer, bytes, MADV_HUGEPAGE);
  if (cpu::streams_are_deferred()) std::memset(*pointer, 0xff, bytes);  // NaN, because nothing may rely on zeros
  return cpu::add(*pointer, bytes, cpu::device_memory);
}

cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  const cudaError_t error = cpu::remove(pointer, cpu::device_memory);
  if (error == cudaSuccess) std::free(pointer);
  return error;
}

// Pins memory. The operating system already counts pages that exist; in this process's share they count from here on.
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  if (const cudaError_t error = cpu::call_driver()) return error;
  if (bytes > cpu::share_left()) return remember(cudaErrorMemoryAllocation);
  if (cpu::switches().loads_late) cpu::drain_device();
  return cpu::add(pointer, bytes, cpu::pinned_memory);
}

cudaError_t cudaHostUnregister(void* pointer) { return cpu::remove(pointer, cpu::pinned_memory); }

// Copies as late as any other operation of the stream, for pinned and for pageable memory. CUDA says that copies of
// pageable memory "might be synchronous", so no program may rely on that.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                              cudaMemcpyKind, cudaStream_t stream) {
  if (!cpu::is_here(stream)) return remember(cudaErrorInvalidResourceHandle);
  if (rows == 0) return cudaSuccess;
  if (width > to_pitch || width > from_pitch || is_out_of_bounds(to, (rows - 1) * to_pitch + width) ||
      is_out_of_bounds(from, (rows - 1) * from_pitch + width))
    return remember(cudaErrorInvalidValue);
  ++cpu::counts.copies;
  cpu::counts.copied_bytes += rows * width;
  cpu::log("copy %d %zu", cpu::number_of(stream), rows * width);
  cpu::enqueue(stream, [=] {
    for (size_t row = 0; row < rows && width > 0; ++row)
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    return true;
  });
  return cudaSuccess;
}

// Does the host wait for a copy? CUDA Runtime API, "API synchronization behavior". From pageable memory the bytes are
// taken at once, but may arrive later; between two places of the device, nothing has to be done yet.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const bool is_to = cpu::is_device_memory(to), is_from = cpu::is_device_memory(from);
  if (is_out_of_bounds(to, bytes) || is_out_of_bounds(from, bytes)) return remember(cudaErrorInvalidValue);
  if (cpu::streams_are_deferred() && is_to && !is_from && !cpu::rest_of_allocation(from, cpu::pinned_memory)) {
    const auto taken = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
    const cudaError_t error = cudaMemcpyAsync(to, taken->data(), bytes, kind);
    return cpu::enqueue(nullptr, [taken] { return true; }), error;
  }
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind);
  if (!is_to || !is_from) cpu::drain_stream(nullptr);
  return error;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (!cpu::is_here(stream)) return remember(cudaErrorInvalidResourceHandle);
  if (is_out_of_bounds(to, bytes)) return remember(cudaErrorInvalidValue);
  ++cpu::counts.memsets;
  cpu::log("memset %d %zu", cpu::number_of(stream), bytes);
  cpu::enqueue(stream, [=] { return std::memset(to, value, bytes), true; });
  return cudaSuccess;
}
