// The flight recorder lists this rank's last collectives, which of them are under way, and since when. Threads that
// enqueue collectives, or notice their end, write it; the control thread (runtime/control/control.h) reads it. When
// a job hangs, the records of all ranks show where they differ.
//
// Collectives are numbered from 1, in each group of ranks by itself, in the order in which a rank enters them: groups
// that have different work to do meet at different times, but within a group all ranks enter the same collectives. A
// lane between two stages of a pipeline has a name at each end, and counts the same messages there. Times are seconds
// of steady_seconds().
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gpt/base/clock.h"
#include "gpt/ranks.h"

class FlightRecorder : public CallLog {
 public:
  static constexpr size_t capacity = 4096;  // more than the unfinished collectives of two steps

  struct Entry {
    uint64_t sequence = 0;   // number of the call, counted over all groups
    const char* group = "";  // a string literal; empty: all ranks, without the device
    uint64_t number = 0;     // number of the call in its group
    const char* name = "";  // a string literal
    size_t bytes = 0;  // like name, the same on all ranks; a rank that differs is reported as the reason of a hang
    double entered = 0;
    std::optional<double> left;
    double patience = 1;  // time that it may take, in units of the time-out: 10 if files are read or written meanwhile
    bool rehearsed = false;
  };

  // The rehearsal's collectives are recorded until it ends. Then they are removed: they count neither among the last
  // collectives nor in their numbers.
  void rehearse(bool lasts) override;
  uint64_t enter(const char* name, size_t bytes, double patience = 1, const char* group = "") override;
  void leave(uint64_t sequence) override;

  // The recorded collectives, oldest first.
  std::vector<Entry> entries() const;

  // This process was stopped for some seconds: they do not count for the collectives under way.
  void forgive(double seconds);

 private:
  mutable std::mutex mutex_;
  std::vector<Entry> entries_ = std::vector<Entry>(capacity);
  uint64_t last_ = 0;
  bool rehearses_ = false;
  std::map<std::string, uint64_t> numbers_[2];  // by group; the second one is of a rehearsal
};

// The summary of a flight record that ranks send to rank 0.
struct FlightBrief {
  double waiting = 0;          // seconds since the oldest unfinished collective began / its patience; 0: there is none
  std::string place, history;  // "in tp #118 all_reduce of 4096 bytes"; the last few collectives, separated by " | "
};

FlightBrief brief(const std::vector<FlightRecorder::Entry>& entries, double now);
