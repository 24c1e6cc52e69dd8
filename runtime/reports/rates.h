// Rates per second of numbers that only grow, such as bytes sent since a machine was started.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>

class Rates {
 public:
  // The rate since the last call with this name. None in the first call, and if the counter began anew.
  std::optional<double> of(const std::string& name, double count, double now) {
    const auto [place, is_new] = last_.try_emplace(name, count, now);
    const auto [count_before, then] = std::exchange(place->second, {count, now});
    if (is_new || now <= then || count < count_before) return {};
    return (count - count_before) / (now - then);
  }

 private:
  std::map<std::string, std::pair<double, double>> last_;  // by name: the count, and when it was read
};
