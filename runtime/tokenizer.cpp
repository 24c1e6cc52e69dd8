#include "runtime/tokenizer.h"

#include <fstream>

#include <nlohmann/json.hpp>

#include "runtime/error.h"
#include "runtime/files.h"

namespace {

enum CharacterClass { space, letter, digit, other };

CharacterClass class_of(unsigned char c) {
  if (c == ' ' || (c >= '\t' && c <= '\r')) return space;
  if (c >= '0' && c <= '9') return digit;
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c >= 0x80) return letter;
  return other;
}

// Spelling of each byte in the files, as UTF-8, to the byte.
std::unordered_map<std::string, char> spelled_bytes() {
  std::unordered_map<std::string, char> bytes;
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    bool itself = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    int code_point = itself ? byte : next++;
    std::string ascii = {char(code_point)};
    std::string two_bytes = {char(0xc0 | code_point >> 6), char(0x80 | (code_point & 63))};
    bytes[code_point < 128 ? ascii : two_bytes] = char(byte);
  }
  return bytes;
}

// "Ġthe" to " the". Characters that spell no byte stay: added tokens may hold any text.
std::string unspell(std::string_view spelled) {
  static const std::unordered_map<std::string, char> bytes = spelled_bytes();
  std::string result;
  for (size_t i = 0, length; i < spelled.size(); i += length) {
    length = (spelled[i] & 0xe0) == 0xc0 ? 2 : 1;
    std::string character(spelled.substr(i, length));
    auto found = bytes.find(character);
    result += found == bytes.end() ? character : std::string(1, found->second);
  }
  return result;
}

}  // namespace

Tokenizer::Tokenizer(int vocabulary, const std::filesystem::path& folder) : vocabulary_(vocabulary), folder_(folder) {
  if (folder.empty()) return;
  auto first_of = [&](const char* name, const char* other) {
    return std::filesystem::exists(folder / name) ? folder / name : folder / other;
  };
  std::filesystem::path tokens = first_of("vocab.json", "encoder.json");
  std::filesystem::path merges = first_of("merges.txt", "vocab.bpe");
  if (!std::filesystem::exists(tokens)) return;
  read_tokens(tokens);
  if (std::filesystem::exists(merges)) read_merges(merges);
}

std::string Tokenizer::decode(const std::vector<int>& ids) const {
  std::string text;
  for (int id : ids) {
    if (is_bytes()) {
      text += char(id);
    } else if (id >= 0 && size_t(id) < bytes_of_.size()) {
      text += bytes_of_[size_t(id)];
    } else {  // there are no files, or the model's vocabulary is larger
      text += std::to_string(id) + " ";
    }
  }
  return text;
}

std::vector<int> Tokenizer::encode(std::string_view text) const {
  if (!is_bytes() && ranks_.empty()) {
    fail("text is turned into tokens by vocab.json and merges.txt, which ",
         folder_.empty() ? "are not given" : folder_.string() + " lacks",
         ": put them there, start from an --init folder that has them, or give no --prompt");
  }
  std::vector<int> ids;
  for (size_t start = 0, end; start < text.size(); start = end) {
    end = is_bytes() ? start + 1 : word_end(text, start);
    for (const std::string& symbol : merged(text.substr(start, end - start))) ids.push_back(id_of(symbol));
  }
  return ids;
}

size_t Tokenizer::word_end(std::string_view text, size_t start) {
  for (std::string_view suffix : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"}) {
    if (text.substr(start).starts_with(suffix)) return start + suffix.size();
  }
  auto run_end = [&](size_t from) {
    size_t end = from;
    while (end < text.size() && class_of(text[end]) == class_of(text[from])) ++end;
    return end;
  };
  size_t word = start + (text[start] == ' ');
  if (word < text.size() && class_of(text[word]) != space) return run_end(word);
  size_t end = run_end(start);  // white space; its last character is left for the word that follows
  return end == text.size() || end - start == 1 ? end : end - 1;
}

void Tokenizer::read_tokens(const std::filesystem::path& path) {
  nlohmann::json tokens = read_json_object(path);
  bytes_of_.resize(tokens.size());
  for (const auto& [spelled, id] : tokens.items()) {
    bool valid = id.is_number_unsigned() && id < tokens.size() && bytes_of_[id].empty() && !spelled.empty();
    if (!valid) {
      fail(path, ": token ", excerpt(spelled), " has id ", excerpt(id.dump()), ", ids must be 0, 1, 2 ...");
    }
    bytes_of_[id] = unspell(spelled);
    ids_[bytes_of_[id]] = id;
  }
}

void Tokenizer::read_merges(const std::filesystem::path& path) {
  std::ifstream file(path);
  size_t number = 0;
  for (std::string line; std::getline(file, line);) {
    if (++number == 1 && line.starts_with("#version")) continue;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    size_t gap = line.find(' ');
    if (gap == std::string::npos) fail(path, ": line ", number, " is not 'LEFT RIGHT'");
    std::pair merge(unspell(line.substr(0, gap)), unspell(line.substr(gap + 1)));
    ranks_.emplace(std::move(merge), ranks_.size());
  }
}

// Byte-pair encoding (Sennrich et al. 2016): join the neighbours of lowest rank while there are any.
std::vector<std::string> Tokenizer::merged(std::string_view word) const {
  std::vector<std::string> symbols;
  for (char byte : word) symbols.emplace_back(1, byte);
  for (;;) {
    size_t best_rank = ranks_.size(), best = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      auto found = ranks_.find({symbols[i], symbols[i + 1]});
      if (found != ranks_.end() && found->second < best_rank) best_rank = found->second, best = i;
    }
    if (best_rank == ranks_.size()) return symbols;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + std::ptrdiff_t(best) + 1);
  }
}

int Tokenizer::id_of(const std::string& symbol) const {
  auto found = ids_.find(symbol);
  if (found == ids_.end() && !is_bytes()) fail(folder_, ": its vocabulary has no token ", excerpt(symbol));
  int id = is_bytes() ? static_cast<unsigned char>(symbol[0]) : found->second;
  if (id < vocabulary_) return id;
  fail("text ", excerpt(symbol), " is token ", id, ", the vocabulary ends at ", vocabulary_ - 1);
}
