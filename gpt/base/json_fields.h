// Reads an object of a JSON file, key by key. A key that is missing, of another type, or unknown is refused in one line.
#pragma once

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"

// A value in an error line: in quotes, printable, and not too long.
inline std::string shown(const nlohmann::json& value) {
  return excerpt(value.is_string() ? value.get<std::string>() : value.dump());
}

class JsonFields {
 public:
  // where: the beginning of an error line, the file's path; cure: its end; prefix: put before each key in it
  // ("links.")
  JsonFields(std::string where, const nlohmann::json& object, const char* cure, std::string prefix = "")
      : where_(std::move(where)), object_(object), cure_(cure), prefix_(std::move(prefix)) {}

  bool has(const std::string& key) {
    asked_.insert(key);
    return object_.contains(key);
  }
  const nlohmann::json& value(const std::string& key) {
    if (!has(key)) fail(where_, ": \"", prefix_, key, "\" is missing", cure_);
    return object_[key];
  }
  // The value as a T, refused unless is_valid(value). wanted: describes a valid value ("a text")
  template <class T, class IsValid>
  T get(const std::string& key, const std::string& wanted, IsValid is_valid) {
    if (!is_valid(value(key))) refuse(key, wanted);
    return object_[key].get<T>();
  }
  double rate(const std::string& key, double most = 1e9) {
    return get<double>(key, "a number above 0.000001, " + std::string(most == 1 ? "1" : "1e9") + " at most",
                       [&](const auto& found) { return found.is_number() && found > 1e-6 && found <= most; });
  }
  int count(const std::string& key, int most = 1'000'000) {
    return get<int>(key, "a whole number from 1 to " + std::to_string(most),
                    [&](const auto& found) { return found.is_number_integer() && found >= 1 && found <= most; });
  }
  size_t size(const std::string& key, size_t least = 0, size_t most = SIZE_MAX) {
    return get<size_t>(key, "a whole number, " + std::to_string(least) + (most == SIZE_MAX ? " or more" : " to " + std::to_string(most)),
                       [&](const auto& found) { return found.is_number_unsigned() && found >= least && found <= most; });
  }
  std::string text(const std::string& key) {  // that may reach a terminal
    return one_line(get<std::string>(key, "a text", [](const auto& found) { return found.is_string(); }));
  }
  // elements: their name in an error ("numbers"); is_valid: asked of each element
  template <class T, class IsValid>
  std::vector<T> list(const std::string& key, const std::string& elements, IsValid is_valid) {
    return get<std::vector<T>>(key, "a list of " + elements, [&](const auto& found) {
      return found.is_array() && std::all_of(found.begin(), found.end(), is_valid);
    });
  }
  JsonFields object(const std::string& key) {
    if (!value(key).is_object()) refuse(key, "an object");
    return {where_, object_[key], cure_, prefix_ + key + '.'};
  }

  [[noreturn]] void refuse(const std::string& key, const std::string& wanted) {
    fail(where_, ": \"", prefix_, key, "\" is ", excerpt(value(key).dump()), ", not ", wanted, cure_);
  }
  // A key that nobody has asked for is a mistake.
  void end() const {
    for (const auto& [key, _] : object_.items())
      if (!asked_.contains(key)) fail(where_, ": there is no key ", excerpt(prefix_ + key), cure_);
  }

 private:
  std::string where_;
  const nlohmann::json& object_;
  const char* cure_;
  std::string prefix_;
  std::set<std::string> asked_;
};
