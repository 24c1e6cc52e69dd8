// When each launcher ran, and on which part of the work, as plain data: the profiler fills it
// (kernels/device/profile.cuh), runtime/traces/trace_file.h writes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// The place in the run where a launcher is called. -1: unknown, or outside of any.
struct TraceContext {
  int step = -1;         // the update being computed, from 1
  int micro_batch = -1;  // its number in the step, counted over all data-parallel ranks
  // The kind of work on the micro-batch, and in which of this rank's chunks of layers (gpt/actions.h).
  const char* work = nullptr;
  int chunk = 0;
  int layer = -1;
  // With tensor parallelism the piece of the rows, with ring attention the step; and whether the output is one term of
  // a sum.
  int piece = -1;
  bool partial = false;
};

struct TracedRange {
  const char* name;
  size_t stream;            // its number
  int64_t start, duration;  // nanoseconds; start counts from Profiler::origin
  double bytes, flops;
  TraceContext context;
};

// All calls of a launcher.
struct KernelTotal {
  std::string name;
  size_t calls = 0;
  double milliseconds = 0, bytes = 0, flops = 0;
};

struct Timeline {
  std::vector<std::pair<size_t, std::string>> streams;  // number and name of those that no earlier timeline has named
  std::vector<TracedRange> ranges;
};
