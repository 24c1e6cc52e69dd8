// Converts text to token ids and back. A byte-level model needs no files. A GPT-2 vocabulary has its files in a folder:
//
//   tokenizer.json               the whole of it, as newer transformers save it: {"model": {"type": "BPE", "vocab":
//                                {"TOKEN": ID, ...}, "merges": ["LEFT RIGHT" or ["LEFT", "RIGHT"], ...]},
//                                "added_tokens": [{"id": ID, "content": "TEXT"}, ...], ...}
//   and if it is not there:
//   vocab.json or encoder.json   {"TOKEN": ID, ...}
//   merges.txt or vocab.bpe      a version line, then one "LEFT RIGHT" per line, in order of rank; only for encoding
//   added_tokens.json            {"TEXT": ID, ...}; tokenizer_config.json: {"added_tokens_decoder": {"ID": {"content":
//                                "TEXT"}, ...}}
//
// Files with other settings, such as a space before a text, are refused. generation_config.json, or else config.json,
// has the ids of the tokens that begin and end a text, {"bos_token_id": ID, "eos_token_id": ID or [ID, ...]}.
//
// The files spell bytes as printable characters: bytes 33-126, 161-172 and 174-255 as the code points of the same
// number, the other 68 bytes, in order, as code points from 256 (Radford et al. 2019; encoder.py of the GPT-2
// release). Without files, ids of a GPT-2 vocabulary are printed as numbers.
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

// Checks, for training on text (each byte is a token), that the weights in `folder` have no other tokens.
void check_tokens_are_bytes(const std::filesystem::path& folder, int vocabulary);

class Tokenizer {
 public:
  // Uses the files in the folder. If there are none, or the path is empty, a vocabulary of up to 256 means bytes.
  Tokenizer(int vocabulary, const std::filesystem::path& folder);

  std::string decode(const std::vector<int>& ids) const;

  // The token that a sample without a prompt starts from: the one that begins a text, else one that ends it, else a line
  // end.
  int first_token() const;

  // The tokens that end a text. If no file names one: <|endoftext|>, where the vocabulary has it. Without files, a
  // vocabulary of GPT-2's size, perhaps padded, is taken for GPT-2's.
  const std::vector<int>& end_tokens() const { return ends_; }

  // Added tokens, and <|endoftext|>, are found anywhere in the text, as by transformers; the rest is split into words,
  // which are joined from bytes.
  std::vector<int> encode(std::string_view text) const;

  // The end of the word that begins at `start`. GPT-2's rule is a regular expression whose first matching branch
  // counts:
  //   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
  // Bytes beyond ASCII count as letters, so this is exact for ASCII and an approximation for other text.
  static size_t word_end(std::string_view text, size_t start);

 private:
  bool knows(const std::string& symbol) const;
  bool is_bytes() const { return bytes_of_.empty() && vocabulary_ <= 256; }

  void read_files();
  std::vector<int> named_ids(const char* key) const;
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
  std::vector<int> begins_, ends_;     // tokens that begin and end a text
  std::map<std::pair<std::string, std::string>, size_t> ranks_;
};
