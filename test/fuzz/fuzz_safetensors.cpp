// Any file as safetensors: either refused, or all of its data belongs to tensors that can be read, whole and in ranges.
// Input: see safetensors_of.
#include <cstring>
#include <optional>

#include "test/fuzz/fuzz.h"

#include "gpt/safetensors.h"

namespace {

void read_tensor(const SafetensorsFile& file, const TensorInfo& tensor) {
  const size_t elements = element_count(tensor.shape), bytes = tensor.end - tensor.begin;
  require(bytes == elements * bytes_per_element(tensor.dtype), "wrong size: ", tensor.name);
  double product = 1;
  for (size_t extent : tensor.shape) product *= double(extent);
  require(product == double(elements), "too large to count: ", tensor.name);
  require(file.find(tensor.name) == &tensor, "not found: ", tensor.name);
  std::vector<float> values(elements + 1, -7);
  file.read(tensor, 0, elements, values.data());
  require(values[elements] == -7, "written past the end: ", tensor.name);
  const size_t half = elements / 2;
  std::vector<float> slice(elements - half);
  file.read(tensor, half, elements - half, slice.data());
  const size_t bytes_of_slice = slice.size() * sizeof(float);
  require(slice.empty() || std::memcmp(slice.data(), &values[half], bytes_of_slice) == 0, "another slice");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string content = safetensors_of({data, data + size});
  const std::filesystem::path path = fuzzed("x.safetensors", content);
  std::optional<SafetensorsFile> file;
  if (!done(content.size(), [&] { file.emplace(path); })) return 0;
  uint64_t header_bytes;
  std::memcpy(&header_bytes, content.data(), sizeof header_bytes);
  size_t covered = sizeof header_bytes + header_bytes;
  for (const TensorInfo& tensor : file->tensors()) covered += tensor.end - tensor.begin;
  require(covered == content.size(), "data that belongs to no tensor, or to two");
  for (const TensorInfo& tensor : file->tensors()) done(content.size(), [&] { read_tensor(*file, tensor); });
  return 0;
}
