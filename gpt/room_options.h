// For a room.cpp and the core's list of options: ranges and lists that options' values are checked by, refusals, and rooms.
#pragma once

#include <charconv>
#include <string>
#include <system_error>
#include <type_traits>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/text.h"
#include "gpt/option_rules.h"
#include "gpt/options.h"
#include "gpt/room.h"

// Checks that the text is a number within the range. CLI11's own checks are not enough: it reads -1 as 2^64 - 1, an
// empty text as 0 and 010 as 8, and its ranges accept NaN.
template <class Number>
auto in_range(Number least, Number most) {
  return [least, most](const std::string& text) {
    Number number{};
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, number);
    const bool fits = error == std::errc() && stop == end && least <= number && number <= most;
    constexpr bool is_whole = std::is_integral_v<Number>;
    if (!fits) return concat(excerpt(text), " is no ", is_whole ? "whole " : "", "number from ", least, " to ", most);
    if (!is_whole || text.size() == 1 || text[0] != '0') return std::string();
    return concat(excerpt(text), " begins with 0, as octal numbers do: write ", number);
  };
}
inline const auto any_count = in_range(size_t(0), Options::most_steps), positive_count = in_range(size_t(1), Options::most_steps);

// CLI11's IsMember, but for its error, "fp8 not in {...}": ours sound like this one. names: a list, or the keys of a
// map
template <class Names = std::vector<std::string>>
CLI::Validator one_of(const Names& names) {
  return CLI::Validator([list = CLI::IsMember(names)](const std::string& text) {
    return list(text).empty() ? "" : excerpt(text) + " is unknown: give one of " + list.get_description();
  }, CLI::IsMember(names).get_description());
}

// A list with commas of words that each pass a check.
template <class Check>
auto list_of(const Check& check) {
  return [check](const std::string& list) {
    for (std::string& word : words_of(list))
      if (const std::string problem = check(word); !problem.empty()) return problem;
    return std::string();
  };
}

// Adds an option whose value is checked as text.
template <class Value, class Check>
CLI::Option* add(CLI::App& app, const char* flag, Value& value, const Check& check, const char* help) {
  return app.add_option(flag, value, help)->check(check);
}
