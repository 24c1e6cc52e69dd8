#include "gpt/safetensors.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/json_fields.h"

namespace {

constexpr const char* download_again = ": download or copy it again";

// Reads and converts block by block, because a second copy of a large tensor may not fit into memory.
template <float (*convert)(uint16_t)>
void read_16_bit(const File& file, size_t offset, size_t count, float* to) {
  std::vector<uint16_t> block(std::min(count, size_t(1) << 16));
  for (size_t done = 0; done < count; done += block.size()) {
    const size_t now = std::min(block.size(), count - done);
    file.read(offset + done * sizeof(uint16_t), block.data(), now * sizeof(uint16_t));
    std::transform(block.begin(), block.begin() + ptrdiff_t(now), to + done, convert);
  }
}

}  // namespace

std::string shape_text(const std::vector<size_t>& shape) {
  constexpr size_t longest = 160;
  std::string text;
  for (size_t extent : shape) {
    text += (text.empty() ? "" : ", ") + std::to_string(extent);
    if (text.size() > longest) return "(" + text + " ...)";
  }
  return "(" + text + ")";
}

size_t bytes_per_element(const std::string& dtype) {
  static const std::map<std::string, size_t> bytes = {
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
      {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},     {"I32", 4},
      {"F32", 4},  {"U64", 8}, {"I64", 8}, {"F64", 8},     {"C64", 8}};
  auto found = bytes.find(dtype);
  return found == bytes.end() ? 0 : found->second;
}

float float_from_fp16(uint16_t bits) {
  uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 0) {  // zero or subnormal: mantissa times 2^-24
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(mantissa) * 0x1p-24f));
  }
  uint32_t wide_exponent = exponent == 31 ? 255 : exponent - 15 + 127;  // 31 means infinity or NaN
  return std::bit_cast<float>(sign | wide_exponent << 23 | mantissa << 13);
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : file_(path, for_reading) {
  constexpr uint64_t longest_header = 100'000'000;  // the limit of the format's own library
  uint64_t header_bytes;
  const size_t size = file_.size();
  if (size < sizeof header_bytes)
    fail(path, ": has ", size, " bytes: it is cut short or no safetensors file", download_again);
  file_.read(0, &header_bytes, sizeof header_bytes);
  if (header_bytes > longest_header || header_bytes > size - sizeof header_bytes)
    fail(path, ": says its header has ", header_bytes, " bytes, the file has ", size,
         " and a header at most ", longest_header, ": it is cut short or no safetensors file", download_again);
  data_begin_ = sizeof header_bytes + header_bytes;
  data_bytes_ = size - data_begin_;
  std::string header(header_bytes, 0);
  file_.read(sizeof header_bytes, header.data(), header.size());
  read_header(header);
  index_tensors();
}

const TensorInfo* SafetensorsFile::find(const std::string& name) const {
  auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

void SafetensorsFile::read(const TensorInfo& tensor, size_t first, size_t count, float* to) const {
  size_t elements = element_count(tensor.shape);
  if (first > elements || count > elements - first)
    fail(path(), ": ", excerpt(tensor.name), " has ", elements, " elements, not ", first, " + ", count);
  const size_t offset = data_begin_ + tensor.begin + first * bytes_per_element(tensor.dtype);
  if (tensor.dtype == "F32") {
    file_.read(offset, to, count * sizeof(float));
  } else if (tensor.dtype == "BF16") {
    read_16_bit<float_from_bf16>(file_, offset, count, to);
  } else if (tensor.dtype == "F16") {
    read_16_bit<float_from_fp16>(file_, offset, count, to);
  } else {
    fail(path(), ": ", excerpt(tensor.name), " is ", tensor.dtype,
         ", only F32, BF16 and F16 can be read: convert it");
  }
}

// Takes the entries one by one while the text is parsed, and stops at the first thing that cannot belong to a
// header, so that a hostile header costs little memory. Depths: 0 the header, 1 its entries, 2 their fields, 3 the
// numbers of a shape.
void SafetensorsFile::read_header(std::string_view text) {
  using Json = nlohmann::json;
  using Event = Json::parse_event_t;
  constexpr size_t most_values = 100'000;  // per entry
  std::string name;
  size_t values = 0;
  auto on_event = [&](int depth, Event event, Json& parsed) {
    bool opens = event == Event::object_start || event == Event::array_start;
    bool no_object = event == Event::array_start || event == Event::value;
    if (depth == 0 && no_object) fail(path(), ": header is no JSON object", download_again);
    if (depth == 1 && event == Event::key) {
      name = parsed.get<std::string>();
      values = 0;
    }
    if (depth == 1 && no_object) refuse(name, "is no JSON object");
    bool too_deep = (depth == 2 && event == Event::object_start) || (depth > 2 && opens);
    if (too_deep) refuse(name, "is nested too deep");
    if (++values > most_values) refuse(name, "has too many values");
    if (depth != 1 || event != Event::object_end) return true;
    add_entry(name, parsed);
    return false;
  };
  try {
    std::ignore = Json::parse(text, on_event);
  } catch (const Json::exception& error) {
    fail(path(), ": header is not valid JSON: ", excerpt(error.what()), download_again);
  }
}

void SafetensorsFile::add_entry(const std::string& name, const nlohmann::json& entry) {
  if (name == "__metadata__") {
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) refuse(name, "holds something that is not text");
      metadata_[key] = value;
    }
    return;
  }
  JsonFields fields(path().string() + ": " + excerpt(name), entry, download_again);
  const auto sizes = [&](const char* key) {
    return fields.list<size_t>(key, "counts", [](const auto& found) { return found.is_number_unsigned(); });
  };
  TensorInfo tensor{name, fields.text("dtype"), sizes("shape"), 0, 0};
  size_t bytes = bytes_per_element(tensor.dtype);
  if (bytes == 0) refuse(name, "has unknown dtype " + excerpt(tensor.dtype));
  for (size_t extent : tensor.shape)
    if (__builtin_mul_overflow(bytes, extent, &bytes)) refuse(name, "has a shape too large to count");
  std::vector<size_t> offsets = sizes("data_offsets");
  if (offsets.size() != 2) refuse(name, "has " + std::to_string(offsets.size()) + " data_offsets, not two");
  tensor.begin = offsets[0];
  tensor.end = offsets[1];
  std::string range = "data_offsets " + std::to_string(tensor.begin) + " to " + std::to_string(tensor.end);
  if (tensor.begin > tensor.end || tensor.end > data_bytes_)
    refuse(name, range + " lie outside the file's " + std::to_string(data_bytes_) + " bytes of data");
  if (tensor.end - tensor.begin != bytes)
    refuse(name, range + " do not span its " + std::to_string(bytes) + " bytes");
  tensors_.push_back(std::move(tensor));
}

// Checks that names are unique, and that the tensors cover the data from its first byte to its last.
void SafetensorsFile::index_tensors() {
  std::ranges::sort(tensors_, {}, [](const TensorInfo& tensor) { return std::pair(tensor.begin, tensor.end); });
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (!index_.emplace(tensors_[i].name, i).second) refuse(tensors_[i].name, "appears twice");
  size_t position = 0;
  for (const TensorInfo& tensor : tensors_) {
    if (tensor.begin < position) refuse(tensor.name, "overlaps another tensor");
    if (tensor.begin > position) refuse(tensor.name, "leaves a hole before its data");
    position = tensor.end;
  }
  size_t rest = data_bytes_ - position;
  if (rest > 0) fail(path(), ": ", rest, " bytes at its end belong to no tensor", download_again);
}

[[noreturn]] void SafetensorsFile::refuse(const std::string& name, const std::string& defect) const {
  fail(path(), ": ", excerpt(name), " ", defect, download_again);
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, const std::vector<NamedShape>& tensors,
                                     const std::map<std::string, std::string>& metadata, bool create)
    : file_(path, create ? O_WRONLY | O_CREAT | O_TRUNC : O_WRONLY) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  size_t end = 0;
  for (const auto& [name, shape] : tensors) {
    size_t begin = end, elements = element_count(shape);
    end += elements * sizeof(float);
    bool is_new = places_.emplace(name, Place{begin, elements}).second;
    if (!is_new) fail(path, ": two tensors are named ", excerpt(name));
    header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // aligns the data to 8 bytes
  const uint64_t header_bytes = text.size();
  header_.assign(reinterpret_cast<const char*>(&header_bytes), sizeof header_bytes);
  header_ += text;
  if (!create) return;
  file_.reserve(header_.size() + end);
  file_.write(0, header_.data(), header_.size());
}

size_t SafetensorsWriter::offset(const std::string& name, size_t first, size_t count) const {
  auto found = places_.find(name);
  if (found == places_.end()) fail(file_.path(), ": has no tensor ", excerpt(name));
  const Place& place = found->second;
  if (first > place.elements || count > place.elements - first)
    fail(file_.path(), ": ", excerpt(name), " has ", place.elements, " elements, not ", first, " + ", count);
  return header_.size() + place.begin + first * sizeof(float);
}
