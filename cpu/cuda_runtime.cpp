// The host's side of CUDA's runtime on the CPU device: errors, memory, streams and events.
//
// Streams. An operation runs at once if nothing before it in its stream is unfinished; what can't finish yet (a
// collective that waits for other ranks, and all that waits for it) stays in the stream's queue and goes on whenever
// the host issues something else or waits. Under GPT_CPU_SCHEDULE=reverse|random every operation is kept in its queue
// until somebody waits for it, and then queues are emptied in permuted order: only what events and waits promise is
// kept, so a missing cudaStreamWaitEvent shows up as a wrong result.
#include "cpu/cuda_runtime.h"

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/sanitizers.h"
#include "cpu/schedule.h"

using Clock = std::chrono::steady_clock;

// A recording of an event; waits refer to the recording that was the latest when they were issued.
struct Recording {
  std::atomic<bool> done = false;  // other threads may ask
  Clock::time_point when;
};

struct CUevent_st {
  std::shared_ptr<Recording> latest;
};

struct StreamOperation {
  std::function<bool()> poll;            // runs, or goes on with, the operation; true: it is finished
  std::shared_ptr<Recording> waits_for;  // instead of poll: finished when this is recorded
};

struct CUstream_st {
  bool blocking = true;  // waits for the null stream and is waited for by it
  std::deque<StreamOperation> queue;
};

namespace cpu {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

Schedule read_schedule() {
  const char* text = std::getenv("GPT_CPU_SCHEDULE");
  std::string value = text ? text : "forward";
  if (value.empty() || value == "forward") return {};
  if (value == "reverse") return {Order::reverse, 0};
  char* end = nullptr;
  if (value.rfind("random:", 0) == 0) {
    uint64_t seed = std::strtoull(value.c_str() + 7, &end, 10);
    if (end != value.c_str() + 7 && *end == 0) return {Order::random, seed};
  }
  fatal("GPT_CPU_SCHEDULE is '%s'; give forward, reverse or random:SEED", value.c_str());
}

// ---- memory

constexpr size_t huge_page = 2 << 20;

struct Allocations {
  std::mutex mutex;
  std::map<const char*, size_t> device, pinned;  // start -> bytes
  size_t share = SIZE_MAX;                       // of the host's memory, for device memory

  // True unless [p, p + bytes) starts inside a device allocation and runs past its end.
  bool fits(const void* p, size_t bytes) {
    std::lock_guard lock(mutex);
    auto after = device.upper_bound(static_cast<const char*>(p));
    if (after == device.begin()) return true;
    auto [start, size] = *std::prev(after);
    size_t offset = size_t(static_cast<const char*>(p) - start);
    return offset >= size || offset + bytes <= size;
  }
  bool is_pinned(const void* p) {
    std::lock_guard lock(mutex);
    auto after = pinned.upper_bound(static_cast<const char*>(p));
    return after != pinned.begin() &&
           static_cast<const char*>(p) < std::prev(after)->first + std::prev(after)->second;
  }
};

Allocations& allocations() {
  static Allocations instance;
  return instance;
}

size_t read_number(const char* path, size_t otherwise) {
  std::ifstream file(path);
  size_t value;
  return file >> value ? value : otherwise;
}

// What the machine can still give: MemAvailable, or less where a container's limit is lower.
size_t available_bytes() {
  size_t available = size_t(sysconf(_SC_AVPHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  std::ifstream meminfo("/proc/meminfo");
  for (std::string key, rest; meminfo >> key && std::getline(meminfo, rest);)
    if (key == "MemAvailable:") available = std::stoull(rest) * 1024;
  size_t limit = read_number("/sys/fs/cgroup/memory.max", SIZE_MAX);
  size_t used = read_number("/sys/fs/cgroup/memory.current", 0);
  return limit == SIZE_MAX ? available : std::min(available, limit > used ? limit - used : 0);
}

// Of this process's share, if other ranks are on this host.
size_t free_bytes() {
  Allocations& all = allocations();
  std::lock_guard lock(all.mutex);
  size_t used = 0;
  for (const auto& [start, bytes] : all.device) used += bytes;
  return std::min(available_bytes(), all.share - std::min(all.share, used));
}

// ---- streams

std::vector<CUstream_st*>& streams() {
  static std::vector<CUstream_st*> all;
  return all;
}

size_t queued = 0;  // operations in all queues

void push(CUstream_st* stream, StreamOperation operation) {
  stream->queue.push_back(std::move(operation));
  ++queued;
}

// Tries the first operation of a stream; true: it is finished.
bool advance(CUstream_st* stream) {
  StreamOperation& first = stream->queue.front();
  if (!(first.waits_for ? first.waits_for->done.load() : first.poll())) return false;
  stream->queue.pop_front();
  --queued;
  return true;
}

// One operation of any stream, chosen by the schedule; false: none can be finished now.
bool advance_any() {
  static Random random(schedule().seed);
  std::vector<CUstream_st*> waiting;
  for (CUstream_st* stream : streams())
    if (!stream->queue.empty()) waiting.push_back(stream);
  const size_t count = waiting.size();
  if (count == 0) return false;
  const size_t start = schedule().order == Order::reverse ? 0 : size_t(random.below(int(count)));
  for (size_t i = 0; i < count; ++i)
    if (advance(waiting[count - 1 - (start + i) % count])) return true;
  return false;
}

// Nothing runs, and nothing that runs later could change that: every stream waits for an event.
bool is_stuck() {
  return std::all_of(streams().begin(), streams().end(),
                     [](auto* s) { return s->queue.empty() || s->queue.front().waits_for; });
}

template <class Finished>
void drain(Finished finished) {
  while (!finished()) {
    if (advance_any()) continue;
    if (is_stuck()) fatal("streams wait for an event that nothing records any more");
    sched_yield();  // other ranks may need this core to go on
  }
}

void drain_null_stream() {  // the legacy default stream waits for every blocking stream
  drain([] {
    return std::all_of(streams().begin(), streams().end(), [](auto* s) { return !s->blocking || s->queue.empty(); });
  });
}

void drain_stream(cudaStream_t stream) {
  if (!stream) drain_null_stream();
  else drain([stream] { return stream->queue.empty(); });
}

void drain_all() {
  drain([] { return std::all_of(streams().begin(), streams().end(), [](auto* s) { return s->queue.empty(); }); });
}

}  // namespace

void share_memory(size_t ranks) {
  std::lock_guard lock(allocations().mutex);
  allocations().share = available_bytes() / ranks;
}

const Schedule& schedule() {
  static const Schedule instance = read_schedule();
  return instance;
}

bool streams_are_deferred() { return schedule().order != Order::forward; }

bool runs_at_once(cudaStream_t stream) {
  if (streams_are_deferred()) {
    if (!stream) drain_null_stream();
    return !stream;
  }
  if (queued == 0) return true;
  if (!stream) drain_null_stream();
  else while (advance_any()) {}
  return !stream || stream->queue.empty();
}

void keep(cudaStream_t stream, std::function<bool()> poll) { push(stream, {std::move(poll), nullptr}); }

void enqueue(cudaStream_t stream, std::function<bool()> poll) {
  if (runs_at_once(stream) && poll()) return;
  if (stream) return keep(stream, std::move(poll));
  while (!poll()) sched_yield();
}

bool check_launch(const Launch& launch) {
  const dim3 &grid = launch.grid, &block = launch.block;
  size_t threads = size_t(block.x) * block.y * block.z;
  bool grid_fits = grid.x && grid.y && grid.z && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
  if (!grid_fits || threads == 0 || threads > 1024 || block.z > 64)
    return remember(cudaErrorInvalidConfiguration) == cudaSuccess;
  if (launch.shared_bytes > size_t(cpu_max_dynamic_shared_bytes)) return remember(cudaErrorInvalidValue) == cudaSuccess;
  return true;
}

}  // namespace cpu

using cpu::remember;

void __threadfence() {
  static const char fences = 0;  // to the race detector, every fence comes after all earlier ones
  std::atomic_thread_fence(std::memory_order_seq_cst);
  cpu::sanitizers::release(&fences);
  cpu::sanitizers::acquire(&fences);
}

// ---- errors and devices

#define CPU_ERRORS(X)                                                                                          \
  X(cudaSuccess, "no error")                                                                                   \
  X(cudaErrorInvalidValue, "invalid argument")                                                                 \
  X(cudaErrorMemoryAllocation, "out of memory")                                                                \
  X(cudaErrorInvalidConfiguration, "invalid configuration argument (grid, or more than 1024 threads a block)") \
  X(cudaErrorInvalidDevicePointer, "invalid device pointer")                                                   \
  X(cudaErrorInvalidDevice, "invalid device ordinal")                                                          \
  X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                                 \
  X(cudaErrorNotReady, "device not ready")

const char* cudaGetErrorName(cudaError_t error) {
#define CPU_NAME(code, text) \
  if (error == code) return #code;
  CPU_ERRORS(CPU_NAME)
  return "unknown error";
}

const char* cudaGetErrorString(cudaError_t error) {
#define CPU_TEXT(code, text) \
  if (error == code) return text;
  CPU_ERRORS(CPU_TEXT)
  return "unknown error";
}

cudaError_t cudaPeekAtLastError() { return cpu::last_error; }

cudaError_t cudaGetLastError() { return std::exchange(cpu::last_error, cudaSuccess); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return remember(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return remember(cudaErrorInvalidDevice);
  *properties = {};
  std::string name = "CPU";
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);)
    if (line.rfind("model name", 0) == 0) {
      name = line.substr(std::min(line.size(), line.find(':') + 2));
      break;
    }
  std::snprintf(properties->name, sizeof properties->name, "%s", name.c_str());
  const pid_t process = getpid();
  std::memcpy(properties->uuid.bytes, &process, sizeof process);
  properties->totalGlobalMem = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  properties->sharedMemPerBlock = 48 * 1024;
  properties->sharedMemPerBlockOptin = cpu_max_dynamic_shared_bytes;
  properties->multiProcessorCount = int(sysconf(_SC_NPROCESSORS_ONLN));
  properties->maxThreadsPerBlock = 1024;
  properties->warpSize = 32;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  cpu::drain_all();
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = cpu::free_bytes();
  *total_bytes = size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  return cudaSuccess;
}

// ---- memory

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > cpu::free_bytes()) return remember(cudaErrorMemoryAllocation);
  const size_t alignment = bytes >= cpu::huge_page ? cpu::huge_page : 256;
  if (posix_memalign(pointer, alignment, bytes) != 0) return remember(cudaErrorMemoryAllocation);
  // Huge pages: with 4 KB pages, streaming kernels spend much of their time on address translation.
  if (alignment == cpu::huge_page) madvise(*pointer, bytes, MADV_HUGEPAGE);
  if (cpu::streams_are_deferred()) std::memset(*pointer, 0xff, bytes);  // NaN: nothing may count on zeros
  auto& all = cpu::allocations();
  std::lock_guard lock(all.mutex);
  all.device[static_cast<char*>(*pointer)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  cudaDeviceSynchronize();
  auto& all = cpu::allocations();
  std::lock_guard lock(all.mutex);
  auto found = all.device.find(static_cast<char*>(pointer));
  if (found == all.device.end()) return remember(cudaErrorInvalidValue);
  all.device.erase(found);
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  if (posix_memalign(pointer, 256, std::max<size_t>(bytes, 1)) != 0) return remember(cudaErrorMemoryAllocation);
  auto& all = cpu::allocations();
  std::lock_guard lock(all.mutex);
  all.pinned[static_cast<char*>(*pointer)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  if (!pointer) return cudaSuccess;
  cudaDeviceSynchronize();
  auto& all = cpu::allocations();
  std::lock_guard lock(all.mutex);
  if (!all.pinned.erase(static_cast<char*>(pointer))) return remember(cudaErrorInvalidValue);
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  auto& all = cpu::allocations();
  if (!all.fits(to, bytes) || !all.fits(from, bytes)) return remember(cudaErrorInvalidValue);
  cpu::enqueue(stream, [=] { return std::memcpy(to, from, bytes), true; });
  // Copies from or to pageable memory are complete, as far as the host can tell, when the call returns.
  bool pageable = (kind == cudaMemcpyHostToDevice && !all.is_pinned(from)) ||
                  (kind == cudaMemcpyDeviceToHost && !all.is_pinned(to)) || kind == cudaMemcpyDefault;
  return pageable ? cudaStreamSynchronize(stream) : cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (!cpu::allocations().fits(to, bytes)) return remember(cudaErrorInvalidValue);
  cpu::enqueue(stream, [=] { return std::memset(to, value, bytes), true; });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

// ---- streams and events

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  *stream = new CUstream_st;
  (*stream)->blocking = !(flags & cudaStreamNonBlocking);
  cpu::streams().push_back(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  auto& all = cpu::streams();
  auto found = std::find(all.begin(), all.end(), stream);
  if (found == all.end()) return remember(cudaErrorInvalidResourceHandle);
  cpu::drain_stream(stream);
  all.erase(found);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  cpu::drain_stream(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (!event) return remember(cudaErrorInvalidResourceHandle);
  if (!event->latest || event->latest->done) return cudaSuccess;
  if (!stream) return cudaEventSynchronize(event);
  cpu::push(stream, {nullptr, event->latest});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto recording = event->latest = std::make_shared<Recording>();
  cpu::enqueue(stream, [recording] {
    recording->when = Clock::now();
    return recording->done = true;
  });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (auto recording = event->latest) cpu::drain([&] { return recording->done.load(); });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return !event->latest || event->latest->done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->latest || !end->latest) return remember(cudaErrorInvalidResourceHandle);
  if (!start->latest->done || !end->latest->done) return remember(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(end->latest->when - start->latest->when).count();
  return cudaSuccess;
}
