// The safetensors file format (https://huggingface.co/docs/safetensors), read and written:
//
//   8 bytes    N, the length of the header, little-endian
//   N bytes    JSON: {"NAME": {"dtype": "F32", "shape": [2, 3], "data_offsets": [BEGIN, END]}, ...,
//              "__metadata__": {"KEY": "TEXT", ...}}; offsets count from the end of the header
//   the rest   the tensors, row-major and little-endian, without overlaps and without holes
//
// The reader trusts no file: it checks everything, and reports every defect. The writer creates the file at its full
// size and then fills in ranges of elements in any order; several ranks can share this work.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "gpt/base/files.h"
#include "gpt/shapes.h"

struct NamedShape {
  std::string name;
  std::vector<size_t> shape;
};

struct TensorInfo {
  std::string name;
  std::string dtype;
  std::vector<size_t> shape;
  size_t begin, end;  // offsets from the end of the header, in bytes
};

// The text "(2, 3)" for error lines; long shapes are cut, because files may hold shapes of any length.
std::string shape_text(const std::vector<size_t>& shape);

// Bytes per element of a safetensors dtype; 0 if the dtype is unknown.
size_t bytes_per_element(const std::string& dtype);

// bfloat16 is the upper half of a float.
inline float float_from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

// IEEE 754 binary16 has 5 exponent bits (bias 15) and 10 mantissa bits, a float has 8 (bias 127) and 23.
float float_from_fp16(uint16_t bits);

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return file_.path(); }
  const std::vector<TensorInfo>& tensors() const { return tensors_; }  // in the order of their data
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  const TensorInfo* find(const std::string& name) const;

  // Reads elements [first, first + count) of a tensor, converted to float.
  void read(const TensorInfo& tensor, size_t first, size_t count, float* to) const;

 private:
  void read_header(std::string_view text);
  void add_entry(const std::string& name, const nlohmann::json& entry);
  void index_tensors();
  [[noreturn]] void refuse(const std::string& name, const std::string& defect) const;

  File file_;
  size_t data_begin_;  // offset of the data in the file, after the header
  size_t data_bytes_;
  std::vector<TensorInfo> tensors_;
  std::map<std::string, size_t> index_;
  std::map<std::string, std::string> metadata_;
};

// Writes a file of F32 tensors, laid out in the given order.
class SafetensorsWriter {
 public:
  // create: false if another rank has created the file, with the same tensors.
  SafetensorsWriter(const std::filesystem::path& path, const std::vector<NamedShape>& tensors,
                    const std::map<std::string, std::string>& metadata, bool create = true);

  // The beginning of the file; the tensors follow it.
  const std::string& header() const { return header_; }

  // The offset in the file of elements [first, first + count) of a tensor, in bytes.
  size_t offset(const std::string& name, size_t first, size_t count) const;

  // Ranges may be written in any order.
  void write(const std::string& name, size_t first, size_t count, const float* from) {
    write_at(offset(name, first, count), count, from);
  }
  void write_at(size_t offset, size_t count, const float* from) { file_.write_past_cache(offset, from, count * sizeof(float)); }

  // Flushes the file to disk and closes it.
  void close() { file_.sync_and_close(); }

 private:
  struct Place {
    size_t begin;  // offset from the end of the header, in bytes
    size_t elements;
  };

  File file_;
  std::map<std::string, Place> places_;
  std::string header_;
};
