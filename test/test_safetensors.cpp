// The safetensors reader and writer: gpt/safetensors.h. Hostile files must be refused, never followed.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gpt/safetensors.h"
#include "test/temporary_folder.h"

std::string with_length(const std::string& header, const std::string& data) {
  uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + data;
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":[)" + shape + R"(],"data_offsets":[)" +
         offsets + "]}";
}

template <class Value>
std::string bytes_of(const std::vector<Value>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Value)};
}

std::vector<float> values_of(const SafetensorsFile& file, const std::string& name) {
  const TensorInfo* tensor = file.find(name);
  REQUIRE(tensor);
  std::vector<float> values(element_count(tensor->shape));
  file.read(*tensor, 0, values.size(), values.data());
  return values;
}

// The number in a format with `exponent_bits` and `mantissa_bits`, by its definition, in double precision.
double decoded(uint32_t bits, int exponent_bits, int mantissa_bits) {
  int bias = (1 << (exponent_bits - 1)) - 1, largest = (1 << exponent_bits) - 1;
  int mantissa = int(bits & ((1u << mantissa_bits) - 1)), exponent = int(bits >> mantissa_bits) & largest;
  double sign = bits >> (exponent_bits + mantissa_bits) & 1 ? -1 : 1;
  if (exponent == largest) return mantissa ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

bool same(double wanted, float value) {
  if (std::isnan(wanted)) return std::isnan(value);
  return wanted == value && std::signbit(wanted) == std::signbit(value);
}

TEST_CASE("every bfloat16 and every half is converted exactly") {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    wrong += !same(decoded(bits, 8, 7), float_from_bf16(uint16_t(bits)));
    wrong += !same(decoded(bits, 5, 10), float_from_fp16(uint16_t(bits)));
  }
  CHECK(wrong == 0);
}

TEST_CASE("reads F32, F16 and BF16, whole tensors or ranges of elements, at any alignment") {
  TemporaryFolder folder;
  std::string header = "{" + entry("b", "BF16", "3", "1,7") + "," + entry("flag", "BOOL", "1", "0,1") + "," +
                       entry("f", "F32", "2,2", "7,23") + "," + entry("h", "F16", "", "23,25") + "," +
                       entry("none", "I64", "0,5", "25,25") + ",\"__metadata__\":{\"format\":\"pt\"}}  ";
  std::string data = "\1" + bytes_of<uint16_t>({0x3f80, 0xc000, 0x0000}) +
                     bytes_of<float>({1.5f, -2.5f, 1e-40f, 3e38f}) + bytes_of<uint16_t>({0x3555});
  SafetensorsFile file(put(folder / "x.safetensors", with_length(header, data)));
  CHECK(file.tensors().size() == 5);
  CHECK(file.metadata().at("format") == "pt");
  CHECK(file.find("g") == nullptr);
  CHECK(file.find("f")->shape == std::vector<size_t>{2, 2});
  CHECK(file.find("f")->begin == 7);
  CHECK(values_of(file, "f") == std::vector<float>{1.5f, -2.5f, 1e-40f, 3e38f});
  CHECK(values_of(file, "b") == std::vector<float>{1.f, -2.f, 0.f});
  CHECK(values_of(file, "h") == std::vector<float>{0.333251953125f});
  float slice[2];
  file.read(*file.find("f"), 1, 2, slice);
  CHECK(slice[0] == -2.5f);
  CHECK(slice[1] == 1e-40f);
  file.read(*file.find("f"), 4, 0, slice);
  auto read_error = [&](const char* name, size_t first, size_t count) {
    return error_of([&] { file.read(*file.find(name), first, count, slice); });
  };
  CHECK(is_line_with(read_error("f", 3, 2), "'f'", "4 elements", "3 + 2"));
  CHECK(is_line_with(read_error("f", 4, size_t(-1)), "4 elements"));
  CHECK(is_line_with(read_error("flag", 0, 1), "'flag'", "BOOL"));
}

TEST_CASE("every defect is named") {
  TemporaryFolder folder;
  std::string path = folder / "x.safetensors";
  auto defect_of_file = [&](const std::string& content) {
    put(path, content);
    return error_of([&] { SafetensorsFile file(path); });
  };
  auto defect = [&](const std::string& header, size_t data_bytes = 8) {
    return defect_of_file(with_length(header, std::string(data_bytes, '\0')));
  };
  const std::string good = entry("a", "F32", "2", "0,8");
  CHECK(defect("{" + good + "}") == "");
  CHECK(defect("{}", 0) == "");
  SUBCASE("the file") {
    CHECK(is_line_with(defect_of_file(""), path, "0 bytes"));
    CHECK(is_line_with(defect_of_file("1234567"), "7 bytes", "cut short", "download or copy it again"));
    CHECK(is_line_with(defect_of_file(std::string("\x05\0\0\0\0\0\0\0{}", 10)), "header has 5 bytes", "10"));
    CHECK(is_line_with(defect_of_file(std::string(8, '\xff') + "{}"), "header has 18446744073709551615"));
    CHECK(is_line_with(error_of([&] { SafetensorsFile(folder / "none"); }), "none", "No such file"));
    CHECK(is_line_with(error_of([&] { SafetensorsFile(folder.path()); }), "not a regular file: give one"));
  }
  SUBCASE("the JSON") {
    for (const char* header : {"", "{", "{]", "nul", "{\"a\":}", "{\"a\xff\":{}}", "{}x", "{\"a\":1e999}"}) {
      CHECK(is_line_with(defect(header), path, "not valid JSON"));
    }
    CHECK(is_line_with(defect("[]"), "no JSON object: download or copy it again"));
    CHECK(is_line_with(defect("5"), "no JSON object"));
    CHECK(is_line_with(defect("{\"a\":[]}"), "'a'", "no JSON object: download or copy it again"));
    CHECK(is_line_with(defect("{\"a\\n\":7}"), "'a?'", "no JSON object"));
    CHECK(is_line_with(defect("{\"" + std::string(5000, 'n') + "\":7}"), "nnn...'"));
    CHECK(is_line_with(defect("{\"a\":{\"b\":{}}}"), "too deep"));
    CHECK(is_line_with(defect("{\"a\":{\"shape\":[[1]]}}"), "too deep"));
    CHECK(is_line_with(defect("{\"__metadata__\":{\"a\":1}}", 0), "__metadata__", "not text"));
  }
  SUBCASE("a tensor's fields") {
    CHECK(is_line_with(defect("{\"a\":{}}"), "'a': \"dtype\" is missing: download"));
    CHECK(is_line_with(defect("{\"a\":{\"dtype\":7}}"), "\"dtype\" is '7', not a text"));
    CHECK(is_line_with(defect("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}"), "\"shape\" is missing"));
    CHECK(is_line_with(defect("{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}"), "\"data_offsets\" is missing"));
    CHECK(is_line_with(defect("{" + entry("a", "F99", "2", "0,8") + "}"), "unknown dtype 'F99'"));
    CHECK(is_line_with(defect("{" + entry("a", "F32", "-2", "0,8") + "}"), "'a': \"shape\" is '[-2]', not a list of counts"));
    CHECK(is_line_with(defect("{" + entry("a", "F32", "2.0", "0,8") + "}"), "\"shape\" is '[", "not a list of counts"));
    CHECK(is_line_with(defect("{" + entry("a", "F32", "\"2\"", "0,8") + "}"), "\"shape\" is '[", "not a list of counts"));
    CHECK(is_line_with(defect("{" + entry("a", "F32", "99999999999999999999", "0,8") + "}"), "not a list of counts"));
    CHECK(is_line_with(defect("{" + entry("a", "F32", "4611686018427387905", "0,4") + "}"), "too large"));
    CHECK(is_line_with(defect("{" + entry("a", "F32", "4294967296,4294967296", "0,0") + "}"), "too large"));
    CHECK(is_line_with(defect("{" + entry("a", "F32", "2", "0") + "}"), "1 data_offsets, not two"));
  }
  SUBCASE("where tensors lie") {
    CHECK(is_line_with(defect("{" + entry("a", "F32", "3", "0,8") + "}"), "0 to 8", "12 bytes"));
    CHECK(is_line_with(defect("{" + entry("a", "F32", "3", "0,12") + "}"), "0 to 12", "outside", "8 bytes"));
    CHECK(is_line_with(defect("{" + entry("a", "F32", "1", "8,4") + "}"), "8 to 4", "outside"));
    CHECK(is_line_with(defect("{" + entry("a", "F32", "2", "18446744073709551612,4") + "}"), "outside"));
    CHECK(is_line_with(defect("{" + good + "," + entry("b", "F32", "1", "4,8") + "}"), "'b'", "overlaps"));
    CHECK(is_line_with(defect("{" + good + "," + entry("b", "F32", "2", "0,8") + "}"), "overlaps"));
    CHECK(is_line_with(defect("{" + good + "," + entry("b", "F32", "1", "12,16") + "}", 16), "'b'", "hole"));
    CHECK(is_line_with(defect("{" + good + "}", 10), "2 bytes at its end"));
    CHECK(is_line_with(defect("{" + good + "," + entry("a", "F32", "1", "8,12") + "}", 12), "'a'", "twice"));
  }
}

// Each is refused at the first thing that cannot be, not after megabytes have been turned into objects.
TEST_CASE("hostile JSON exhausts neither the stack nor memory") {
  TemporaryFolder folder;
  std::string path = folder / "x.safetensors";
  auto error = [&](const std::string& start, const std::string& repeated) {
    std::string header = start;
    for (int i = 0; i < 1'000'000; ++i) header += repeated;
    put(path, with_length(header, ""));
    return error_of([&] { SafetensorsFile file(path); });
  };
  CHECK(is_line_with(error("", "["), "no JSON object"));
  CHECK(is_line_with(error("{\"a\":", "["), "'a' is no JSON object"));
  CHECK(is_line_with(error("", "{\"a\":"), "'a' is nested too deep"));
  CHECK(is_line_with(error("{\"a\":{\"shape\":", "["), "'a' is nested too deep"));
  CHECK(is_line_with(error("{", "\"a\":{},"), "'a': \"dtype\" is missing"));
  CHECK(is_line_with(error("{\"a\":{\"shape\":[", "1,"), "'a' has too many values"));
  CHECK(is_line_with(error("{\"__metadata__\":{", "\"a\":\"\","), "too many values"));
}

TEST_CASE("what is written is read back, in any order of ranges") {
  TemporaryFolder folder;
  std::string path = folder / "x.safetensors";
  std::vector<float> weight = {1, 2, 3, 4, 5, 6}, bias = {-1, std::numeric_limits<float>::infinity()};
  std::vector<NamedShape> tensors = {{"weight", {2, 3}}, {"bias", {2}}, {"scalar", {}}, {"empty", {0}}};
  SafetensorsWriter writer(path, tensors, {{"format", "pt"}});
  writer.write("bias", 0, 2, bias.data());
  writer.write("weight", 4, 2, weight.data() + 4);
  writer.write("weight", 0, 4, weight.data());
  writer.write("scalar", 0, 1, bias.data());
  CHECK(is_line_with(error_of([&] { writer.write("weight", 5, 2, bias.data()); }), "'weight'", "6 elements"));
  CHECK(is_line_with(error_of([&] { writer.write("gone", 0, 1, bias.data()); }), "no tensor 'gone'"));
  writer.close();
  SafetensorsFile file(path);
  CHECK(values_of(file, "weight") == weight);
  CHECK(values_of(file, "bias") == bias);
  CHECK(values_of(file, "scalar") == std::vector<float>{-1});
  CHECK(values_of(file, "empty").empty());
  CHECK(file.metadata().at("format") == "pt");
  uint64_t header_bytes;
  std::memcpy(&header_bytes, content_of(path).data(), sizeof header_bytes);
  CHECK(header_bytes % 8 == 0);
}

TEST_CASE("the writer refuses what cannot be written") {
  TemporaryFolder folder;
  auto write = [](const std::filesystem::path& path, const std::vector<NamedShape>& tensors) {
    return error_of([&] { SafetensorsWriter(path, tensors, {}); });
  };
  CHECK(is_line_with(write(folder / "a", {{"x", {1}}, {"x", {2}}}), "two tensors", "'x'"));
  CHECK(is_line_with(write(folder / "none" / "a", {{"x", {1}}}), "none/a", "cannot open", "No such file"));
  std::string too_large;
  {
    const FullDisk full(4096);
    too_large = write(folder / "a", {{"x", {100000}}});
  }
  CHECK(is_line_with(too_large, "cannot reserve 400", "File too large"));
}

// Whatever a file holds, opening it either fails with one line or gives tensors that can be read completely.
void survive(const std::filesystem::path& path, int& opened) {
  std::string error = error_of([&] {
    SafetensorsFile file(path);
    ++opened;
    for (const TensorInfo& tensor : file.tensors()) {
      bool readable = tensor.dtype == "F32" || tensor.dtype == "BF16" || tensor.dtype == "F16";
      if (readable) values_of(file, tensor.name);
    }
  });
  CHECK(!contains(error, "\n"));
}

TEST_CASE("random corruption is survived") {
  TemporaryFolder folder;
  std::string header = "{\"__metadata__\":{\"format\":\"pt\"}," + entry("a", "F32", "2,3", "0,24") + "," +
                       entry("b", "BF16", "4", "24,32") + "," + entry("c", "F16", "1,2", "32,36") + "}   ";
  std::string good = with_length(header, std::string(36, 'x'));
  std::filesystem::path path = folder / "x.safetensors";
  std::mt19937 random(1);
  auto below = [&](size_t limit) { return random() % limit; };
  int opened = 0, rounds = 6000;
  for (int round = 0; round < rounds; ++round) {
    std::string bad = good;
    size_t flips = below(4);
    for (size_t flip = 0; flip < flips; ++flip) bad[below(bad.size())] ^= char(1 << below(8));
    if (below(3) == 0) bad[below(8 + header.size())] = "0123456789,[]{}\":-e"[below(19)];
    if (below(4) == 0) bad.resize(below(bad.size() + 1));
    if (below(8) == 0) bad.insert(below(bad.size() + 1), bad, 0, below(40));
    survive(put(path, bad), opened);
  }
  CHECK(opened > rounds / 10);      // some corruption hits only data
  CHECK(opened < rounds * 9 / 10);  // the rest is found
  for (size_t size = 0; size < good.size(); ++size) {
    opened = 0;
    survive(put(path, good.substr(0, size)), opened);
    CHECK(opened == 0);
  }
}
