// The host's side of CUDA's runtime on the CPU device: errors, memory, streams and events.
//
// Streams. An operation runs at once if all operations before it in its stream have finished. An operation that can't
// finish yet (a collective that waits for other ranks, and everything that waits for it) stays in the stream's queue,
// and goes on whenever the host issues something else or waits. Under GPT_CPU_SCHEDULE=reverse|random every operation
// stays in its queue until the host waits for it, and then the queues are emptied in permuted order. Only the order
// that events and waits guarantee is kept, so a missing cudaStreamWaitEvent gives a wrong result.
#include "cpu/cuda_runtime.h"

#include <omp.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cpu/host_memory.h"
#include "cpu/sanitizers.h"
#include "cpu/schedule.h"

using Clock = std::chrono::steady_clock;

// One recording of an event. A wait is for the recording that was the latest when the wait was issued.
struct Recording {
  std::atomic<bool> done = false;  // other threads may ask
  Clock::time_point when;
};

struct CUevent_st {
  std::shared_ptr<Recording> latest;
};

struct StreamOperation {
  std::function<bool()> poll;            // starts or continues the operation; returns true when it has finished
  std::shared_ptr<Recording> waits_for;  // set instead of poll: the operation has finished when this is recorded
};

struct CUgraph_st {
  std::vector<std::function<bool()>> operations;
  cpu::Counts inside;  // counts of these operations; during the recording, the counts before it
};

struct CUstream_st {
  bool blocking = true;  // it waits for the null stream, and the null stream for it
  int priority = 0;
  std::deque<StreamOperation> queue;
  CUgraph_st* recording = nullptr;
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
  const std::string value = text ? text : "";
  if (value.empty() || value == "forward") return {};
  if (value == "reverse") return {Order::reverse};
  uint64_t seed;
  char rest;
  if (std::sscanf(value.c_str(), "random:%" SCNu64 "%c", &seed, &rest) == 1) return {Order::random, seed};
  fatal("GPT_CPU_SCHEDULE is '%s'; give forward, reverse or random:SEED", value.c_str());
}

// ---- memory

constexpr size_t huge_page = 2 << 20;

using Sizes = std::map<const char*, size_t>;  // bytes of allocations, by their address

std::mutex memory_mutex;
Sizes device_memory, pinned_memory;
std::optional<size_t> share;  // bytes of the host's memory that this process may allocate; set before the first one

// The number of bytes from p to the end of its allocation; 0 if p points into none.
size_t bytes_from(const void* p, const Sizes& sizes) {
  std::lock_guard lock(memory_mutex);
  auto after = sizes.upper_bound(static_cast<const char*>(p));
  if (after == sizes.begin()) return 0;
  auto [start, size] = *std::prev(after);
  size_t offset = size_t(static_cast<const char*>(p) - start);
  return offset < size ? size - offset : 0;
}

// False if [p, p + bytes) starts inside a device allocation and runs past its end.
bool fits(const void* p, size_t bytes) {
  const size_t room = bytes_from(p, device_memory);
  return room == 0 || bytes <= room;
}

cudaError_t allocate(void** pointer, size_t alignment, size_t bytes, Sizes& sizes) {
  if (posix_memalign(pointer, alignment, bytes) != 0) return remember(cudaErrorMemoryAllocation);
  std::lock_guard lock(memory_mutex);
  sizes[static_cast<char*>(*pointer)] = bytes;
  return cudaSuccess;
}

cudaError_t free_allocation(void* pointer, Sizes& sizes) {
  if (!pointer) return cudaSuccess;
  cudaDeviceSynchronize();
  std::lock_guard lock(memory_mutex);
  if (!sizes.erase(static_cast<char*>(pointer))) return remember(cudaErrorInvalidValue);
  std::free(pointer);
  return cudaSuccess;
}

// The free bytes of this process's share of the host's memory. Allocations count at once, although the operating system
// counts memory only when it is used.
size_t free_bytes() {
  std::lock_guard lock(memory_mutex);
  if (!share) share = host_memory_left();
  size_t used = 0;
  for (const Sizes* sizes : {&device_memory, &pinned_memory})
    for (const auto& [start, bytes] : *sizes) used += bytes;
  return std::min({host_memory_left(), process_memory_left(), *share - std::min(*share, used)});
}

// ---- streams

std::vector<CUstream_st*> streams;
size_t queued = 0;  // operations in all queues

void push(CUstream_st* stream, StreamOperation operation) {
  stream->queue.push_back(std::move(operation));
  ++queued;
}

// Runs or continues the first operation of a stream. Returns true if it has finished.
bool advance(CUstream_st* stream) {
  StreamOperation& first = stream->queue.front();
  if (!(first.waits_for ? first.waits_for->done.load() : first.poll())) return false;
  stream->queue.pop_front();
  --queued;
  return true;
}

// Finishes one operation of any stream, in the order of the schedule. Returns false if none can be finished now.
bool advance_any() {
  static Random random(schedule().seed);
  std::vector<CUstream_st*> waiting;
  for (CUstream_st* stream : streams)
    if (!stream->queue.empty()) waiting.push_back(stream);
  const size_t count = waiting.size();
  if (count == 0) return false;
  const size_t start = schedule().order == Order::reverse ? 0 : size_t(random.below(int(count)));
  for (size_t i = 0; i < count; ++i)
    if (advance(waiting[count - 1 - (start + i) % count])) return true;
  return false;
}

// Is this a deadlock? It is if every stream that is not empty waits for an event, because then nothing can ever run.
bool is_stuck() {
  return std::ranges::all_of(streams, [](auto* s) { return s->queue.empty() || s->queue.front().waits_for; });
}

// Waits for other ranks, which may need this core to go on. It yields a few times, then sleeps; MPI's own wait would
// keep the core busy. MPI transfers long messages only while it is called, so the longest sleep is short.
class Patience {
 public:
  void wait() {
    if (++turns_ <= 20) sched_yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(std::min(turns_, 100)));
  }
  void renew() { turns_ = 0; }

 private:
  int turns_ = 0;
};

template <class Finished>
void drain(Finished finished) {
  Patience patience;
  while (!finished()) {
    if (advance_any()) {
      patience.renew();
      continue;
    }
    if (is_stuck()) fatal("streams wait for an event that nothing records any more");
    patience.wait();
  }
}

void drain_stream(cudaStream_t stream) {
  if (stream) return drain([stream] { return stream->queue.empty(); });
  // The legacy default stream waits for every blocking stream.
  drain([] { return std::ranges::all_of(streams, [](auto* s) { return !s->blocking || s->queue.empty(); }); });
}

}  // namespace

bool is_device_memory(const void* p) { return bytes_from(p, device_memory) > 0; }

void share_memory(size_t ranks) {
  std::lock_guard lock(memory_mutex);
  share = host_memory_left() / ranks;
}

const Schedule& schedule() {
  static const Schedule instance = read_schedule();
  return instance;
}

bool streams_are_deferred() { return schedule().order != Order::forward; }

bool runs_at_once(cudaStream_t stream) {
  if (stream && stream->recording) return false;
  if (streams_are_deferred()) {
    if (!stream) drain_stream(nullptr);
    return !stream;
  }
  if (queued == 0) return true;
  if (!stream) drain_stream(nullptr);
  else while (advance_any()) {}
  return !stream || stream->queue.empty();
}

void keep(cudaStream_t stream, std::function<bool()> poll) {
  if (stream->recording) stream->recording->operations.push_back(std::move(poll));
  else push(stream, {std::move(poll), nullptr});
}

void enqueue(cudaStream_t stream, std::function<bool()> poll) {
  if (runs_at_once(stream) && poll()) return;
  if (stream) return keep(stream, std::move(poll));
  for (Patience patience; !poll();) patience.wait();
}

bool check_launch(const Launch& launch) {
  const dim3 &grid = launch.grid, &block = launch.block;
  size_t threads = size_t(block.x) * block.y * block.z;
  bool grid_fits = grid.x && grid.y && grid.z && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535;
  bool block_fits = threads > 0 && threads <= 1024 && block.z <= 64;
  bool makes_clusters = launch.cluster == 1 || (launch.cluster && grid.x % launch.cluster == 0 && threads % 32 == 0);
  bool memory_fits = may_have_its_shared_memory(launch);
  if (!grid_fits || !block_fits || !makes_clusters) remember(cudaErrorInvalidConfiguration);
  else if (!memory_fits) remember(cudaErrorInvalidValue);
  const bool fits = grid_fits && block_fits && makes_clusters && memory_fits;
  counts.launches += fits;
  return fits;
}

}  // namespace cpu

using cpu::remember;

void __threadfence() {
  static const char fences = 0;  // for the race detector, every fence comes after all earlier ones
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

cudaError_t cudaSetDevice(int device) { return remember(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return remember(cudaErrorInvalidDevice);
  *properties = {};
  std::string name = "CPU", line;
  std::ifstream cpuinfo("/proc/cpuinfo");
  while (std::getline(cpuinfo, line) && !line.starts_with("model name")) {}
  if (cpuinfo) name = line.substr(std::min(line.size(), line.find(':') + 2));
  std::snprintf(properties->name, sizeof properties->name, "%s", name.c_str());
  const pid_t process = getpid();
  std::memcpy(properties->uuid.bytes, &process, sizeof process);
  return cudaSuccess;
}

// Compute capability is 9.0, because Hopper's instructions are emulated (kernels/device/hopper.cuh). Each worker is one
// multiprocessor. The build that counts like a GPU has as many as an H100.
#if defined(CPU_LIKE_A_GPU)
static int multiprocessors() { return 132; }
#else
static int multiprocessors() { return omp_get_max_threads(); }
#endif

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return remember(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = multiprocessors(); break;
    case cudaDevAttrIntegrated: *value = 1; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = int(cpu::most_shared_bytes); break;
    default: return remember(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  ++cpu::counts.waits;
  cpu::drain([] { return cpu::queued == 0; });
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
  const cudaError_t error = cpu::allocate(pointer, alignment, bytes, cpu::device_memory);
  if (error != cudaSuccess) return error;
  ++cpu::counts.allocations;
  cpu::counts.allocated_bytes += bytes;
  // Huge pages: with 4 KB pages, streaming kernels spend much of their time on address translation.
  if (alignment == cpu::huge_page) madvise(*pointer, bytes, MADV_HUGEPAGE);
  if (cpu::streams_are_deferred()) std::memset(*pointer, 0xff, bytes);  // NaN, because nothing may rely on zeros
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) { return cpu::free_allocation(pointer, cpu::device_memory); }

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  if (bytes > cpu::free_bytes()) return remember(cudaErrorMemoryAllocation);  // it cannot be paged out
  return cpu::allocate(pointer, 256, std::max<size_t>(bytes, 1), cpu::pinned_memory);
}

cudaError_t cudaFreeHost(void* pointer) { return cpu::free_allocation(pointer, cpu::pinned_memory); }

// Copies as late as any other operation of the stream, for pinned and for pageable memory. CUDA says that copies of
// pageable memory "might be synchronous", so no program may rely on that.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  if (!cpu::fits(to, bytes) || !cpu::fits(from, bytes)) return remember(cudaErrorInvalidValue);
  ++cpu::counts.copies;
  cpu::counts.copied_bytes += bytes;
  cpu::enqueue(stream, [=] { return bytes == 0 || std::memcpy(to, from, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t rows,
                              cudaMemcpyKind, cudaStream_t stream) {
  if (width == 0 || rows == 0) return cudaSuccess;
  if (width > to_pitch || width > from_pitch || !cpu::fits(to, (rows - 1) * to_pitch + width) ||
      !cpu::fits(from, (rows - 1) * from_pitch + width))
    return remember(cudaErrorInvalidValue);
  ++cpu::counts.copies;
  cpu::counts.copied_bytes += rows * width;
  cpu::enqueue(stream, [=] {
    for (size_t row = 0; row < rows; ++row)
      std::memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    return true;
  });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (!cpu::fits(to, bytes)) return remember(cudaErrorInvalidValue);
  ++cpu::counts.memsets;
  cpu::enqueue(stream, [=] { return std::memset(to, value, bytes), true; });
  return cudaSuccess;
}

// ---- graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  stream->recording = new CUgraph_st{{}, cpu::counts};
  return cudaSuccess;
}

// Ends the recording. The recorded operations have not run yet, so they are taken out of the counts.
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (!stream->recording) return remember(cudaErrorInvalidValue);
  *graph = std::exchange(stream->recording, nullptr);
  const cpu::Counts before = (*graph)->inside;
  (*graph)->inside = cpu::counts - before;
  cpu::counts = before;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = new CUgraph_st(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  cpu::counts = cpu::counts + executable->inside;
  ++cpu::counts.graphs;
  for (const auto& operation : executable->operations) cpu::enqueue(stream, operation);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return cudaGraphDestroy(executable); }

// ---- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  *stream = new CUstream_st;
  (*stream)->blocking = !(flags & cudaStreamNonBlocking);
  (*stream)->priority = priority;
  cpu::streams.push_back(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (std::ranges::count(cpu::streams, stream) == 0) return remember(cudaErrorInvalidResourceHandle);
  cpu::drain_stream(stream);
  std::erase(cpu::streams, stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++cpu::counts.waits;
  cpu::drain_stream(stream);
  return cudaSuccess;
}

// Streams go on only while the host calls: a host that waits for something else asks again and again. The answer is what was
// so before that.
// NVIDIA does not say whether "not ready" becomes the last error. Here it does, so that a test notices if a program
// does not clear it.
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const bool was_ready = stream->queue.empty();
  while (cpu::advance_any()) {}
  return remember(was_ready ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (!event) return remember(cudaErrorInvalidResourceHandle);
  if (stream && stream->recording) return remember(cudaErrorInvalidValue);  // graphs of one stream only
  if (!event->latest || event->latest->done) return cudaSuccess;
  if (!stream) return cudaEventSynchronize(event);
  cpu::push(stream, {nullptr, event->latest});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (stream && stream->recording) return remember(cudaErrorInvalidValue);
  auto recording = event->latest = std::make_shared<Recording>();
  cpu::enqueue(stream, [recording] {
    recording->when = Clock::now();
    return recording->done = true;
  });
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ++cpu::counts.waits;
  if (auto recording = event->latest) cpu::drain([&] { return recording->done.load(); });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return remember(!event->latest || event->latest->done ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->latest || !end->latest) return remember(cudaErrorInvalidResourceHandle);
  if (!start->latest->done || !end->latest->done) return remember(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(end->latest->when - start->latest->when).count();
  return cudaSuccess;
}
