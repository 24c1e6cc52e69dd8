// Reads an object of a JSON file, key by key. What is missing, of another type, or unknown is refused in one line.
#pragma once

#include <filesystem>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "processes/error.h"

class JsonFields {
 public:
  // cure: what the line ends with; prefix: what stands before the keys in it ("links.")
  JsonFields(const std::filesystem::path& path, const nlohmann::json& object, const char* cure, const std::string& prefix = "")
      : path_(path), object_(object), cure_(cure), prefix_(prefix) {}

  bool has(const std::string& key) {
    asked_.insert(key);
    return object_.contains(key);
  }
  const nlohmann::json& value(const std::string& key) {
    if (!has(key)) fail(path_, ": \"", prefix_, key, "\" is missing", cure_);
    return object_[key];
  }
  double rate(const std::string& key, double most = 1e9) {
    const nlohmann::json& found = value(key);
    if (!found.is_number() || !(found > 1e-6 && found <= most))
      refuse(key, "a number above 0.000001, " + std::string(most == 1 ? "1" : "1e9") + " at most");
    return found.get<double>();
  }
  int count(const std::string& key) {
    const nlohmann::json& found = value(key);
    if (!found.is_number_integer() || found < 1 || found > 1'000'000) refuse(key, "a whole number from 1 to 1000000");
    return found.get<int>();
  }
  std::string text(const std::string& key) {
    if (!value(key).is_string()) refuse(key, "a text");
    return one_line(object_[key].get<std::string>());  // it may reach a terminal
  }
  JsonFields object(const std::string& key) {
    if (!value(key).is_object()) refuse(key, "an object");
    return {path_, object_[key], cure_, prefix_ + key + '.'};
  }

  [[noreturn]] void refuse(const std::string& key, const std::string& wanted) {
    fail(path_, ": \"", prefix_, key, "\" is ", excerpt(value(key).dump()), ", not ", wanted, cure_);
  }
  // A key that nobody has asked for is a mistake.
  void end() const {
    for (const auto& [key, _] : object_.items())
      if (!asked_.contains(key)) fail(path_, ": there is no key ", excerpt(prefix_ + key), cure_);
  }

 private:
  const std::filesystem::path& path_;
  const nlohmann::json& object_;
  const char* cure_;
  std::string prefix_;
  std::set<std::string> asked_;
};
