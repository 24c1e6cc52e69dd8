#include "runtime/data.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include <glob.h>

#include "runtime/error.h"

namespace {

constexpr size_t header_bytes = 256 * sizeof(int32_t);
constexpr int32_t magic = 20240520, version = 1;

// Regular files that the patterns name, in bytewise order; one that several patterns match counts once.
std::vector<std::string> matching_files(const std::vector<std::string>& patterns) {
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

bool is_shard(const std::string& path) { return path.ends_with(".bin"); }

// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every input bit changes every output bit.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

TokenData::TokenData(const std::vector<std::string>& patterns) {
  std::vector<std::string> paths = matching_files(patterns);
  is_text_ = !is_shard(paths.front());
  for (const std::string& path : paths) {
    if (is_shard(path) == is_text_) {
      fail("data mixes text and .bin token shards ('", paths.front(), "', '", path, "'): give one kind");
    }
    add_file(path);
  }
}

size_t TokenData::samples(int T) const {
  if (T < 1) fail("sequence length ", T, " is not positive");
  size_t count = (tokens() - 1) / size_t(T);
  if (count == 0) {
    fail("data '", files_.front().path, "'", files() > 1 ? " and others hold " : " holds ", tokens(),
         " tokens, one sample of sequence length ", T, " needs ", size_t(T) + 1,
         ": give more data or a shorter sequence");
  }
  return count;
}

void TokenData::read_sample(size_t sample, int T, int vocabulary, int* inputs, int* targets) const {
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

void TokenData::add_file(const std::string& path) {
  TokenFile file{path, MappedFile(path), files_.empty() ? 0 : tokens(), 0};
  file.tokens = is_text_ ? file.bytes.size() : tokens_in_shard(file);
  if (file.tokens == 0) fail(path, ": holds no tokens: remove it or give another file");
  files_.push_back(std::move(file));
}

size_t TokenData::tokens_in_shard(const TokenFile& file) {
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

int TokenData::token_at(const TokenFile& file, size_t index) const {
  if (is_text_) return file.bytes.data()[index];
  uint16_t token;
  std::memcpy(&token, file.bytes.data() + header_bytes + index * sizeof token, sizeof token);
  return token;
}

[[noreturn]] void TokenData::refuse_token(const TokenFile& file, size_t index, int token, int vocabulary) {
  fail(file.path, ": token ", index, " has id ", token, ", the vocabulary ends at ", vocabulary - 1,
       ": give --vocab ", token + 1, " or more, or data made for this vocabulary");
}

SampleOrder::SampleOrder(size_t samples, bool shuffle, uint64_t seed)
    : samples_(samples), shuffle_(shuffle), seed_(seed) {
  if (samples == 0) fail("there are no samples to order");
  half_bits_ = (std::bit_width(samples - 1) + 1) / 2;
}

size_t SampleOrder::operator()(size_t number) const {
  size_t epoch = number / samples_, index = number % samples_;
  if (!shuffle_) return index;
  uint64_t key = mix(mix(seed_) + epoch);
  do {
    index = permute(index, key);
  } while (index >= samples_);
  return index;
}

// Each round is invertible whatever mix() does, hence a permutation.
size_t SampleOrder::permute(size_t index, uint64_t key) const {
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
