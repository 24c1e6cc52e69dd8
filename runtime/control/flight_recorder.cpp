#include "runtime/control/flight_recorder.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

void FlightRecorder::rehearse(bool lasts) {
  const std::lock_guard lock(mutex_);
  rehearses_ = lasts;
}

uint64_t FlightRecorder::enter(const char* name, size_t bytes, double patience, const char* group) {
  const std::lock_guard lock(mutex_);
  ++last_;
  const uint64_t number = ++numbers_[rehearses_][group];
  entries_[last_ % capacity] = {last_, group, number, name, bytes, steady_seconds(), {}, patience, rehearses_};
  return last_;
}

void FlightRecorder::leave(uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  Entry& entry = entries_[sequence % capacity];
  if (entry.sequence == sequence) entry.left = steady_seconds();  // else a newer collective has overwritten it
}

std::vector<FlightRecorder::Entry> FlightRecorder::entries() const {
  const std::lock_guard lock(mutex_);
  std::vector<Entry> result;
  for (uint64_t i = last_ - std::min(last_, uint64_t(capacity)) + 1; i <= last_; ++i)
    if (const Entry& entry = entries_[i % capacity]; !entry.rehearsed || !entry.left) result.push_back(entry);
  return result;
}

void FlightRecorder::forgive(double seconds) {
  const std::lock_guard lock(mutex_);
  for (Entry& entry : entries_) entry.entered += entry.left ? 0 : seconds;
}

namespace {

// "tp #118"
std::string number_of(const FlightRecorder::Entry& entry, uint64_t number) {
  return (*entry.group ? entry.group + std::string(" ") : "") + "#" + std::to_string(number);
}

bool is_message(const FlightRecorder::Entry& entry) {
  return entry.name == std::string("send") || entry.name == std::string("receive");
}

}  // namespace

FlightBrief brief(const std::vector<FlightRecorder::Entry>& entries, double now) {
  const auto under_way = std::find_if(entries.begin(), entries.end(), [](const auto& entry) { return !entry.left; });
  const auto end = entries.end() - under_way > 2 ? under_way + 2 : entries.end();
  std::ostringstream place, history;
  if (entries.empty()) {
    place << "not yet in #1";
  } else if (under_way == entries.end()) {
    const FlightRecorder::Entry& last = entries.back();
    if (is_message(last)) place << "after " << number_of(last, last.number) << " " << last.name;  // any lane may be next
    else place << "not yet in " << number_of(last, last.number + 1);
  } else {
    place << "in " << number_of(*under_way, under_way->number) << " " << under_way->name;
    if (under_way->bytes) place << " of " << under_way->bytes << " bytes";
  }
  history << std::fixed << std::setprecision(3);
  for (auto entry = end - std::min<long>(4, end - entries.begin()); entry != end; ++entry)
    history << (history.tellp() > 0 ? " | " : "") << number_of(*entry, entry->number) << " " << entry->name << " " << entry->bytes
            << " bytes " << entry->left.value_or(now) - entry->entered << (entry->left ? " s" : " s, not left");
  return {under_way == entries.end() ? 0 : (now - under_way->entered) / under_way->patience, place.str(), history.str()};
}
