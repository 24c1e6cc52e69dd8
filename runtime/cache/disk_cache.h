// Keeps data that was read from slow storage on a local disk (--cache DIR): for later epochs, for later runs, and for
// the other ranks of this host.
//
// Each data file has a file of records. Record i is the checksum of chunk i of the data, 1 MiB, and the chunk itself. If
// a record does not fit its checksum, because nobody has written it yet, somebody is writing it, or it is damaged, then
// the chunk is read from the data, and the record is written. So records need not survive a power cut.
//
// Where there is no room for a record, the records of other data are removed, the least recently used ones first.
// Records that were used since this run began stay: an epoch reads all data in turn, so a cache that is too small, and
// that removes the least recently used chunk, removes each one before it is needed again.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <ctime>

#include <sys/file.h>
#include <sys/stat.h>

#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "gpt/base/text.h"
#include "gpt/data.h"

// Can be used by several threads and processes at a time.
class DiskCache final : public DataCache {
 public:
  // bytes: the most that all records take. A twentieth of the disk stays free, too. Fails if nothing can be written in the folder.
  DiskCache(const std::filesystem::path& folder, size_t bytes) : folder_(folder / "records"), most_bytes_(bytes) {
    const std::string problem = attempt([&] {
      std::filesystem::create_directories(folder_);
      File(folder_ / "trial", O_RDWR | O_CREAT);
    });
    if (!problem.empty()) fail("--cache: ", problem, ": give a folder on a local disk that may be written to");
  }

  // Reads whole chunks, and keeps them; no other version than this one is kept. If something can't be kept, the run says so,
  // keeps nothing more, and reads from the data.
  void read(const File& data, const FileStamp& version, size_t offset, unsigned char* to, size_t bytes) override {
    std::string chunk;
    for (size_t count; bytes > 0; offset += count, to += count, bytes -= count) {
      const size_t number = offset / chunk_bytes, begin = number * chunk_bytes;
      chunk.resize(std::min(chunk_bytes, version.bytes - begin));
      count = std::min(bytes, begin + chunk.size() - offset);
      const std::string problem = attempt([&] { read_chunk(data, version, number, chunk); });
      if (problem.empty()) std::copy_n(&chunk[offset - begin], count, to);
      else data.read(offset, to, count);
      if (!problem.empty() && most_bytes_.exchange(0) > 0)
        std::printf("data      nothing more is kept in --cache: %s\n", one_line(problem).c_str());
    }
  }

 private:
  static constexpr size_t chunk_bytes = 1 << 20, checksum_bytes = 16;

  // Fails if the chunk is not here, and can't be kept.
  void read_chunk(const File& data, const FileStamp& version, size_t number, std::string& chunk) const {
    const std::filesystem::path path = std::filesystem::absolute(data.path());
    const size_t at = number * (checksum_bytes + chunk_bytes);
    File file(folder_ / xxh3(concat(path, ' ', version.bytes, ' ', version.modified_ns)), O_RDWR | O_CREAT);
    futimens(file.descriptor(), nullptr);  // it is used now: no room is made at its cost
    if (find(file, at, chunk)) return;
    if (most_bytes_ == 0) fail("nothing is kept");
    make_room(checksum_bytes + chunk_bytes);
    flock(file.descriptor(), LOCK_EX);  // until it is closed. Others that need this chunk wait here, and then find it
    if (find(file, at, chunk)) return;
    data.read(number * chunk_bytes, chunk.data(), chunk.size());
    if (stamp_of(data.path()) != version) fail(data.path(), " has changed");
    file.write(at + checksum_bytes, chunk.data(), chunk.size());
    file.write(at, xxh3(chunk).data(), checksum_bytes);
  }

  // Reads a record. Returns false if there is none that is whole.
  static bool find(const File& file, size_t at, std::string& chunk) {
    std::string checksum(checksum_bytes, 0);
    if (file.size() < at + checksum.size() + chunk.size()) return false;
    file.read(at, checksum.data(), checksum.size());
    file.read(at + checksum.size(), chunk.data(), chunk.size());
    return checksum == xxh3(chunk);
  }

  // Makes room for `bytes` more. Fails if that is impossible.
  void make_room(size_t bytes) const {
    size_t used = 0;
    time_t last_use = begin_;
    std::filesystem::path unused;  // for the longest time
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      struct stat status = {};
      stat(entry.path().c_str(), &status);
      used += size_t(status.st_blocks) * 512;  // files have holes
      if (status.st_mtime < last_use) last_use = status.st_mtime, unused = entry.path();
    }
    const std::filesystem::space_info disk = std::filesystem::space(folder_);
    if (used + bytes <= most_bytes_ && disk.available >= disk.capacity / 20) return;
    if (unused.empty()) fail(folder_, " is full: give it more room (--cache-size, or the disk)");
    std::filesystem::remove(unused);
    make_room(bytes);
  }

  const std::filesystem::path folder_;
  const time_t begin_ = std::time(nullptr);  // of this run
  std::atomic<size_t> most_bytes_;           // 0: nothing more is kept
};
