// `--profile`: time, bytes and FLOPs of every launcher, measured with events on its stream.
//
// A launcher opens `KernelRange range("name", stream, bytes, flops)` where bytes is the least its kernels must move
// through device memory and flops the arithmetic they do; both come from the formulas in the launcher's header comment.
// Off, a range costs one branch.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <string>
#include <vector>

class Profiler {
 public:
  struct Total {
    size_t calls = 0;
    double milliseconds = 0, bytes = 0, flops = 0;
  };

  static Profiler& instance() {
    static Profiler profiler;
    return profiler;
  }

  bool enabled = false;

  void begin(const char* name, cudaStream_t stream, double bytes, double flops) {
    Sample sample{name, nullptr, nullptr, bytes, flops};
    cudaEventCreate(&sample.start);
    cudaEventCreate(&sample.end);
    cudaEventRecord(sample.start, stream);
    samples_.push_back(sample);
    open_.push_back(samples_.size() - 1);
  }

  void end(cudaStream_t stream) {
    cudaEventRecord(samples_[open_.back()].end, stream);
    open_.pop_back();
  }

  // Totals by name since the last call. Waits for the device.
  std::map<std::string, Total> collect() {
    cudaDeviceSynchronize();
    std::map<std::string, Total> totals;
    for (Sample& sample : samples_) {
      float milliseconds = 0;
      cudaEventElapsedTime(&milliseconds, sample.start, sample.end);
      cudaEventDestroy(sample.start);
      cudaEventDestroy(sample.end);
      Total& total = totals[sample.name];
      total.calls += 1;
      total.milliseconds += milliseconds;
      total.bytes += sample.bytes;
      total.flops += sample.flops;
    }
    samples_.clear();
    return totals;
  }

 private:
  struct Sample {
    const char* name;
    cudaEvent_t start, end;
    double bytes, flops;
  };
  std::vector<Sample> samples_;
  std::vector<size_t> open_;
};

class KernelRange {
 public:
  KernelRange(const char* name, cudaStream_t stream, double bytes, double flops) : stream_(stream) {
    if (Profiler::instance().enabled) Profiler::instance().begin(name, stream, bytes, flops);
  }
  ~KernelRange() {
    if (Profiler::instance().enabled) Profiler::instance().end(stream_);
  }
  KernelRange(const KernelRange&) = delete;
  KernelRange& operator=(const KernelRange&) = delete;

 private:
  cudaStream_t stream_;
};
