#include "extensions/generation/tokenizer.h"

#include <algorithm>
#include <exception>
#include <fstream>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "gpt/base/json_fields.h"

namespace {

constexpr const char* files_again = ": get the tokenizer's files again";

enum CharacterClass { space, letter, digit, other };

CharacterClass class_of(unsigned char c) {
  if (c == ' ' || (c >= '\t' && c <= '\r')) return space;
  if (c >= '0' && c <= '9') return digit;
  if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c >= 0x80) return letter;
  return other;
}

// Maps the spelling of a byte in the files, as UTF-8, to the byte.
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

// Converts "Ġthe" to " the". Characters that spell no byte are kept, because added tokens may hold any text.
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

// Reads a merge, "LEFT RIGHT" or ["LEFT", "RIGHT"]. Fails with a description if it is neither.
std::pair<std::string, std::string> merge_of(const nlohmann::json& entry) {
  if (entry.is_string()) {
    const std::string text = entry;
    if (const size_t gap = text.find(' '); gap != std::string::npos) return {unspell(text.substr(0, gap)), unspell(text.substr(gap + 1))};
  }
  const bool pair = entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string();
  if (!pair) fail("merge ", excerpt(entry.dump()), " is not 'LEFT RIGHT'", files_again);
  return {unspell(entry[0].get<std::string>()), unspell(entry[1].get<std::string>())};
}

// Fails if the file has another value at this place (a JSON pointer).
void require(const std::filesystem::path& path, const nlohmann::json& file, const char* place, const nlohmann::json& wanted,
             const nlohmann::json& when_missing) {
  const nlohmann::json::json_pointer pointer(place);
  const nlohmann::json found = file.contains(pointer) ? file.at(pointer) : when_missing;
  if (found != wanted)
    fail(path, ": ", place, " is ", shown(found), ", this program knows GPT-2's tokenizer only, where it is ", wanted.dump(),
         ": remove the tokenizer's files, and texts are shown as ids");
}

// The content of a file in the folder; an empty object if it is not there.
nlohmann::json object_in(const std::filesystem::path& folder, const char* name) {
  return !folder.empty() && std::filesystem::exists(folder / name) ? read_json_object(folder / name) : nlohmann::json::object();
}

// The added tokens of files beside vocab.json, as tokenizer.json has them.
nlohmann::json added_beside(const std::filesystem::path& folder) {
  nlohmann::json added = nlohmann::json::array();
  const nlohmann::json by_id = object_in(folder, "tokenizer_config.json").value("added_tokens_decoder", nlohmann::json());
  const nlohmann::json by_text = object_in(folder, "added_tokens.json");
  for (const auto& [id, token] : by_id.items()) {
    added.push_back(token.is_object() ? token : nlohmann::json::object());
    added.back()["id"] = nlohmann::json::parse(id, nullptr, false);
  }
  for (const auto& [text, id] : by_text.items()) added.push_back({{"id", id}, {"content", text}});
  return added;
}

}  // namespace

bool has_tokenizer(const std::filesystem::path& folder) {
  for (const char* name : {"vocab.json", "encoder.json", "tokenizer.json"})
    if (std::filesystem::exists(folder / name)) return true;
  return false;
}

void check_tokens_are_bytes(const std::filesystem::path& folder, int vocabulary) {
  if (vocabulary <= 256 && !has_tokenizer(folder)) return;
  fail("--train is text, whose bytes are tokens, and the weights in ", folder, " have a vocabulary of ", vocabulary,
       vocabulary <= 256 ? " with a tokenizer" : "", ": tokenize the text with data/tokenize.py (data/README.md) and give "
       "the .bin shards");
}

Tokenizer::Tokenizer(int vocabulary, const std::filesystem::path& folder) : vocabulary_(vocabulary), folder_(folder) {
  if (!folder.empty()) read_files();
  begins_ = named_ids("bos_token_id"), ends_ = named_ids("eos_token_id");
  if (ends_.empty() && knows("<|endoftext|>")) ends_ = {ids_.at("<|endoftext|>")};
  if (ends_.empty() && ids_.empty() && vocabulary >= 50257) ends_ = {50256};
}

void Tokenizer::read_files() {
  const std::filesystem::path& folder = folder_;
  const nlohmann::json flags = object_in(folder, "tokenizer_config.json");
  for (const char* flag : {"/add_prefix_space", "/add_bos_token", "/add_eos_token"})
    require(folder / "tokenizer_config.json", flags, flag, false, false);
  auto first_of = [&](const char* name, const char* other) {
    return std::filesystem::exists(folder / name) ? folder / name : folder / other;
  };
  const std::filesystem::path tokens = first_of("vocab.json", "encoder.json"), merges = first_of("merges.txt", "vocab.bpe");
  if (std::filesystem::exists(folder / "tokenizer.json")) return read_all(folder / "tokenizer.json");
  if (!std::filesystem::exists(tokens)) return;
  add_tokens(tokens, read_json_object(tokens), added_beside(folder));
  if (std::filesystem::exists(merges)) read_merges(merges);
}

// The ids of the tokens under this key that are in the vocabulary.
std::vector<int> Tokenizer::named_ids(const char* key) const {
  std::vector<int> ids;
  for (const char* name : {"generation_config.json", "config.json"}) {
    if (!ids.empty()) break;
    const nlohmann::json found = object_in(folder_, name).value(key, nlohmann::json());
    for (const nlohmann::json& id : found.is_array() ? found : nlohmann::json::array({found}))
      if (id.is_number_unsigned() && id < vocabulary_) ids.push_back(id);
  }
  return ids;
}

int Tokenizer::first_token() const {
  for (const std::vector<int>* ids : {&begins_, &ends_})
    if (!ids->empty()) return ids->front();
  return knows("\n") ? ids_.at("\n") : std::min(int('\n'), vocabulary_ - 1);
}

bool Tokenizer::knows(const std::string& symbol) const {
  const auto found = ids_.find(symbol);
  return found != ids_.end() && found->second < vocabulary_;
}

std::string Tokenizer::decode(const std::vector<int>& ids) const {
  std::string text;
  for (int id : ids) {
    if (is_bytes()) {
      text += char(id);
    } else if (id >= 0 && size_t(id) < bytes_of_.size()) {
      text += bytes_of_[size_t(id)];
    } else {  // there are no files, or the model's vocabulary is larger than theirs
      text += std::to_string(id) + " ";
    }
  }
  return text;
}

std::vector<int> Tokenizer::encode(std::string_view text) const {
  if (!is_bytes() && ranks_.empty())
    fail("text is turned into tokens by vocab.json and merges.txt, or tokenizer.json, which ",
         folder_.empty() ? "are not given" : folder_.string() + " lacks",
         ": put them there, start from an --init folder that has them, or give no --prompt");
  std::vector<int> ids;
  for (size_t begin = 0, length; begin < text.size(); begin += length) {
    length = added_token_at(text.substr(begin));
    if (length > 0) {
      ids.push_back(id_of(std::string(text.substr(begin, length))));
      continue;
    }
    while (begin + length < text.size() && added_token_at(text.substr(begin + length)) == 0) ++length;
    const std::string_view plain = text.substr(begin, length);
    for (size_t start = 0, end; start < plain.size(); start = end) {
      end = is_bytes() ? start + 1 : word_end(plain, start);
      for (const std::string& symbol : merged(plain.substr(start, end - start))) ids.push_back(id_of(symbol));
    }
  }
  return ids;
}

// Length of the longest added token that the text begins with; 0: none.
size_t Tokenizer::added_token_at(std::string_view text) const {
  size_t longest = 0;
  for (const std::string& token : added_)
    if (text.starts_with(token)) longest = std::max(longest, token.size());
  return longest;
}

size_t Tokenizer::word_end(std::string_view text, size_t start) {
  for (std::string_view suffix : {"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"})
    if (text.substr(start).starts_with(suffix)) return start + suffix.size();
  auto run_end = [&](size_t from) {
    size_t end = from;
    while (end < text.size() && class_of(text[end]) == class_of(text[from])) ++end;
    return end;
  };
  size_t word = start + (text[start] == ' ');
  if (word < text.size() && class_of(text[word]) != space) return run_end(word);
  size_t end = run_end(start);  // white space, whose last character belongs to the word that follows
  return end == text.size() || end - start == 1 ? end : end - 1;
}

void Tokenizer::read_merges(const std::filesystem::path& path) {
  std::ifstream file(path);
  size_t number = 0;
  for (std::string line; std::getline(file, line);) {
    if (++number == 1 && line.starts_with("#version")) continue;
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty()) continue;
    size_t gap = line.find(' ');
    if (gap == std::string::npos) fail(path, ": line ", number, ", ", excerpt(line), ", is not 'LEFT RIGHT'", files_again);
    std::pair merge(unspell(line.substr(0, gap)), unspell(line.substr(gap + 1)));
    ranks_.emplace(std::move(merge), ranks_.size());
  }
}

// Reads tokenizer.json. It can describe many kinds of tokenizers; this accepts GPT-2's kind.
void Tokenizer::read_all(const std::filesystem::path& path) {
  const nlohmann::json file = read_json_object(path);
  require(path, file, "/model/type", "BPE", nullptr);
  require(path, file, "/model/ignore_merges", false, false);
  require(path, file, "/normalizer", nullptr, nullptr);
  require(path, file, "/pre_tokenizer/type", "ByteLevel", nullptr);
  require(path, file, "/pre_tokenizer/add_prefix_space", false, false);
  require(path, file, "/pre_tokenizer/use_regex", true, true);
  for (const char* adds : {"/post_processor/single/1", "/post_processor/cls"}) require(path, file, adds, nullptr, nullptr);
  const nlohmann::json& model = file["model"];
  add_tokens(path, model.value("vocab", nlohmann::json()), file.value("added_tokens", nlohmann::json::array()));
  for (const auto& merge : model.value("merges", nlohmann::json::array())) try {
    ranks_.emplace(merge_of(merge), ranks_.size());
  } catch (const std::exception& error) {
    fail(path, ": ", error.what());
  }
}

// vocabulary: {"SPELLED": ID, ...}; added: [{"id": ID, "content": "TEXT"}, ...], some of which may be in the
// vocabulary, too.
void Tokenizer::add_tokens(const std::filesystem::path& path, const nlohmann::json& vocabulary, const nlohmann::json& added) {
  if (!vocabulary.is_object() || !added.is_array()) fail(path, ": holds no vocabulary", files_again);
  bytes_of_.resize(vocabulary.size() + added.size());
  const auto add = [&](const std::string& text, const nlohmann::json& id, bool again) {
    bool valid = id.is_number_unsigned() && id < bytes_of_.size() && !text.empty();
    valid = valid && (bytes_of_[id].empty() || (again && bytes_of_[id] == text));
    if (!valid) fail(path, ": token ", excerpt(text), " has id ", excerpt(id.dump()), ", ids must be 0, 1, 2 ...", files_again);
    bytes_of_[id] = text;
    ids_[text] = id;
  };
  for (const auto& [spelled, id] : vocabulary.items()) add(unspell(spelled), id, false);
  for (const auto& token : added) {
    const bool valid = token.contains("id") && token.contains("content") && token["content"].is_string();
    if (!valid) fail(path, ": added token ", excerpt(token.dump()), " lacks its id or its content", files_again);
    for (const char* flag : {"/lstrip", "/rstrip", "/single_word"}) require(path, token, flag, false, false);
    add(token["content"], token["id"], true);
    added_.push_back(token["content"]);
  }
  if (ids_.contains("<|endoftext|>")) added_.push_back("<|endoftext|>");  // vocab.json doesn't tell
  while (!bytes_of_.empty() && bytes_of_.back().empty()) bytes_of_.pop_back();
  const auto gap = std::find(bytes_of_.begin(), bytes_of_.end(), "");
  if (gap != bytes_of_.end()) fail(path, ": no token has id ", gap - bytes_of_.begin(), ", ids must be 0, 1, 2 ...", files_again);
}

// Byte-pair encoding (Sennrich et al. 2016): joins the neighbours of lowest rank, as long as any neighbours can be
// joined.
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
  if (found == ids_.end() && !is_bytes()) fail(folder_, ": its vocabulary has no token ", excerpt(symbol), ": give a --prompt without it");
  int id = is_bytes() ? static_cast<unsigned char>(symbol[0]) : found->second;
  if (id < vocabulary_) return id;
  fail("text ", excerpt(symbol), " is token ", id, ", the model's vocabulary ends at ", vocabulary_ - 1,
       ": give another --prompt, or weights made for this tokenizer");
}
