// Training data: files of tokens, which form one long sequence, and the order of its samples.
//
// Two kinds of files, which are never mixed:
//   NAME.bin   token shards as llm.c defines them (its dev/data/data_common.py): a header of 256 int32
//              (magic 20240520, version 1, number of tokens, zeros), then the tokens as uint16
//   other      text: every byte is a token, vocabulary 256
//
// Files are taken in bytewise order of their names and concatenated without separators. Sample i is the
// T + 1 tokens from i·T on; its first T tokens are inputs, its last T are targets. So neighbouring samples share one
// token, and n tokens hold floor((n - 1) / T) samples. A sample may span files.
//
// Files are opened when they are read, and a few stay open: there may be any number of them. A file that is written to,
// replaced or removed while a run reads it is an error, unless something was only added at its end: that is left out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpt/base/files.h"
#include "gpt/base/text.h"

// Tells whether two runs, or two ranks, have the same data.
struct DataIdentity {
  size_t tokens = 0;     // 0: no data
  std::string checksum;  // of some tokens from all parts of the data, so a small change may not be seen

  std::string text() const;  // "5000 tokens, checksum 0123456789abcdef", or "none"
};

// The data that a run reads.
struct RunData {
  DataIdentity train;
  std::map<std::string, std::string> val;  // the text that identifies a set's samples, by the key of its loss
};

// Reads data files in their place, and keeps what it has read (Room::data_cache). Can be used by several threads at a time.
class DataCache {
 public:
  virtual ~DataCache() = default;
  // Does the same as data.read(). version: the data's when the run began
  virtual void read(const File& data, const FileStamp& version, size_t offset, unsigned char* to, size_t bytes) = 0;
};

// Can be used by several threads at a time.
class TokenData {
 public:
  // Patterns are globs or names of files. Files without tokens are left out, and a message says so. cache: keeps the
  // samples that are read; null: there is none
  explicit TokenData(const std::vector<std::string>& patterns, DataCache* cache = nullptr);

  bool is_text() const { return is_text_; }
  size_t tokens() const { return files_.back().first + files_.back().tokens; }
  size_t files() const { return files_.size(); }
  static constexpr int shards_vocabulary = 50257;  // GPT-2's
  int default_vocabulary() const { return is_text_ ? 256 : shards_vocabulary; }

  size_t samples(int T) const;

  DataIdentity identity() const { return {tokens(), xxh3(looked_at_)}; }

  // Fails if the tokens that identity() looked at are others now.
  void require_unchanged() const;

  // Reads `count` samples from number `first` on to inputs (count,T) and targets (count,T). Fails if a token is outside
  // the vocabulary.
  void read_samples(size_t first, size_t count, int T, int vocabulary, int* inputs, int* targets) const;

  // Fails if a token of samples 0 to `samples` - 1 is outside the vocabulary.
  void check_tokens(size_t samples, int T, int vocabulary) const;

 private:
  struct TokenFile {
    std::string path;
    size_t first;   // position of its first token in the whole sequence
    size_t tokens;
    FileStamp version;        // when the run began
    mutable FileStamp stamp;  // later, if the file has grown
  };

  size_t looked_at(size_t number) const;
  std::string checksum(size_t number) const;
  void check_stamp(const TokenFile& file) const;
  const TokenFile& file_at(size_t position) const;
  std::vector<int> read(size_t position, size_t count, int vocabulary, DataCache* cache) const;
  void append(std::vector<int>& tokens, const TokenFile& file, size_t index, size_t count, int vocabulary, DataCache* cache) const;
  std::shared_ptr<const File> opened(const TokenFile& file) const;

  DataCache* cache_;
  bool is_text_ = true;
  std::vector<TokenFile> files_;
  std::string looked_at_;  // checksums of some tokens from all parts, one after another; empty while the constructor reads them
  mutable bool is_being_checked_ = false;  // require_unchanged() looks at a file that has grown
  mutable std::array<std::shared_ptr<const File>, 128> open_files_;  // file i, if it is open, is at i % open_files_.size()
  std::unique_ptr<std::recursive_mutex> mutex_ = std::make_unique<std::recursive_mutex>();  // for the mutable members
};

// The order in which samples are taken. The numbers 0, 1, 2, ... go through one epoch after another, in the order of
// the data, or shuffled differently in each epoch.
//
// A shuffled epoch is a permutation that is computed for each number, so a resumed run needs only the number: a
// Feistel network, keyed by seed and epoch, permutes [0, 4^h), the smallest such range that holds n samples,
// and is applied again while its result lies outside [0, n) (cycle walking; Black and Rogaway, "Ciphers with
// Arbitrary Finite Domains", 2002). The range ends below 4n, so on average at most four applications are needed.
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
