// Any two files as token shards or as text: either refused, or every sample holds the tokens that lie there.
// Input: kind (odd: shards), sequence length and vocabulary / 4 in a byte each, then two files. A shard comes without
// the zeros of its header: three int32, then tokens.
#include <optional>

#include "test/fuzz/fuzz.h"

#include "gpt/data.h"

namespace {

std::string shard_of(const std::string& part) {
  constexpr size_t given = 3 * sizeof(int32_t), header_bytes = 256 * sizeof(int32_t);
  if (part.size() < given) return part;
  return part.substr(0, given) + std::string(header_bytes - given, '\0') + part.substr(given);
}

void append_tokens(std::vector<int>& tokens, const std::string& content, bool shards) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(content.data());
  if (!shards) tokens.insert(tokens.end(), bytes, bytes + content.size());
  else for (size_t i = 1024; i + 1 < content.size(); i += 2) tokens.push_back(bytes[i] | bytes[i + 1] << 8);
}

void compare_samples(const TokenData& data, size_t samples, const std::vector<int>& tokens, int T, int vocabulary) {
  require(T > 0 && samples * size_t(T) + 1 <= tokens.size(), samples, " samples of ", T);
  std::vector<int> inputs(T), targets(T);
  for (size_t sample = 0; sample < samples; ++sample) {
    const auto first = tokens.begin() + long(sample) * T, last = first + T + 1;
    const bool known = std::all_of(first, last, [&](int token) { return token < vocabulary; });
    const bool read = done(0, [&] { data.read_samples(sample, 1, T, vocabulary, inputs.data(), targets.data()); });
    require(read == known, "sample ", sample, read ? " holds unknown tokens" : " is refused");
    if (!read) return;
    require(std::equal(inputs.begin(), inputs.end(), first), "other inputs");
    require(std::equal(targets.begin(), targets.end(), first + 1), "other targets");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3) return 0;
  const bool shards = data[0] & 1;
  const int T = data[1], vocabulary = 4 * data[2];
  std::vector<std::string> paths;
  std::vector<int> tokens;
  size_t file_bytes = 0;
  for (const std::string& part : parts_of({reinterpret_cast<const char*>(data + 3), size - 3}, 2)) {
    const std::string content = shards ? shard_of(part) : part;
    const std::string ending = shards ? ".bin" : ".txt";
    if (paths.empty()) paths.push_back(fuzzed("a" + ending, content));
    else if (!content.empty()) paths.push_back(fuzzed("b" + ending, content));
    append_tokens(tokens, content, shards);
    file_bytes += content.size();
  }
  std::optional<TokenData> opened;
  if (!done(file_bytes, [&] { opened.emplace(paths); })) return 0;
  require(opened->tokens() == tokens.size(), opened->tokens(), " tokens instead of ", tokens.size());
  size_t samples = 0;
  if (done(0, [&] { samples = opened->samples(T); })) compare_samples(*opened, samples, tokens, T, vocabulary);
  return 0;
}
