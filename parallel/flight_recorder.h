// The flight recorder: what this rank's last collectives were, which of them are under way, and since when. Threads
// that enqueue collectives, or see them end, write it; the control thread (parallel/control.h) reads it: when a job
// hangs, the records of all ranks say where they differ.
//
// Collectives are numbered from 1 in the order in which a rank enters them. Times are seconds of steady_seconds().
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <iomanip>
#include <mutex>
#include <optional>
#include <sstream>
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
  uint64_t enter(const char* name, size_t bytes, double patience = 1) {
    const std::lock_guard lock(mutex_);
    ++last_;
    entries_[last_ % capacity] = {last_, name, bytes, steady_seconds(), {}, patience};
    return last_;
  }

  void leave(uint64_t sequence) {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_[sequence % capacity];
    if (entry.sequence == sequence) entry.left = steady_seconds();  // else a newer one has taken its place
  }

  // Oldest first.
  std::vector<Entry> entries() const {
    const std::lock_guard lock(mutex_);
    std::vector<Entry> result;
    for (uint64_t i = last_ - std::min(last_, uint64_t(capacity)) + 1; i <= last_; ++i)
      result.push_back(entries_[i % capacity]);
    return result;
  }

  // This process stood still for so long (stopped and continued, say): not the collectives' fault.
  void forgive(double seconds) {
    const std::lock_guard lock(mutex_);
    for (Entry& entry : entries_) entry.entered += entry.left ? 0 : seconds;
  }

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

inline FlightBrief brief(const std::vector<FlightRecorder::Entry>& entries, double now) {
  const auto under_way = std::find_if(entries.begin(), entries.end(), [](const auto& entry) { return !entry.left; });
  const auto end = entries.end() - under_way > 2 ? under_way + 2 : entries.end();
  std::ostringstream place, history;
  if (under_way == entries.end()) place << "not yet in #" << (entries.empty() ? 1 : entries.back().sequence + 1);
  else place << "in #" << under_way->sequence << " " << under_way->name;
  if (under_way != entries.end() && under_way->bytes) place << " of " << under_way->bytes << " bytes";
  history << std::fixed << std::setprecision(3);
  for (auto entry = end - std::min<long>(4, end - entries.begin()); entry != end; ++entry)
    history << (history.tellp() > 0 ? " | #" : "#") << entry->sequence << " " << entry->name << " " << entry->bytes
            << " bytes " << entry->left.value_or(now) - entry->entered << (entry->left ? " s" : " s, not left");
  return {under_way == entries.end() ? 0 : (now - under_way->entered) / under_way->patience, place.str(), history.str()};
}
