// Texts that processes print and compare: lists, the name of this host, and checksums.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

// The texts of all elements of a range: "one, two, three". text: function or member that gives an element's
template <class Range, class Text = std::identity>
std::string joined(const Range& all, Text text = {}, const char* separator = ", ") {
  std::string list;
  for (const auto& element : all) list += (list.empty() ? "" : separator) + std::string(std::invoke(text, element));
  return list;
}

// The words between commas: "one,,three" has an empty one, and so has an empty text.
std::vector<std::string> words_of(const std::string& list);

// As std::printf prints it, of 1,023 characters at most.
[[gnu::format(printf, 1, 2)]] std::string formatted(const char* format, ...);

// "rank 3", or "ranks 0-2, 5"
std::string rank_list(const std::vector<int>& ranks);

std::string host_name();

// The number in 16 hexadecimal digits.
std::string hexadecimal(uint64_t number);

// 32 random hexadecimal digits, which nobody can guess.
std::string random_digits();

// The 64-bit XXH3 checksum (https://xxhash.com), hexadecimal. It is not secure against attackers.
std::string xxh3(std::string_view bytes);
