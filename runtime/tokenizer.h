// Text to token ids and back. A byte-level model needs no files. For a GPT-2 vocabulary they lie in a folder:
//
//   vocab.json or encoder.json   {"TOKEN": ID, ...}
//   merges.txt or vocab.bpe      a version line, then "LEFT RIGHT" a line, first merge first; for encoding
//   tokenizer.json               instead of both, as today's transformers saves it: {"model": {"type": "BPE", "vocab":
//                                {"TOKEN": ID, ...}, "merges": ["LEFT RIGHT" or ["LEFT", "RIGHT"], ...]},
//                                "added_tokens": [{"id": ID, "content": "TEXT"}, ...], ...}
//
// They spell bytes as printable characters: bytes 33-126, 161-172 and 174-255 as the code points of the same
// number, the other 68 bytes, in order, as code points from 256 (Radford et al. 2019; encoder.py of the GPT-2
// release). Without files ids are printed as numbers.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

// Does the folder hold files of a tokenizer?
bool has_tokenizer(const std::filesystem::path& folder);

// Text becomes tokens byte by byte: refuses weights in `folder` whose tokens are something else.
void check_tokens_are_bytes(const std::filesystem::path& folder, int vocabulary);

class Tokenizer {
 public:
  // Files in the folder decide, else a vocabulary of up to 256 means bytes. An empty path: no files.
  Tokenizer(int vocabulary, const std::filesystem::path& folder);

  std::string decode(const std::vector<int>& ids) const;

  // What a sample without a prompt starts from: <|endoftext|> where there is one (without files a vocabulary like GPT-2's,
  // perhaps padded, is taken for it), else a line end.
  int first_token() const;

  // Added tokens, and <|endoftext|>, are known wherever they stand in the text, as transformers does it; else words are
  // divided, and joined from bytes.
  std::vector<int> encode(std::string_view text) const;

  // End of the word that starts there. GPT-2's rule, a regular expression whose first matching branch counts:
  //   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  // Bytes beyond ASCII count as letters: exact for ASCII, an approximation for other text.
  static size_t word_end(std::string_view text, size_t start);

 private:
  bool is_bytes() const { return bytes_of_.empty() && vocabulary_ <= 256; }

  void read_merges(const std::filesystem::path& path);
  void read_all(const std::filesystem::path& path);
  void add_tokens(const std::filesystem::path& path, const nlohmann::json& vocabulary, const nlohmann::json& added);
  size_t added_token_at(std::string_view text) const;
  std::vector<std::string> merged(std::string_view word) const;
  int id_of(const std::string& symbol) const;

  int vocabulary_;
  std::filesystem::path folder_;
  std::vector<std::string> bytes_of_;  // by id
  std::unordered_map<std::string, int> ids_;
  std::vector<std::string> added_;     // texts that are a token as they are
  std::map<std::pair<std::string, std::string>, size_t> ranks_;
};
