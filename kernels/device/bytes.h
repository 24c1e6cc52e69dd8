// Bytes of memory: by category, and as text.
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

// The least bytes that a launcher's kernels must move through device memory, and the arithmetic that they do.
struct BytesAndFlops {
  double bytes = 0, flops = 0;
};

struct MemoryCategory {
  std::string name;
  size_t bytes;
  bool operator==(const MemoryCategory&) const = default;
};

inline size_t total_of(const std::vector<MemoryCategory>& categories) {
  size_t sum = 0;
  for (const MemoryCategory& category : categories) sum += category.bytes;
  return sum;
}

// "24.0 KiB", "12.6 MiB", "1.33 GiB"
inline std::string bytes_text(size_t bytes) {
  const int exponent = bytes < (size_t(1) << 20) ? 10 : bytes < (size_t(1) << 30) ? 20 : 30;
  char text[32];
  std::snprintf(text, sizeof text, exponent == 10 ? "%.1f KiB" : exponent == 20 ? "%.1f MiB" : "%.2f GiB",
                double(bytes) / double(size_t(1) << exponent));
  return text;
}

// "weights 1.0 MiB, gradients 1.0 MiB"
inline std::string text_of(const std::vector<MemoryCategory>& categories) {
  std::string text;
  for (const auto& [name, bytes] : categories) text += (text.empty() ? "" : ", ") + name + " " + bytes_text(bytes);
  return text;
}
