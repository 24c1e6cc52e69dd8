// Any files as a tokenizer, and any text: either refused, or the text comes back from its tokens.
// Input: vocabulary / 4 in a byte, then vocab.json, merges.txt, the text, and tokenizer.json.
#include <cstring>

#include "test/fuzz/fuzz.h"

#include "extensions/generation/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const int vocabulary = 4 * data[0];
  const std::vector<std::string> parts = parts_of({reinterpret_cast<const char*>(data + 1), size - 1}, 4);
  fuzzed_or_none("vocab.json", parts[0]);
  fuzzed_or_none("tokenizer.json", parts[3]);
  const std::filesystem::path folder = fuzzed_or_none("merges.txt", parts[1]).parent_path();
  const std::string& text = parts[2];
  done(size, [&] {
    const Tokenizer tokenizer(vocabulary, folder);
    std::vector<int> any_ids(text.size() / sizeof(int));
    if (!any_ids.empty()) std::memcpy(any_ids.data(), text.data(), any_ids.size() * sizeof(int));
    tokenizer.decode(any_ids);
    const std::vector<int> ids = tokenizer.encode(text);
    for (int id : ids) require(id >= 0 && id < vocabulary, "token ", id);
    require(tokenizer.decode(ids) == text, "another text comes back");
  });
  return 0;
}
