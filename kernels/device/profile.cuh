// Observes the launchers: a table of their times (`--profile`), a timeline (`--trace`), and a listener that is told
// which tensors they write (`--trace-tensors`, runtime/traces/tensor_log.cuh).
//
// A launcher opens `KernelRange range("name", stream, {bytes, flops}, {{out, count}})`. bytes is the least that its kernels
// must move through device memory, flops the arithmetic that they do; both come from the formulas in the file's header
// comment, those of the model's operations from kernels/counts.h. Then come the tensors that the launcher always writes;
// `range.writes(out, count)` adds those that it writes only sometimes. When nothing is observed, each costs one branch. At
// its end the range checks that the launches in it have succeeded. A range is an NVTX range, too, so NVIDIA's profilers
// show the launchers' names.
//
// Two events on the range's stream measure its time; they are destroyed when they have been read.
#pragma once

#include <unistd.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <initializer_list>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/device/bytes.h"
#include "kernels/device/check.cuh"
#include "kernels/device/not_copied.h"
#include "kernels/device/timeline.h"

struct WrittenTensor {
  std::variant<const float*, const __nv_bfloat16*, const __half*, const __nv_fp8_e4m3*, const __nv_fp8_e5m2*>
      values;  // device memory
  size_t count;
  bool accumulated = false;  // the launcher added to values of earlier micro-batches
};

// Nanoseconds since 1970: the only clock that all ranks of a job share. It is read once: setting it later changes
// nothing.
inline int64_t wall_clock() {
  using namespace std::chrono;
  static const auto steady_began = system_clock::now().time_since_epoch() - steady_clock::now().time_since_epoch();
  return nanoseconds(steady_began + steady_clock::now().time_since_epoch()).count();
}

class Profiler {
 public:
  static Profiler& instance() {
    static Profiler profiler;
    return profiler;
  }

  bool enabled = false;  // totals are wanted
  bool trace = false;    // a timeline is wanted
  int64_t origin = 0;    // the wall_clock() that is time 0 of the timeline, the same on all ranks
  TraceContext context;  // where in the run the next launchers are called

  // If set, it is called for each output of an operation (number 0, 1, ...), after the operation has been launched.
  std::function<void(const char* operation, int number, const WrittenTensor&, cudaStream_t)> listener;

  // Sets the stream's name in the timeline. A stream without a name is shown by its number.
  void name_stream(cudaStream_t stream, const char* name) { streams_[stream_number(stream)].second = name; }

  // Starts a sample. Returns its number, for end().
  size_t begin(const char* name, cudaStream_t stream, const BytesAndFlops& counts) {
    if (!std::exchange(has_base_, true)) set_base();
    while (!samples_.empty() && samples_.front().closed && is_ready(samples_.front().end)) resolve_first();
    Sample sample{name, stream, nullptr, nullptr, counts, context, enabled, trace};
    cudaEventCreate(&sample.start);
    cudaEventCreate(&sample.end);
    cudaEventRecord(sample.start, stream);  // to measure
    samples_.push_back(sample);
    return resolved_ + samples_.size() - 1;
  }

  void end(size_t number) {
    Sample& sample = samples_[number - resolved_];
    cudaEventRecord(sample.end, sample.stream);  // to measure
    sample.closed = true;
  }

  // The number of samples that still hold their two events.
  size_t unresolved() const { return samples_.size(); }

  // Totals by name since the last call. Waits for the device.
  std::map<std::string, KernelTotal> collect() {
    resolve();
    return std::exchange(totals_, {});
  }

  // This process's part of the timeline since the last call. Waits for the device. Best called every step: times are
  // measured from the last call, in a float, which loses digits.
  Timeline take_timeline() {
    resolve();
    for (; named_streams_ < streams_.size(); ++named_streams_)
      timeline_.streams.push_back({named_streams_, streams_[named_streams_].second});
    return std::exchange(timeline_, {});
  }

 private:
  struct Sample {
    const char* name;
    cudaStream_t stream;
    cudaEvent_t start, end;
    BytesAndFlops counts;
    TraceContext context;
    bool totalled, traced;
    bool closed = false;
  };

  // Records a base event on an idle device, when the wall-clock time is known. Later events are placed on the timeline
  // by their time after the base event.
  void set_base() {
    cudaDeviceSynchronize();
    if (!base_) cudaEventCreate(&base_);
    cudaEventRecord(base_, nullptr);  // to measure
    cudaEventSynchronize(base_);  // to measure
    base_time_ = wall_clock();
  }

  void resolve() {
    cudaDeviceSynchronize();
    while (!samples_.empty()) resolve_first();
    has_base_ = false;
  }

  void resolve_first() {
    const Sample& sample = samples_.front();
    if (sample.totalled) add_to_totals(sample);
    if (sample.traced) add_to_timeline(sample);
    cudaEventDestroy(sample.start);
    cudaEventDestroy(sample.end);
    samples_.pop_front();
    ++resolved_;
  }

  void add_to_totals(const Sample& sample) {
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, sample.start, sample.end);
    KernelTotal& total = totals_[sample.name];
    total.name = sample.name;
    total.calls += 1;
    total.milliseconds += milliseconds;
    total.bytes += sample.counts.bytes;
    total.flops += sample.counts.flops;
  }

  void add_to_timeline(const Sample& sample) {
    // Start and end are rounded before they are subtracted, so that ranges of one stream never overlap.
    const int64_t start = nanoseconds(sample.start), duration = nanoseconds(sample.end) - start;
    timeline_.ranges.push_back({sample.name, stream_number(sample.stream), start, duration, sample.counts.bytes,
                                sample.counts.flops, sample.context});
  }

  // The time of an event on the timeline.
  int64_t nanoseconds(cudaEvent_t event) const {
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, base_, event);
    return base_time_ - origin + std::llround(double(milliseconds) * 1e6);
  }

  size_t stream_number(cudaStream_t stream) {
    size_t number = 0;
    while (number < streams_.size() && streams_[number].first != stream) ++number;
    if (number == streams_.size()) streams_.push_back({stream, "stream " + std::to_string(number)});
    return number;
  }

  cudaEvent_t base_ = nullptr;
  int64_t base_time_ = 0;
  bool has_base_ = false;         // has a base event been recorded since the last resolve()?
  std::deque<Sample> samples_;    // samples that have not been read yet; the device may not have finished them
  size_t resolved_ = 0;           // number of samples before samples_[0]
  std::map<std::string, KernelTotal> totals_;
  Timeline timeline_;
  std::vector<std::pair<cudaStream_t, std::string>> streams_;  // a stream's index here is its thread number
  size_t named_streams_ = 0;                                   // names that are in the timeline already
};

class KernelRange : NotCopied {
 public:
  // written: outputs of the launcher, in order; others follow by writes()
  KernelRange(const char* name, cudaStream_t stream, const BytesAndFlops& counts, std::initializer_list<WrittenTensor> written = {})
      : name_(name), stream_(stream) {
    nvtxRangePushA(name);
    Profiler& profiler = Profiler::instance();
    if (profiler.enabled || profiler.trace) number_ = profiler.begin(name, stream, counts);
    if (profiler.listener) outputs_ = written;
  }
  // Throws if a launch in the range has failed, or if the listener throws.
  ~KernelRange() noexcept(false) {
    nvtxRangePop();
    if (number_ != none) Profiler::instance().end(number_);
    if (std::uncaught_exceptions() > 0) return;
    if (const cudaError_t error = cudaGetLastError())
      throw std::runtime_error(std::string(name_) + ": " + cudaGetErrorString(error));
    for (size_t i = 0; i < outputs_.size(); ++i)
      Profiler::instance().listener(name_, int(i), outputs_[i], stream_);
  }

  // Says that the launcher writes `values` (count). accumulated: it adds to them.
  template <class T>
  void writes(const T* values, size_t count, bool accumulated = false) {
    if (Profiler::instance().listener) outputs_.push_back({values, count, accumulated});
  }

 private:
  static constexpr size_t none = size_t(-1);

  const char* name_;
  cudaStream_t stream_;
  size_t number_ = none;
  std::vector<WrittenTensor> outputs_;
};

// Launches inside the scope are neither profiled nor traced.
class Unobserved : NotCopied {
 public:
  Unobserved() { exchange(); }
  ~Unobserved() { exchange(); }

 private:
  void exchange() {
    std::swap(enabled_, Profiler::instance().enabled);
    std::swap(trace_, Profiler::instance().trace);
    std::swap(listener_, Profiler::instance().listener);
  }

  bool enabled_ = false, trace_ = false;
  decltype(Profiler::listener) listener_;
};

// Launches inside the scope belong to this layer, or to this piece of the rows (TraceContext).
class TraceScope : NotCopied {
 public:
  explicit TraceScope(int layer) { context().layer = layer; }
  TraceScope(int piece, bool partial) { context().piece = piece, context().partial = partial; }
  ~TraceScope() { context() = outer_; }

 private:
  static TraceContext& context() { return Profiler::instance().context; }
  const TraceContext outer_ = context();
};
