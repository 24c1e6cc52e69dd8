// Token files and the order of samples: gpt/data.h.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gpt/data.h"
#include "test/temporary_folder.h"

using Sample = std::vector<int>;

std::string shard(const std::vector<uint16_t>& tokens, int32_t magic = 20240520, int32_t version = 1,
                  int32_t count = -1) {
  int32_t header[256] = {magic, version, count == -1 ? int32_t(tokens.size()) : count};
  std::string bytes(reinterpret_cast<const char*>(header), sizeof header);
  return bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(uint16_t));
}

Sample inputs_of(const TokenData& data, size_t sample, int T, int vocabulary = 65536) {
  Sample inputs(T, -1), targets(T, -1);
  data.read_samples(sample, 1, T, vocabulary, inputs.data(), targets.data());
  return inputs;
}

Sample targets_of(const TokenData& data, size_t sample, int T, int vocabulary = 65536) {
  Sample inputs(T, -1), targets(T, -1);
  data.read_samples(sample, 1, T, vocabulary, inputs.data(), targets.data());
  return targets;
}

std::string some_digits(size_t bytes) {
  std::string text;
  for (int i = 0; text.size() < bytes; ++i) text += std::to_string(i);
  return text.substr(0, bytes);
}

TEST_CASE("text: bytes as tokens, targets shifted by one, neighbours share a token") {
  TemporaryFolder folder;
  std::string path = put(folder / "a.txt", "abcdef\xff");
  TokenData data({path});
  CHECK(data.is_text());
  CHECK(data.tokens() == 7);
  CHECK(data.files() == 1);
  CHECK(data.default_vocabulary() == 256);
  CHECK(data.samples(3) == 2);
  CHECK(data.samples(4) == 1);
  CHECK(data.samples(6) == 1);
  CHECK(inputs_of(data, 0, 3) == Sample{'a', 'b', 'c'});
  CHECK(targets_of(data, 0, 3) == Sample{'b', 'c', 'd'});
  CHECK(inputs_of(data, 1, 3) == Sample{'d', 'e', 'f'});
  CHECK(targets_of(data, 1, 3) == Sample{'e', 'f', 255});
}

TEST_CASE("shards: files in bytewise order, samples across any number of files") {
  TemporaryFolder folder;
  put(folder / "b.bin", shard({10, 11, 12}));
  put(folder / "B.bin", shard({0, 1}));  // capitals come first, whatever the locale
  put(folder / "a.bin", shard({2}));
  put(folder / "c.bin", shard({13, 65535}));
  TokenData data({folder / "c.bin", folder / "[abB].bin", folder / "b.bin"});  // b.bin counts once
  CHECK(!data.is_text());
  CHECK(data.default_vocabulary() == 50257);
  CHECK(data.files() == 4);
  CHECK(data.tokens() == 8);
  CHECK(inputs_of(data, 0, 7) == Sample{0, 1, 2, 10, 11, 12, 13});
  CHECK(targets_of(data, 0, 7) == Sample{1, 2, 10, 11, 12, 13, 65535});
  CHECK(inputs_of(data, 2, 2) == Sample{11, 12});
  CHECK(targets_of(data, 2, 2) == Sample{12, 13});
  CHECK(targets_of(data, 6, 1) == Sample{65535});
}

TEST_CASE("patterns: only regular files, names that look like globs") {
  TemporaryFolder folder;
  put(folder / "x" / "in.txt", "inside");
  put(folder / "xylem.txt", "wood");
  put(folder / "odd[1].txt", "odd name");
  REQUIRE(mkfifo((folder / "xfifo").c_str(), 0600) == 0);
  CHECK(TokenData({folder / "x*"}).files() == 1);
  CHECK(TokenData({folder / "odd[1].txt"}).tokens() == 8);
  CHECK(is_line_with(error_of([&] { TokenData({folder / "none*"}); }), "none*", "matches no regular file"));
  CHECK(is_line_with(error_of([&] { TokenData({folder / "x"}); }), "matches no regular file"));
  CHECK(is_line_with(error_of([&] { TokenData({folder / "xfifo"}); }), "matches no regular file"));
  CHECK(is_line_with(error_of([&] { TokenData({}); }), "no data files"));
}

TEST_CASE("a text file that begins as other kinds of files do is refused, for training and validation") {
  TemporaryFolder folder;
  const auto refusal = [&](const std::string& content) {
    put(folder / "x.txt", content);
    return error_of([&] { TokenData({folder / "x.txt"}); });
  };
  CHECK(is_line_with(refusal(shard({1, 2, 3})), "x.txt: is a token shard: give it a name that ends with .bin"));
  CHECK(is_line_with(refusal("\x93NUMPY\x01\0 and so on"), "NumPy"));
  CHECK(is_line_with(refusal("\x1f\x8b\x08"), "gzip: unpack it"));
  CHECK(is_line_with(refusal("\x28\xb5\x2f\xfd and so on"), "zstd"));
  CHECK(is_line_with(refusal("PK\x03\x04 and so on"), "zip"));
  CHECK(is_line_with(refusal("PAR1\x15"), "Parquet"));
  CHECK(is_line_with(refusal(std::string("\xff\xfe""a\0", 4)), "UTF-16", "convert it to UTF-8"));
  CHECK(is_line_with(refusal(std::string("\0\0\xfe\xff\0\0\0a", 8)), "UTF-32"));
  for (const char* text : {"P", "PK", "PAR", "\xef\xbb\xbf with the mark of UTF-8", "\x1f", "caf\xe9"}) CHECK(refusal(text) == "");
}

TEST_CASE("a path may begin with the home folder, ~") {
  TemporaryFolder folder;
  put(folder / "home" / "a.txt", "text");
  const char* before = std::getenv("HOME");
  const std::string home = before ? before : "/";
  setenv("HOME", (folder / "home").c_str(), 1);
  CHECK(TokenData({"~/*.txt"}).tokens() == 4);
  setenv("HOME", home.c_str(), 1);
}

TEST_CASE("files without tokens are left out, unless all are") {
  TemporaryFolder folder;
  for (const char* name : {"a.txt", "c.txt"}) put(folder / name, "");
  put(folder / "b.txt", "text");
  TokenData data({folder / "*.txt"});
  CHECK(data.files() == 1);
  CHECK(data.tokens() == 4);
  put(folder / "a.bin", shard({}));
  put(folder / "b.bin", shard({5, 6}));
  CHECK(inputs_of(TokenData({folder / "*.bin"}), 0, 1) == Sample{5});
  CHECK(is_line_with(error_of([&] { TokenData({folder / "[ac].txt"}); }), "a.txt", "and others hold no tokens"));
}

TEST_CASE("more files than may be open at a time") {
  TemporaryFolder folder;
  const int files = 1000;
  for (int i = 0; i < files; ++i) put(folder / (std::to_string(1000 + i) + ".bin"), shard({uint16_t(i)}));
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  rlimit few = {300, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  TokenData data({folder / "*.bin"}), other({folder / "*.bin"});  // as --train and --val
  inputs_of(other, 0, files - 1);
  const Sample all = inputs_of(data, 0, files - 1), again = inputs_of(data, 0, files - 1);
  setrlimit(RLIMIT_NOFILE, &before);
  for (int i = 0; i < files - 1; ++i) CHECK(all[size_t(i)] == i);
  CHECK(again == all);
}

TEST_CASE("a file that is changed, cut short, replaced or removed while it is in use is an error") {
  TemporaryFolder folder;
  const std::string large(100000, 'x'), other(99999, 'y'), path = folder / "a.txt";
  const auto refuses = [&](auto change, const std::string& reason, size_t sample = 90) {
    put(path, large);
    const TokenData data({path, put(folder / "b.txt", large)});
    CHECK(inputs_of(data, sample, 1000) == Sample(1000, 'x'));
    std::this_thread::sleep_for(std::chrono::milliseconds(10));  // a tick of the file system's clock
    change();
    CHECK(inputs_of(data, 150, 1000) == Sample(1000, 'x'));  // of the other file
    CHECK(is_line_with(error_of([&] { inputs_of(data, sample, 1000); }), path, reason, "put the file back", "--resume"));
  };
  const char* changed = "was changed, replaced or removed";
  refuses([&] { truncate(path.c_str(), 5000); }, "the file ends");
  refuses([&] { truncate(path.c_str(), 5000); }, changed, 3);
  refuses([&] { put(path, other + 'y'); }, changed);
  refuses([&] { std::filesystem::rename(put(folder / "c", other + 'y'), path); }, changed);
  refuses([&] { std::filesystem::remove(path); }, changed);
  refuses([&] { put(path, other + "yy"); }, "holds other tokens");  // it has grown, but is not what it was

  put(path, large);
  const TokenData data({path});
  for (const char* added : {"y", "yy"}) {  // it has grown, twice
    put(path, large + added);
    CHECK(inputs_of(data, 90, 1000) == Sample(1000, 'x'));
  }
  put(path, other + "yyyy");
  CHECK(is_line_with(error_of([&] { inputs_of(data, 90, 1000); }), path, "holds other tokens"));
}

TEST_CASE("a file may grow while a run begins with it") {
  TemporaryFolder folder;
  const std::string path = put(folder / "a.txt", std::string(100000, 'x'));
  const std::jthread writer([&](const std::stop_token& stop) {
    for (std::ofstream file(path, std::ios::app); !stop.stop_requested();) file << "yy" << std::flush;
  });
  for (int i = 0; i < 20; ++i) {
    const TokenData data({path});
    CHECK(inputs_of(data, 90, 1000) == Sample(1000, 'x'));
  }
}

TEST_CASE("a change that leaves no other trace is found in the samples; what is added at the end is left out") {
  TemporaryFolder folder;
  const std::string path = put(folder / "a.txt", some_digits(9000));
  const TokenData data({path}), same({path});
  const auto written = std::filesystem::last_write_time(path);
  const auto overwrite = [&](size_t at, char byte) {
    std::fstream(path, std::ios::in | std::ios::out).seekp(std::streamoff(at)) << byte;
    std::filesystem::last_write_time(path, written);
  };
  data.require_unchanged();
  overwrite(5000, 'x');
  CHECK(is_line_with(error_of([&] { data.require_unchanged(); }), path, "holds other tokens", "--resume"));
  overwrite(5000, some_digits(9000)[5000]);
  const Sample before = inputs_of(data, 4, 1000);
  for (int round = 0; round < 2; ++round) {
    std::ofstream(path, std::ios::app) << "more";
    CHECK(inputs_of(data, 4, 1000) == before);
    CHECK(data.samples(1) == 8999);
    data.require_unchanged();
  }
  CHECK(inputs_of(same, 4, 1000) == before);
  overwrite(5000, 'x');
  CHECK(is_line_with(error_of([&] { data.require_unchanged(); }), path, "--resume"));
}

TEST_CASE("other contents and another order of files are told apart") {
  TemporaryFolder folder;
  std::string text = some_digits(34890);
  auto identity = [&](const std::string& first, const std::string& second) {
    return TokenData({put(folder / "a", first), put(folder / "b", second)}).identity();
  };
  const std::string half = text.substr(0, text.size() / 2), rest = text.substr(text.size() / 2);
  const DataIdentity whole = identity(half, rest);
  CHECK(whole.tokens == text.size());
  CHECK(whole.checksum == identity(half, rest).checksum);
  CHECK(whole.checksum == identity(text, "").checksum);
  CHECK(whole.checksum != identity(rest, half).checksum);
  text.back() = 'x';
  CHECK(whole.checksum != identity(text, "").checksum);
  CHECK(identity("a", "").checksum != identity("b", "").checksum);
}

TEST_CASE("tokens are looked through before they are needed") {
  TemporaryFolder folder;
  std::vector<uint16_t> tokens(200001, 7);
  tokens[150000] = 300;
  TokenData data({put(folder / "a.bin", shard(tokens))});
  data.check_tokens(1499, 100, 300);
  CHECK(is_line_with(error_of([&] { data.check_tokens(1500, 100, 300); }), "token 150000", "id 300"));
  data.check_tokens(2000, 100, 301);
}

TEST_CASE("every defect of a file is named") {
  TemporaryFolder folder;
  auto defect = [&](const std::string& name, const std::string& content) {
    std::string path = put(folder / name, content);
    std::string error = error_of([&] { TokenData({path}); });
    CHECK(contains(error, path));
    return error;
  };
  CHECK(is_line_with(defect("empty.txt", ""), "no tokens"));
  CHECK(is_line_with(defect("empty.bin", ""), "has 0 bytes", "1024"));
  CHECK(is_line_with(defect("none.bin", shard({})), "no tokens"));
  CHECK(is_line_with(defect("short.bin", shard({1, 2}).substr(0, 1000)), "has 1000 bytes", "1024"));
  CHECK(is_line_with(defect("magic.bin", shard({1, 2}, 20240801)), "20240801", "20240520"));
  CHECK(is_line_with(defect("version.bin", shard({1, 2}, 20240520, 7)), "version 7"));
  CHECK(is_line_with(defect("negative.bin", shard({1, 2}, 20240520, 1, -5)), "-5"));
  std::string cut = defect("cut.bin", shard({1, 2, 3}).substr(0, 1029));
  CHECK(is_line_with(cut, "3 tokens", "1030 bytes", "1029", "cut short"));
  std::string large = defect("large.bin", shard({1}, 20240520, 1, 2147483647));
  CHECK(is_line_with(large, "2147483647 tokens", "4294968318 bytes", "cut short"));
  std::string longer = defect("long.bin", shard({1, 2}, 20240520, 1, 1));
  CHECK(is_line_with(longer, "1 tokens", "1026 bytes", "1028", "foreign"));
  put(folder / "a.txt", "text");
  put(folder / "b.bin", shard({1, 2}));
  CHECK(is_line_with(error_of([&] { TokenData({folder / "[ab].*"}); }), "a.txt", "b.bin", "mixes"));
}

TEST_CASE("too few tokens, samples beyond the end, tokens outside the vocabulary") {
  TemporaryFolder folder;
  put(folder / "a.bin", shard({1, 2, 3}));
  put(folder / "b.bin", shard({4, 300, 5}));
  TokenData data({folder / "*.bin"});
  CHECK(is_line_with(error_of([&] { data.samples(6); }), "6 tokens", "length 6", "needs 7"));
  CHECK(is_line_with(error_of([&] { data.samples(0); }), "length 0"));
  CHECK(data.samples(5) == 1);
  CHECK(is_line_with(error_of([&] { inputs_of(data, 1, 5); }), "sample 1 of 1"));
  CHECK(inputs_of(data, 0, 3, 5) == Sample{1, 2, 3});
  std::string error = error_of([&] { inputs_of(data, 0, 4, 300); });
  CHECK(is_line_with(error, "b.bin", "token 1", "id 300", "--vocab 301"));
  CHECK(inputs_of(data, 0, 4, 301) == Sample{1, 2, 3, 4});
}

TEST_CASE("random corruption of a shard is survived") {
  TemporaryFolder folder;
  const std::string good = shard({1, 2, 3, 4, 5});
  std::mt19937 random(1);
  int opened = 0;
  for (int round = 0; round < 1000; ++round) {
    std::string bad = good;
    bad[random() % 16] ^= char(1 << random() % 8);
    if (random() % 2) bad.resize(random() % (good.size() + 1));
    std::string error = error_of([&] {
      TokenData data({put(folder / "x.bin", bad)});
      ++opened;
      inputs_of(data, 0, int(data.tokens()) - 1);
    });
    CHECK(!contains(error, "\n"));
  }
  CHECK(opened > 0);  // bits after the count mean nothing
  CHECK(opened < 250);
}

TEST_CASE("a text file over 2 GiB") {
  TemporaryFolder folder;
  std::string path = put(folder / "large.txt", "");
  const size_t size = (size_t(1) << 31) + 4097;  // sparse: takes no space
  REQUIRE(truncate(path.c_str(), off_t(size)) == 0);
  std::fstream(path, std::ios::in | std::ios::out).seekp(std::streamoff(size) - 5) << "abcde";
  TokenData data({path});
  CHECK(data.tokens() == size);
  CHECK(data.samples(1) == size - 1);
  CHECK(inputs_of(data, (size - 5) / 4, 4) == Sample{'a', 'b', 'c', 'd'});
  CHECK(targets_of(data, size - 2, 1) == Sample{'e'});
}

TEST_CASE("sample order without shuffling counts and wraps") {
  SampleOrder order(5, false, 1);
  for (size_t number = 0; number < 23; ++number) CHECK(order(number) == number % 5);
  CHECK(is_line_with(error_of([] { SampleOrder(0, true, 1); }), "no samples to order: give more data"));
}

TEST_CASE("a shuffled epoch is a permutation, depends on seed and epoch only, and is reproducible") {
  for (size_t n : {1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 1000, 4097}) {
    CAPTURE(n);
    SampleOrder order(n, true, 42), same(n, true, 42), other(n, true, 43);
    std::vector<size_t> first, second, different;
    for (size_t i = 0; i < n; ++i) {
      first.push_back(order(i));
      second.push_back(order(n + i));
      different.push_back(other(i));
    }
    for (size_t i = n; i-- > 0;) CHECK(same(i) == first[i]);
    if (n >= 16) {
      CHECK(first != second);
      CHECK(first != different);
      CHECK(!std::is_sorted(first.begin(), first.end()));
    }
    for (auto* epoch : {&first, &second, &different}) {
      std::set<size_t> seen(epoch->begin(), epoch->end());
      CHECK(seen.size() == n);
      CHECK(*seen.rbegin() == n - 1);
    }
  }
}

TEST_CASE("over many epochs every sample comes equally often at every place, and after every other") {
  for (size_t n : {3, 6, 10}) {
    CAPTURE(n);
    const size_t epochs = 20000;
    SampleOrder order(n, true, 7);
    std::vector<double> at_place(n * n), after(n * n);
    for (size_t epoch = 0; epoch < epochs; ++epoch) {
      for (size_t i = 0; i < n; ++i) {
        size_t sample = order(epoch * n + i);
        ++at_place[i * n + sample];
        if (i > 0) ++after[order(epoch * n + i - 1) * n + sample];
      }
    }
    // Counts are binomial; six standard deviations leave no room for chance.
    double expected = double(epochs) / double(n), slack = 6 * std::sqrt(expected);
    for (double count : at_place) CHECK(std::abs(count - expected) < slack);
    for (size_t pair = 0; pair < n * n; ++pair) {
      if (pair / n != pair % n) CHECK(std::abs(after[pair] - expected) < slack);
    }
  }
}
