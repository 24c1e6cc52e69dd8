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

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include <glob.h>

#include "runtime/error.h"
#include "runtime/files.h"

// Regular files that the patterns name, in bytewise order; one that several patterns match counts once.
inline std::vector<std::string> matching_files(const std::vector<std::string>& patterns) {
  if (patterns.empty()) fail("no data files: name text files or .bin token shards");
  std::vector<std::string> files;
  for (const std::string& pattern : patterns) {
    std::error_code not_there;
    if (std::filesystem::is_regular_file(pattern, not_there)) {  // a name may contain '[' or '*' itself
      files.push_back(pattern);
      continue;
    }
    glob_t matches;
    int status = glob(pattern.c_str(), GLOB_NOSORT, nullptr, &matches);
    size_t before = files.size();
    for (size_t i = 0; status == 0 && i < matches.gl_pathc; ++i) {
      const char* path = matches.gl_pathv[i];
      if (std::filesystem::is_regular_file(path, not_there)) files.push_back(path);
    }
    globfree(&matches);
    if (files.size() == before) {
      fail("data '", pattern, "' matches no regular file: check the path, and quote globs against the shell");
    }
  }
  std::sort(files.begin(), files.end());
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

class TokenData {
 public:
  explicit TokenData(const std::vector<std::string>& patterns) {
    std::vector<std::string> paths = matching_files(patterns);
    is_text_ = !is_shard(paths.front());
    for (const std::string& path : paths) {
      if (is_shard(path) == is_text_) {
        fail("data mixes text and .bin token shards ('", paths.front(), "', '", path, "'): give one kind");
      }
      add_file(path);
    }
  }

  bool is_text() const { return is_text_; }
  size_t tokens() const { return files_.back().first + files_.back().tokens; }
  size_t files() const { return files_.size(); }
  int default_vocabulary() const { return is_text_ ? 256 : 50257; }

  size_t samples(int T) const {
    if (T < 1) fail("sequence length ", T, " is not positive");
    size_t count = (tokens() - 1) / size_t(T);
    if (count == 0) {
      fail("data '", files_.front().path, "'", files() > 1 ? " and others hold " : " holds ", tokens(),
           " tokens, one sample of sequence length ", T, " needs ", size_t(T) + 1,
           ": give more data or a shorter sequence");
    }
    return count;
  }

  // inputs, targets: (T)
  void read_sample(size_t sample, int T, int vocabulary, int* inputs, int* targets) const {
    if (sample >= samples(T)) fail("sample ", sample, " of ", samples(T), " does not exist");
    size_t position = sample * size_t(T);
    auto starts_later = [](size_t wanted, const TokenFile& file) { return wanted < file.first; };
    auto file = std::upper_bound(files_.begin(), files_.end(), position, starts_later) - 1;
    for (int t = 0; t <= T; ++t, ++position) {
      if (position == file->first + file->tokens) ++file;  // no file is empty
      int token = token_at(*file, position - file->first);
      if (token >= vocabulary) refuse_token(*file, position - file->first, token, vocabulary);
      if (t < T) inputs[t] = token;
      if (t > 0) targets[t - 1] = token;
    }
  }

 private:
  static constexpr size_t header_bytes = 256 * sizeof(int32_t);
  static constexpr int32_t magic = 20240520, version = 1;

  struct TokenFile {
    std::string path;
    MappedFile bytes;
    size_t first;   // number of its first token in the whole sequence
    size_t tokens;
  };

  static bool is_shard(const std::string& path) { return path.ends_with(".bin"); }

  void add_file(const std::string& path) {
    TokenFile file{path, MappedFile(path), files_.empty() ? 0 : tokens(), 0};
    file.tokens = is_text_ ? file.bytes.size() : tokens_in_shard(file);
    if (file.tokens == 0) fail(path, ": holds no tokens: remove it or give another file");
    files_.push_back(std::move(file));
  }

  static size_t tokens_in_shard(const TokenFile& file) {
    const char* cure = ": write shards with data/tokenize.py";
    size_t size = file.bytes.size();
    if (size < header_bytes) {
      fail(file.path, ": has ", size, " bytes, a token shard starts with a header of ", header_bytes, cure);
    }
    int32_t header[3];
    std::memcpy(header, file.bytes.data(), sizeof header);
    if (header[0] != magic) {
      fail(file.path, ": starts with ", header[0], ", a token shard with ", magic, cure);
    }
    if (header[1] != version) fail(file.path, ": has version ", header[1], ", not ", version, cure);
    if (header[2] < 0) fail(file.path, ": its header says ", header[2], " tokens", cure);
    size_t tokens = size_t(header[2]), wanted = header_bytes + tokens * sizeof(uint16_t);
    if (size != wanted) {
      fail(file.path, ": its header says ", tokens, " tokens, which take ", wanted, " bytes, it has ", size,
           size < wanted ? ": it is cut short" : ": it has foreign bytes at its end", ": write it again");
    }
    return tokens;
  }

  int token_at(const TokenFile& file, size_t index) const {
    if (is_text_) return file.bytes.data()[index];
    uint16_t token;
    std::memcpy(&token, file.bytes.data() + header_bytes + index * sizeof token, sizeof token);
    return token;
  }

  [[noreturn]] static void refuse_token(const TokenFile& file, size_t index, int token, int vocabulary) {
    fail(file.path, ": token ", index, " has id ", token, ", the vocabulary ends at ", vocabulary - 1,
         ": give --vocab ", token + 1, " or more, or data made for this vocabulary");
  }

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
  SampleOrder(size_t samples, bool shuffle, uint64_t seed)
      : samples_(samples), shuffle_(shuffle), seed_(seed) {
    if (samples == 0) fail("there are no samples to order");
    half_bits_ = (std::bit_width(samples - 1) + 1) / 2;
  }

  size_t operator()(size_t number) const {
    size_t epoch = number / samples_, index = number % samples_;
    if (!shuffle_) return index;
    uint64_t key = mix(mix(seed_) + epoch);
    do {
      index = permute(index, key);
    } while (index >= samples_);
    return index;
  }

 private:
  // The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every input bit changes every output bit.
  static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  // Each round is invertible whatever mix() does, hence a permutation.
  size_t permute(size_t index, uint64_t key) const {
    constexpr uint64_t rounds = 8;
    size_t mask = (size_t(1) << half_bits_) - 1;
    size_t left = index >> half_bits_, right = index & mask;
    for (uint64_t round = 0; round < rounds; ++round) {
      size_t next = left ^ (mix(mix(key + round) + right) & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  size_t samples_;
  bool shuffle_;
  uint64_t seed_;
  int half_bits_;
};
