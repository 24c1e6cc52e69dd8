// The values of all rooms' options. Each room has a struct of its own for them, which nobody else need know.
#pragma once

#include <any>
#include <list>
#include <type_traits>

class RoomOptions {
 public:
  RoomOptions() = default;
  // Some rooms' values; those of the others are as by default.
  template <class... Values>
    requires(sizeof...(Values) > 0 && (!std::is_base_of_v<RoomOptions, Values> && ...))
  RoomOptions(const Values&... values) {
    ((of<Values>() = values), ...);
  }

  template <class Values>
  Values& of() {
    for (std::any& values : values_)
      if (Values* found = std::any_cast<Values>(&values)) return *found;
    return std::any_cast<Values&>(values_.emplace_back(Values()));
  }
  template <class Values>
  const Values& of() const {
    static const Values as_by_default;
    for (const std::any& values : values_)
      if (const Values* found = std::any_cast<Values>(&values)) return *found;
    return as_by_default;
  }

 private:
  std::list<std::any> values_;  // one of each type, where references to it hold
};

// The same in a function template, where `rooms` is of a type that depends on its parameters
template <class Values>
const Values& options_of(const RoomOptions& rooms) {
  return rooms.of<Values>();
}
