// Training data: files of tokens, memory-mapped and seen as one long sequence, and the order of its samples.
//
// Two kinds of files, which are never mixed:
//   NAME.bin   token shards as llm.c defines them (its dev/data/data_common.py): a header of 256 int32
//              (magic 20240520, version 1, number of tokens, zeros), then the tokens as uint16
//   other      text: every byte is a token, vocabulary 256
//
// Files are taken in bytewise order of their names and concatenated without separators. Sample i of length T
// is tokens [i*T, i*T + T] of the sequence; inputs are its first T tokens, targets its last T, so that
// neighbours share one token and n tokens hold floor((n - 1) / T) samples. A sample may span files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/files.h"

class TokenData {
 public:
  explicit TokenData(const std::vector<std::string>& patterns);

  bool is_text() const { return is_text_; }
  size_t tokens() const { return files_.back().first + files_.back().tokens; }
  size_t files() const { return files_.size(); }
  int default_vocabulary() const { return is_text_ ? 256 : 50257; }

  size_t samples(int T) const;

  // inputs, targets: (T)
  void read_sample(size_t sample, int T, int vocabulary, int* inputs, int* targets) const;

 private:
  struct TokenFile {
    std::string path;
    MappedFile bytes;
    size_t first;   // number of its first token in the whole sequence
    size_t tokens;
  };

  void add_file(const std::string& path);
  static size_t tokens_in_shard(const TokenFile& file);
  int token_at(const TokenFile& file, size_t index) const;
  [[noreturn]] static void refuse_token(const TokenFile& file, size_t index, int token, int vocabulary);

  bool is_text_ = true;
  std::vector<TokenFile> files_;
};

// The order in which samples are taken: running numbers 0, 1, 2, ... go through one epoch after another, in
// the data's own order or shuffled anew each epoch.
//
// A shuffled epoch is a permutation computed on the fly, so that resuming needs only the running number: a
// Feistel network, keyed by seed and epoch, permutes [0, 4^h), the smallest such range that holds n samples,
// and is applied again while its result lies outside [0, n) (cycle walking; Black and Rogaway, "Ciphers with
// Arbitrary Finite Domains", 2002). The range ends below 4n, so four applications are enough on average.
class SampleOrder {
 public:
  SampleOrder(size_t samples, bool shuffle, uint64_t seed);

  size_t operator()(size_t number) const;

 private:
  size_t permute(size_t index, uint64_t key) const;

  size_t samples_;
  bool shuffle_;
  uint64_t seed_;
  int half_bits_;
};
