// For fuzz targets (libFuzzer, https://llvm.org/docs/LibFuzzer.html): an input becomes files in a folder, and a reader
// of files that nobody vouches for has to keep three promises:
//
//   no crash       and no report of AddressSanitizer or UndefinedBehaviorSanitizer
//   clear errors   what it refuses it refuses by fail(), in one line; any other exception is a finding
//   little memory  for files of S bytes in all it never holds more than 80 S + 64 KiB: the worst text, arrays within
//                  arrays in JSON, takes up to 69 bytes for each "[", and streams have buffers
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <typeinfo>
#include <vector>

#include <sanitizer/allocator_interface.h>

#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "test/temporary_folder.h"

// What does not hold ends the run; libFuzzer then keeps the input.
template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  ((std::cerr << "finding: ") << ... << parts) << std::endl;
  std::abort();
}

// Bytes that are allocated, and the most there were since the peak was last reset.
struct Allocated {
  inline static long now = 0, peak = 0;

  static void watch() {
    static const int watched = __sanitizer_install_malloc_and_free_hooks(
        [](const volatile void*, size_t bytes) { peak = std::max(peak, now += long(bytes)); },
        [](const volatile void* block) { now -= long(__sanitizer_get_allocated_size(block)); });
    require(watched > 0, "no room for malloc hooks");
  }
};

// Is the work done, rather than refused? `file_bytes`: the size of all files that it reads.
template <class Work>
bool done(size_t file_bytes, Work work) {
  Allocated::watch();
  const long before = Allocated::peak = Allocated::now;
  bool refused = false;
  try {
    work();
  } catch (const std::exception& error) {
    const std::string line = error.what();
    require(typeid(error) == typeid(std::runtime_error), typeid(error).name(), " instead of an error line: ", line);
    require(!line.empty() && line == one_line(line), "not one line: ", line);
    require(line.size() < 1000, "a line of ", line.size(), " characters: ", line);
    refused = true;
  }
  const long most = 80 * long(file_bytes) + (64 << 10), bytes = Allocated::peak - before;
  require(bytes <= most, bytes, " bytes allocated for files of ", file_bytes, " bytes");
  return !refused;
}

// The first `wanted` parts of an input, which bytes 30 (ASCII's record separator, no part of any JSON text) divide.
inline std::vector<std::string> parts_of(std::string_view input, size_t wanted) {
  std::vector<std::string> parts;
  while (parts.size() < wanted) {
    const size_t end = parts.size() + 1 < wanted ? std::min(input.find('\x1e'), input.size()) : input.size();
    parts.emplace_back(input.substr(0, end));
    input.remove_prefix(std::min(end + 1, input.size()));
  }
  return parts;
}

// A safetensors file: "12{...}" stands for the length, the header {...} and 12 zero bytes of data, so that a header
// stays whole when the fuzzer changes it. What starts with no digit is the file itself.
inline std::string safetensors_of(const std::string& part) {
  size_t data_bytes = 0;
  const char* end = part.data() + std::min<size_t>(part.size(), 4);
  const char* header = std::from_chars(part.data(), end, data_bytes).ptr;
  if (header == part.data()) return part;
  const uint64_t length = uint64_t(part.data() + part.size() - header);
  std::string file(reinterpret_cast<const char*>(&length), sizeof length);
  return file.append(header, length).append(data_bytes, '\0');
}

// A file in the one folder of a run.
inline std::filesystem::path fuzzed(const std::string& name, const std::string& content) {
  static const TemporaryFolder folder;
  write_file(folder / name, content);
  return folder / name;
}

// The same, but without content there is no such file.
inline std::filesystem::path fuzzed_or_none(const std::string& name, const std::string& content) {
  const std::filesystem::path path = fuzzed(name, content);
  if (content.empty()) std::filesystem::remove(path);
  return path;
}
