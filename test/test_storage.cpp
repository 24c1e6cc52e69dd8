// Data on slow storage: micro-batches that are read ahead of their steps, and --cache (runtime/cache/disk_cache.h).
#include <atomic>
#include <cstring>
#include <thread>

#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gpt/data.h"
#include "runtime/cache/disk_cache.h"
#include "test/skip.h"
#include "test/workplace.h"

namespace {

// Bytes read from files whose path ends with "data".
std::atomic<size_t> bytes_read = 0;
std::atomic<bool> disk_is_full = false;

}  // namespace

// These take the place of the C library's in this program.
extern "C" ssize_t pread(int descriptor, void* to, size_t bytes, off_t offset) {
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  char path[4096] = "";
  if (readlink(link.c_str(), path, sizeof path - 1) > 0 && std::string(path).ends_with("data")) bytes_read += bytes;
  return syscall(SYS_pread64, descriptor, to, bytes, offset);
}
extern "C" int statvfs(const char*, struct statvfs* disk) noexcept {
  *disk = {};
  disk->f_frsize = 1, disk->f_blocks = 1000, disk->f_bavail = disk_is_full ? 49 : 50;
  return 0;
}

namespace {

constexpr size_t MiB = 1 << 20;
constexpr int T = 10'000;

// Text in which every place is another one.
std::string text_of(size_t bytes, char end = '\n') {
  std::string text;
  for (size_t i = 0; text.size() < bytes; ++i) text += std::to_string(i) + end;
  return text.substr(0, bytes);
}

// All samples, in an order that jumps to and fro.
std::string all_of(const TokenData& data) {
  const size_t samples = data.samples(T);
  std::string all(samples * T, 0);
  for (size_t i = 0; i < samples; ++i) {
    std::vector<int> inputs(T), targets(T);
    const size_t sample = i * 7919 % samples;
    data.read_samples(sample, 1, T, 256, inputs.data(), targets.data());
    std::copy(inputs.begin(), inputs.end(), all.begin() + long(sample) * T);
  }
  return all;
}

struct Storage {
  std::string text;
  TemporaryFolder folder;
  std::filesystem::path data, cache = folder / "cache";
  explicit Storage(size_t bytes = 5 * MiB / 2) : text(text_of(bytes)), data(put(folder / "data", text)) {}

  std::string wanted() const { return text.substr(0, (text.size() - 1) / T * T); }
  std::vector<std::filesystem::path> records() const {
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(cache / "records"))
      if (entry.path().filename() != "trial") files.push_back(entry.path());
    return files;
  }
  size_t bytes_on_disk() const {
    size_t bytes = 0;
    for (const auto& path : records()) {
      struct stat status;
      REQUIRE(stat(path.c_str(), &status) == 0);
      bytes += size_t(status.st_blocks) * 512;
    }
    return bytes;
  }
  // Opens the data as a new run does, and reads all samples. Returns the number of bytes that it read from the data,
  // those left out that are looked at when data are opened.
  size_t run(DiskCache& disk) const {
    const TokenData opened({data}, &disk);
    const size_t before = bytes_read;
    CHECK(all_of(opened) == wanted());
    return bytes_read - before;
  }
};

}  // namespace

TEST_CASE("a cache: ranks and threads that share it read each byte of the data once, later runs none") {
  const Storage storage;
  DiskCache first(storage.cache, 64 * MiB), second(storage.cache, 64 * MiB);
  const TokenData one({storage.data}, &first), other({storage.data}, &second);
  bytes_read = 0;
  std::string read[6];
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) threads.emplace_back([&, i] { read[i] = all_of(i % 2 ? one : other); });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& all : read) CHECK(all == storage.wanted());
  CHECK(bytes_read == storage.text.size());
  DiskCache later(storage.cache, 64 * MiB);
  CHECK(storage.run(later) == 0);
  CHECK(storage.records().size() == 1);
}

TEST_CASE("a cache that is damaged: the chunk is read from the data, and mended") {
  const Storage storage;
  DiskCache disk(storage.cache, 64 * MiB);
  storage.run(disk);
  const std::filesystem::path file = storage.records().at(0);
  const std::string good = content_of(file);
  for (const size_t at : {size_t(0), size_t(15), size_t(16), MiB + 15, MiB + 16, MiB + 40, good.size() - 1}) {
    CAPTURE(at);
    std::string bad = good;
    bad[at] = char(bad[at] ^ 1);
    put(file, bad);
    CHECK(storage.run(disk) == (at < 2 * MiB ? MiB : MiB / 2));
    CHECK(content_of(file) == good);
  }
  put(file, good.substr(0, MiB));
  CHECK(storage.run(disk) == storage.text.size());
  CHECK(content_of(file) == good);
}

TEST_CASE("a cache keeps no more than it may; records that no run uses make room") {
  Storage storage;
  const auto other = [&](int i) { return storage.cache / ("records/other" + std::to_string(i)); };
  const auto now = std::filesystem::file_time_type::clock::now();
  for (int i = 0; i < 8; ++i) {
    put(other(i), std::string(MiB / 4, 'o'));
    std::filesystem::last_write_time(other(i), now - std::chrono::hours(8 - i * 3 % 8));
  }
  {
    DiskCache disk(storage.cache, 4 * MiB);
    storage.run(disk);
  }
  // Three chunks and their checksums leave room for three.
  for (int i = 0; i < 8; ++i) CHECK(std::filesystem::exists(other(i)) == (i * 3 % 8 >= 5));
  CHECK(storage.bytes_on_disk() <= 4 * MiB);

  for (const auto& path : storage.records()) std::filesystem::last_write_time(path, now - std::chrono::minutes(1));
  put(storage.data, storage.text = text_of(9 * MiB));  // more than fits
  DiskCache disk(storage.cache, 4 * MiB + MiB / 2);
  storage.run(disk);
  CHECK(storage.records().size() == 1);
  CHECK(storage.bytes_on_disk() <= 4 * MiB + MiB / 2);
  CHECK(storage.bytes_on_disk() > 3 * MiB);
  CHECK(storage.run(disk) > 4 * MiB);  // what was not kept is read as it is without a cache: sample by sample
  CHECK(storage.run(disk) < 6 * MiB);
}

TEST_CASE("room is not made at the cost of the data that is read, though only an earlier run has used its records") {
  Storage storage(9 * MiB);
  {
    DiskCache disk(storage.cache, 4 * MiB + MiB / 2);
    storage.run(disk);
  }
  const size_t kept = storage.bytes_on_disk();
  for (const auto& path : storage.records()) std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  DiskCache disk(storage.cache, 4 * MiB + MiB / 2);
  const File file(storage.data, for_reading);
  std::vector<unsigned char> bytes(T);
  disk.read(file, stamp_of(storage.data), 8 * MiB, bytes.data(), bytes.size());  // it was not kept
  CHECK(storage.bytes_on_disk() == kept);
}

TEST_CASE("a cache leaves a twentieth of the disk free, and the run goes on") {
  const Storage storage;
  disk_is_full = true;
  DiskCache disk(storage.cache, 64 * MiB);
  const size_t without = storage.wanted().size() / T * (T + 1);
  CHECK(storage.run(disk) == without);
  CHECK(storage.bytes_on_disk() == 0);
  disk_is_full = false;
  CHECK(storage.run(disk) == without);  // it has given up
  std::filesystem::remove_all(storage.cache);
  DiskCache gone(storage.cache, 64 * MiB);
  std::filesystem::remove_all(storage.cache);
  CHECK(storage.run(gone) == without);
}

TEST_CASE("a cache that cannot be written is refused") {
  TemporaryFolder folder;
  const std::string error = error_of([&] { DiskCache(put(folder / "file", "x"), 64 * MiB); });
  CHECK(is_line_with(error, "--cache", "file", "Not a directory", "give a folder on a local disk"));
}

TEST_CASE("data that change are found behind a cache, and are not kept") {
  Storage storage;
  DiskCache disk(storage.cache, 64 * MiB);
  storage.run(disk);
  const TokenData data({storage.data}, &disk);
  const auto before = std::filesystem::last_write_time(storage.data);
  const std::string text = storage.text;
  put(storage.data, storage.text = text_of(text.size(), ' '));
  std::filesystem::last_write_time(storage.data, before + std::chrono::seconds(1));
  CHECK(is_line_with(error_of([&] { all_of(data); }), "data: was changed", "--resume"));  // although all is here
  CHECK(storage.run(disk) == text.size());
  const std::vector<std::filesystem::path> both = storage.records();
  CHECK(both.size() == 2);

  // Changed while a run reads it: what a chunk holds then is kept neither for the old data nor for the new.
  for (const auto& path : both) std::filesystem::remove(path);
  const TokenData again({storage.data}, &disk);
  put(storage.data, text);
  CHECK(is_line_with(error_of([&] { all_of(again); }), "data: was changed"));
  put(storage.data, storage.text);
  std::filesystem::last_write_time(storage.data, before + std::chrono::seconds(1));
  DiskCache next(storage.cache, 64 * MiB);
  CHECK(storage.run(next) == text.size());
}

TEST_CASE("threads read a file while it grows") {
  Storage storage(MiB);
  const TokenData data({storage.data});
  std::string read[4];
  std::vector<std::thread> threads;
  for (std::string& all : read) threads.emplace_back([&] { for (int time = 0; time < 5; ++time) all = all_of(data); });
  for (int i = 0; i < 5; ++i) std::ofstream(storage.data, std::ios::app) << "more" << std::flush;
  for (std::thread& thread : threads) thread.join();
  for (const std::string& all : read) CHECK(all == storage.wanted());
}

namespace {

struct SlowStorage : Workplace {
  SlowStorage() {
    setenv("MPIRUN", mpirun().c_str(), 1);
    setenv("SLOW", ("env LD_PRELOAD=" + built("failing_io.so") + " READ_OF=/text READ_LOG=reads ").c_str(), 1);
  }
  size_t reads() const { return content("reads").size(); }
  std::string losses(const std::string& out) const {
    std::string all;
    for (const Json& line : metrics(out))
      all += line.value("loss", Json()).dump() + ' ' + line.value("grad_norm", Json()).dump() + '\n';
    return all;
  }
};

}  // namespace

TEST_CASE("a step does not wait for data that are read ahead of it") {
  SlowStorage shell;
  const std::string train =
      "$TEXT --channels 64 --layers 2 --steps 40 --val text --val-every 10 --val-batches 3 --shuffle --out ";
  shell.output(train + "wanted");
  // 40 steps and 12 batches of validation read 104 samples, which takes 3.1 seconds one after the other. A training step
  // waits for two samples if none is read ahead.
  shell.output("READ_MS=30 $SLOW " + train + "slow");
  CHECK(shell.same_metrics("slow", "wanted"));
  const std::vector<Json> slow = shell.all_metrics("slow");
  REQUIRE(!slow.empty());
  const double waited = slow.back().at("lost_s").at("data");
  MESSAGE("waited for data: " << waited << " s");
  CHECK(waited > 0);    // for the first step
  CHECK(waited < 1.2);  // half of 40 steps, two samples each, 30 ms
  // An error in data waits for its step, and what no step needs is no error.
  put(shell / "text", some_text(600) + "\x80" + some_text(600));
  shell.output("$SLOW $TEXT --steps 5 --vocab 128 --out five");
  shell.refuses("$SLOW $TEXT --steps 99 --vocab 128 --out more", 1, {"text: token 600 has id 128"});
  CHECK(shell.metrics("more").size() == 18);  // sample 37, in step 19
}

// Each second of this run is one in which a step waits, whatever else the machine does. What the process does before main()
// and after its bill is not in the bill; a busy machine gets two more attempts to do it in time.
TEST_CASE("a step says how long it waited for data, and the bill's clock is the process's") {
  SlowStorage shell;
  put(shell / "text", some_text(1300));
  const std::string train = "READ_MS=30 $SLOW $TEXT --micro-batch 1 --steps 60 --log-every 60 --overwrite --out run";
  accounts_for_its_time([&] {
    const std::string out = shell.output("date +%s.%N > begin; " + train + "; date +%s.%N > end");
    const std::vector<Json> lines = shell.all_metrics("run");
    const Accounted run(lines);
    double waited = 0;
    for (const Json& line : lines) waited += line["time_ms"]["data"].get<double>() / 1e3;
    CHECK(waited == about(lines.back()["lost_s"]["data"].get<double>(), 1e-6));
    CHECK(waited > 0.3 * run.steps);
    const double clock = std::stod(shell.content("end")) - std::stod(shell.content("begin")), bill = bill_at_end(out, run.steps);
    MESSAGE("process " << clock << " s, bill " << bill << " s, not accounted for: " << 100 * run.missing() << " %");
    CHECK(bill < clock);
    return bill > 0.98 * clock ? run.missing() : 1;
  });
}

TEST_CASE("--cache: the bits of a run without, on each mesh; what is kept is not read again") {
  SlowStorage shell;
  const std::string train = "$TEXT --val text --global-batch 8 --steps 5 --checkpoint-every 2 --shuffle --out ";
  shell.output(train + "wanted");
  shell.output("$SLOW " + train + "first --cache kept");
  const size_t cold = shell.reads();
  shell("rm reads");
  shell.output("$SLOW " + train + "second --cache kept");
  CHECK(shell.reads() + 1 == cold);  // the text is one chunk; data are looked at as they are, without a cache
  CHECK(shell.same_metrics("first", "wanted"));
  CHECK(shell.same_metrics("second", "wanted"));
  shell.output("for f in kept/records/*; do [ ! -s $f ] || printf x | dd of=$f bs=1 seek=999 conv=notrunc 2>/dev/null; done");
  shell.output("rm reads; $SLOW " + train + "third --cache kept");
  CHECK(shell.reads() == cold);
  CHECK(shell.same_metrics("third", "wanted"));
  shell.output("rm -r third/step_00000005; " + train + "third --resume");
  CHECK(shell.same_metrics("third", "wanted"));
  if (is_gpu_build()) return skip("the rest is of two ranks on the CPU device; what comes before was tested");
  shell.output("rm -r reads kept; $SLOW $MPIRUN 2 " + train + "two --cache kept");
  const size_t shared = shell.reads();
  shell.output("rm reads; $SLOW $MPIRUN 2 " + train + "again --cache kept");
  CHECK(shell.reads() + 1 == shared);
  CHECK(shell.losses("two") == shell.losses("again"));
  shell.refuses("$TEXT --out x --cache text", 1, {"--cache", "text", "give a folder on a local disk"});
  shell.refuses("$TEXT --out x --cache-size 5", 2, {"--cache-size 5", "--cache DIR"});
  shell.refuses("$TEXT --out x --cache ''", 2, {"--cache ''"});
  CHECK(!shell.exists("x"));
}
