// Streams, events and graphs of the CPU device.
//
// An operation runs at once if all operations before it in its stream have finished. An operation that can't finish yet
// (a collective that waits for other ranks, and everything that waits for it) stays in the stream's queue, and goes on
// whenever the host issues something else or waits. Under GPT_CPU_SCHEDULE=reverse|random every operation stays in its
// queue until the host waits for it, and then the queues are emptied in permuted order. Only the order that events and
// waits guarantee is kept, so a missing cudaStreamWaitEvent gives a wrong result. Under GPT_CPU_QUEUE=N a queue has at
// most N operations: the host waits before it issues another one.
//
// The null stream has a queue, too. Its work (cudaMemset, cudaMemcpy) has no order with the work of streams that were
// created with cudaStreamNonBlocking: under reverse it runs before all their pending work, under random somewhere in
// between.
#include "cpu/streams.h"

#include <sched.h>

#include <algorithm>
#include <map>
#include <thread>

#include "cpu/log.h"
#include "cpu/switches.h"

namespace cpu {
namespace {

std::vector<CUstream_st*> streams;  // in the order of their numbers
size_t queued = 0;                  // operations in all queues

// The stream, or for null the null stream of the current device. Null streams come last, so that `reverse` takes them
// first.
CUstream_st* real(cudaStream_t stream) {
  static auto& null_streams = *new std::map<int, CUstream_st>;  // used even while the program's objects are destroyed
  if (stream) return stream;
  const auto [found, is_new] = null_streams.try_emplace(current_device(), CUstream_st{current_device()});
  if (is_new) streams.push_back(&found->second);
  return &found->second;
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

// Where no operation can go on, it waits for other ranks, which may need this core to go on. It yields a few times, then
// sleeps; MPI's own wait would keep the core busy. MPI transfers long messages only while it is called, so the longest sleep
// is short.
template <class Finished>
void drain(Finished finished) {
  for (int waits = 0; !finished();) {
    if (advance_any()) waits = 0;
    else if (is_stuck()) fatal("streams wait for an event that nothing records any more");
    else if (++waits <= 20) sched_yield();
    else std::this_thread::sleep_for(std::chrono::microseconds(std::min(waits, 100)));
  }
}

// Waits until all streams for which `concerns` holds are empty.
template <class Concerns>
void drain_streams(Concerns concerns) {
  drain([&] { return std::ranges::all_of(streams, [&](auto* s) { return !concerns(s) || s->queue.empty(); }); });
}

void push(CUstream_st* stream, StreamOperation operation) {
  drain([&] { return stream->queue.size() < switches().longest_queue; });
  stream->queue.push_back(std::move(operation));
  ++queued;
}

}  // namespace

int number_of(cudaStream_t stream) { return stream ? stream->number : 0; }

bool is_here(cudaStream_t stream) { return !stream || stream->device == current_device(); }

// The null stream waits for every blocking stream.
void drain_stream(cudaStream_t stream) {
  if (stream) return drain([stream] { return stream->queue.empty(); });
  drain_streams([](CUstream_st* s) { return s->blocking && s->device == current_device(); });
}

void drain_device() {
  drain_streams([](CUstream_st* s) { return s->device == current_device(); });
}

bool streams_are_deferred() { return schedule().order != Order::forward; }

bool runs_at_once(cudaStream_t stream) {
  CUstream_st* const own = real(stream);
  if (own->recording) return false;
  if (queued == 0) return !streams_are_deferred();
  if (!stream) drain_streams([own](CUstream_st* s) { return s != own && s->blocking && s->device == own->device; });
  else if (own->blocking) drain_stream(real(nullptr));
  if (streams_are_deferred()) return false;
  while (advance_any()) {}
  return own->queue.empty();
}

void keep(cudaStream_t stream, std::function<bool()> poll) {
  CUstream_st* const own = real(stream);
  if (own->recording) own->recording->operations.push_back(std::move(poll));
  else push(own, {std::move(poll), nullptr});
}

void enqueue(cudaStream_t stream, std::function<bool()> poll) {
  if (!is_here(stream)) return void(remember(cudaErrorInvalidResourceHandle));
  if (!runs_at_once(stream) || !poll()) keep(stream, std::move(poll));
}

}  // namespace cpu

using cpu::remember;

cudaError_t cudaDeviceSynchronize() {
  ++cpu::counts.waits;
  cpu::drain_device();
  return cudaSuccess;
}

// ---- graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (!stream || stream->recording) return remember(cudaErrorInvalidValue);
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
  if (!cpu::is_here(stream)) return remember(cudaErrorInvalidResourceHandle);
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
  if (const cudaError_t error = cpu::call_driver()) return error;
  static int created = 0;
  *stream = new CUstream_st{cpu::current_device(), !(flags & cudaStreamNonBlocking), priority, {}, ++created};
  cpu::log("stream %d %d", created, priority);
  cpu::streams.insert(std::ranges::upper_bound(cpu::streams, created, {}, &CUstream_st::number), *stream);
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

// Streams go on only while the host calls: a host that waits for something else asks again and again. The answer is the
// state before that. NVIDIA does not say whether "not ready" becomes the last error. Here it does, so that a test
// notices if a program does not clear it.
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ++cpu::counts.queries;
  const bool was_ready = cpu::real(stream)->queue.empty();
  while (cpu::advance_any()) {}
  return remember(was_ready ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ++cpu::counts.event_waits;
  if (!event || !cpu::is_here(stream)) return remember(cudaErrorInvalidResourceHandle);
  if (stream && stream->recording) return remember(cudaErrorInvalidValue);  // graphs of one stream only
  cpu::log("wait %d %zu", cpu::number_of(stream), event->latest ? event->latest->number : 0);
  if (!event->latest || event->latest->done) return cudaSuccess;
  cpu::push(cpu::real(stream), {nullptr, event->latest});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (const cudaError_t error = cpu::call_driver()) return error;
  ++cpu::counts.events;
  *event = new CUevent_st{cpu::current_device(), nullptr};
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ++cpu::counts.records;
  if (stream && stream->recording) return remember(cudaErrorInvalidValue);
  if (!cpu::is_here(stream) || event->device != cpu::current_device()) return remember(cudaErrorInvalidResourceHandle);
  static size_t recorded = 0;
  auto recording = event->latest = std::make_shared<cpu::Recording>(++recorded);
  cpu::log("record %d %zu", cpu::number_of(stream), recorded);
  cpu::enqueue(stream, [recording] {
    recording->when = cpu::Clock::now();
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
  ++cpu::counts.queries;
  return remember(!event->latest || event->latest->done ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  ++cpu::counts.queries;
  if (!start->latest || !end->latest) return remember(cudaErrorInvalidResourceHandle);
  if (!start->latest->done || !end->latest->done) return remember(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(end->latest->when - start->latest->when).count();
  return cudaSuccess;
}
