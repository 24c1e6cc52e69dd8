#include "gpt/data.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include <glob.h>

#include "gpt/base/error.h"

namespace {

constexpr size_t header_bytes = 256 * sizeof(int32_t);
constexpr int32_t magic = 20240520, version = 1;

constexpr size_t samples_looked_at = 64, sample_looked_at = 1025;  // samples, tokens of each: for identity()

constexpr const char* must_stay = ": data must stay as they were when the run began: put the file back, and go on with --resume";

// The regular files that match the patterns, in bytewise order. A file that several patterns match is listed once.
std::vector<std::string> matching_files(const std::vector<std::string>& patterns) {
  if (patterns.empty()) fail("no data files: name text files or .bin token shards");
  std::vector<std::string> files;
  for (const std::string& pattern : patterns) {
    std::error_code not_there;
    if (std::filesystem::is_regular_file(pattern, not_there)) {  // the name of a file may contain '[' or '*'
      files.push_back(pattern);
      continue;
    }
    glob_t matches;
    int status = glob(pattern.c_str(), GLOB_NOSORT | GLOB_TILDE, nullptr, &matches);
    size_t before = files.size();
    for (size_t i = 0; status == 0 && i < matches.gl_pathc; ++i) {
      const char* path = matches.gl_pathv[i];
      if (std::filesystem::is_regular_file(path, not_there)) files.push_back(path);
    }
    globfree(&matches);
    if (files.size() == before)
      fail("data '", pattern, "' matches no regular file: check the path, and quote globs against the shell",
           pattern.find('=') == pattern.npos ? "" : "; in --val NAME=FILES a name has letters, digits and _");
  }
  std::ranges::sort(files);
  files.erase(std::unique(files.begin(), files.end()), files.end());
  return files;
}

bool is_shard(const std::string& path) { return path.ends_with(".bin"); }

// The number of tokens in a shard. Fails if header and file size don't agree.
size_t tokens_in_shard(const File& file) {
  const char* cure = ": write shards with data/tokenize.py";
  const std::filesystem::path& path = file.path();
  size_t size = file.size();
  if (size < header_bytes)
    fail(path, ": has ", size, " bytes, a token shard starts with a header of ", header_bytes, cure);
  int32_t header[3];
  file.read(0, header, sizeof header);
  if (header[0] != magic) fail(path, ": starts with ", header[0], ", a token shard with ", magic, cure);
  if (header[1] != version) fail(path, ": has version ", header[1], ", not ", version, cure);
  if (header[2] < 0) fail(path, ": its header says ", header[2], " tokens", cure);
  size_t tokens = size_t(header[2]), wanted = header_bytes + tokens * sizeof(uint16_t);
  if (size != wanted)
    fail(path, ": its header says ", tokens, " tokens, which take ", wanted, " bytes, it has ", size,
         size < wanted ? ": it is cut short" : ": it has foreign bytes at its end", ": write it again");
  return tokens;
}

constexpr const char* utf_16 = "text in UTF-16 or UTF-32: convert it to UTF-8";
// The first bytes of files that are no text, and the kind of such a file, with a cure.
constexpr std::pair<std::string_view, const char*> binary_beginnings[] = {
    {"\x88\xd8\x34\x01", "a token shard: give it a name that ends with .bin"},
    {"\x93NUMPY", "a NumPy array: write its tokens as shards, as data/README.md describes them"},
    {"PAR1", "a Parquet file: make shards of it with data/tokenize.py --dataset"},
    {"\x1f\x8b", "packed by gzip: unpack it"}, {"\x28\xb5\x2f\xfd", "packed by zstd: unpack it"}, {"PK\x03\x04", "packed by zip: unpack it"},
    {"\xff\xfe", utf_16}, {"\xfe\xff", utf_16}, {std::string_view("\0\0\xfe\xff", 4), utf_16}};

// The number of bytes of a text file, each a token. Fails if it is no text.
size_t tokens_in_text(const File& file) {
  std::string beginning(std::min(file.size(), size_t(8)), 0);
  file.read(0, beginning.data(), beginning.size());
  for (const auto& [bytes, what] : binary_beginnings)
    if (beginning.starts_with(bytes)) fail(file.path(), ": is ", what);
  return file.size();
}

// The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every input bit changes every output bit.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

TokenData::TokenData(const std::vector<std::string>& patterns, DataCache* cache) : cache_(cache) {
  std::vector<std::string> paths = matching_files(patterns), empty;
  is_text_ = !is_shard(paths.front());
  for (const std::string& path : paths) {
    if (is_shard(path) == is_text_)
      fail("data mixes text and .bin token shards ('", paths.front(), "', '", path, "'): give one kind");
    const FileStamp stamp = stamp_of(path);
    const File file(path, for_reading);
    const size_t tokens_in_file = is_text_ ? tokens_in_text(file) : tokens_in_shard(file);
    if (tokens_in_file == 0) empty.push_back(path);
    else files_.push_back({path, files_.empty() ? 0 : tokens(), tokens_in_file, stamp, stamp});
  }
  if (files_.empty())
    fail("data '", paths.front(), "'", paths.size() > 1 ? " and others hold" : " holds", " no tokens: give other files");
  if (!empty.empty())
    std::printf("data      left out, as there is nothing in it: %s%s\n", one_line(empty.front()).c_str(),
                empty.size() > 1 ? (" and " + std::to_string(empty.size() - 1) + " more").c_str() : "");
  std::string checksums;
  for (size_t i = 0; i < samples_looked_at; ++i) checksums += checksum(i);
  looked_at_ = checksums;
}

size_t TokenData::samples(int T) const {
  if (T < 1) fail("sequence length ", T, " is not positive");
  size_t count = (tokens() - 1) / size_t(T);
  if (count == 0)
    fail("data '", files_.front().path, "'", files() > 1 ? " and others hold " : " holds ", tokens(),
         " tokens, one sample of sequence length ", T, " needs ", size_t(T) + 1,
         ": give more data or a shorter sequence");
  return count;
}

// Where the one that has this number, of the samples that identity() looks at, begins.
size_t TokenData::looked_at(size_t number) const {
  return (tokens() - std::min(tokens(), sample_looked_at)) * number / (samples_looked_at - 1);
}

std::string TokenData::checksum(size_t number) const {
  const std::vector<int> sample = read(looked_at(number), std::min(tokens(), sample_looked_at), 1 << 16, nullptr);
  return xxh3({reinterpret_cast<const char*>(sample.data()), sample.size() * sizeof(int)});
}

void TokenData::require_unchanged() const {
  for (size_t i = 0; i < samples_looked_at; ++i)
    if (const std::string now = checksum(i); looked_at_.compare(i * now.size(), now.size(), now) != 0)
      fail(file_at(looked_at(i)).path, ": holds other tokens than when the run began", must_stay);
}

std::string DataIdentity::text() const {
  return tokens ? std::to_string(tokens) + " tokens, checksum " + checksum : "none";
}

void TokenData::read_samples(size_t first, size_t count, int T, int vocabulary, int* inputs, int* targets) const {
  if (first + count > samples(T)) fail("sample ", first + count - 1, " of ", samples(T), " does not exist");
  const std::vector<int> tokens = read(first * size_t(T), count * size_t(T) + 1, vocabulary, cache_);
  std::copy(tokens.begin(), tokens.end() - 1, inputs);
  std::copy(tokens.begin() + 1, tokens.end(), targets);
}

void TokenData::check_tokens(size_t samples, int T, int vocabulary) const {
  const size_t end = samples * size_t(T) + 1, block = 1 << 16;
  for (size_t position = 0; position < end; position += block)
    read(position, std::min(block, end - position), vocabulary, cache_);
}

// The file that holds this token of the whole sequence.
const TokenData::TokenFile& TokenData::file_at(size_t position) const {
  return *(std::ranges::upper_bound(files_, position, {}, &TokenFile::first) - 1);
}

// Tokens [position, position + count) of the whole sequence. cache: null reads the files themselves
std::vector<int> TokenData::read(size_t position, size_t count, int vocabulary, DataCache* cache) const {
  const TokenFile* file = &file_at(position);
  std::vector<int> tokens;
  tokens.reserve(count);
  for (; tokens.size() < count; ++file) {
    const size_t index = position + tokens.size() - file->first;
    append(tokens, *file, index, std::min(file->tokens - index, count - tokens.size()), vocabulary, cache);
  }
  return tokens;
}

// Tokens [index, index + count) of a file.
void TokenData::append(std::vector<int>& tokens, const TokenFile& file, size_t index, size_t count, int vocabulary,
                       DataCache* cache) const {
  const size_t bytes_per_token = is_text_ ? 1 : sizeof(uint16_t);
  const size_t offset = (is_text_ ? 0 : header_bytes) + index * bytes_per_token;
  std::vector<unsigned char> bytes(count * bytes_per_token);
  try {
    if (cache) cache->read(*opened(file), file.version, offset, bytes.data(), bytes.size());
    else opened(file)->read(offset, bytes.data(), bytes.size());
  } catch (const std::exception& error) {
    fail(error.what(), must_stay);
  }
  check_stamp(file);
  for (size_t i = 0; i < count; ++i) {
    const int token = is_text_ ? bytes[i] : bytes[2 * i] | bytes[2 * i + 1] << 8;
    if (token >= vocabulary)
      fail(file.path, ": token ", index + i, " has id ", token, ", the vocabulary ends at ", vocabulary - 1,
           ": give a fresh model --vocab ", token + 1, " or more, or data made for this vocabulary");
    tokens.push_back(token);
  }
}

// Fails if the file was changed after the run began. Bytes that were added at its end are left out.
void TokenData::check_stamp(const TokenFile& file) const {
  if (stamp_of(file.path) == file.version) return;
  const std::lock_guard lock(*mutex_);
  const FileStamp before = file.stamp;
  FileStamp now = stamp_of(file.path);
  for (int times = 0; times < 20 && now != before && now.bytes == before.bytes; ++times) {  // an append sets the time first, then the size
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    now = stamp_of(file.path);
  }
  if (now == before) return;
  if (now.inode != before.inode || now.bytes <= before.bytes)
    fail(file.path, ": was changed, replaced or removed after the run began", must_stay);
  if (looked_at_.empty()) return;  // the constructor's own reads: what they find is what the run begins with
  file.stamp = now;
  if (!is_being_checked_) {  // else these are the reads of the check
    is_being_checked_ = true;
    const std::string problem = attempt([&] { require_unchanged(); });
    is_being_checked_ = false;
    if (!problem.empty()) fail(problem);
  }
  if (before != file.version) return;  // it has grown before, which was said
  std::printf("data      %s has grown from %zu to %zu bytes: the run goes on without what was added, and --resume needs the "
              "file as it was\n",
              one_line(file.path).c_str(), before.bytes, now.bytes);
  std::fflush(stdout);
}

std::shared_ptr<const File> TokenData::opened(const TokenFile& file) const {
  std::shared_ptr<const File>& place = open_files_[size_t(&file - files_.data()) % open_files_.size()];
  const std::lock_guard lock(*mutex_);
  if (!place || place->path().native() != file.path) place = std::make_shared<const File>(file.path, for_reading);
  return place;
}

SampleOrder::SampleOrder(size_t samples, bool shuffle, uint64_t seed)
    : samples_(samples), shuffle_(shuffle), seed_(seed) {
  if (samples == 0) fail("there are no samples to order: give more data");
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

// Every round is invertible, for any function mix(), so this is a permutation.
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
