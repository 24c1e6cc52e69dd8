// The flight recorder: what this rank's last collectives were, which of them are under way, and since when. Threads
// that enqueue collectives, or see them end, write it; the control thread (processes/control.h) reads it: when a job
// hangs, the records of all ranks say where they differ.
//
// Collectives are numbered from 1 in the order in which a rank enters them. Times are seconds of steady_seconds().
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

// Seconds on a clock that never jumps; where it starts means nothing.
inline double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class FlightRecorder {
 public:
  static constexpr size_t capacity = 64;

  struct Entry {
    uint64_t sequence = 0;
    const char* name = "";  // a string literal
    size_t bytes = 0;  // the same on all ranks, as name is: what differs is taken for the reason of a hang
    double entered = 0;
    std::optional<double> left;
    double patience = 1;  // how many times the usual time-out it may take: 10 if files are read or written meanwhile
  };

  // The number of the collective that begins.
  uint64_t enter(const char* name, size_t bytes, double patience = 1);

  void leave(uint64_t sequence);

  // Oldest first.
  std::vector<Entry> entries() const;

  // This process stood still for so long (stopped and continued, say): not the collectives' fault.
  void forgive(double seconds);

 private:
  mutable std::mutex mutex_;
  std::array<Entry, capacity> entries_;
  uint64_t last_ = 0;
};

// A flight record in brief, as the ranks tell it to rank 0.
struct FlightBrief {
  double waiting = 0;          // seconds since the oldest collective under way was entered / its patience; 0: none is
  std::string place, history;  // "in #118 all_reduce of 4096 bytes"; the last few, separated by " | "
};

FlightBrief brief(const std::vector<FlightRecorder::Entry>& entries, double now);
