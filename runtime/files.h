// Files as the trainer needs them: mapped for reading, written in place, and durable once an operation
// returns. Every error names the path and the operating system's reason.
#pragma once

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "runtime/error.h"

static_assert(std::endian::native == std::endian::little, "token shards and safetensors are little-endian");

// An open file that closes itself.
class File {
 public:
  File(const std::filesystem::path& path, int flags)
      : path_(path), descriptor_(open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    if (descriptor_ < 0) fail(path_, ": cannot open: ", std::strerror(errno));
  }
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor() const { return descriptor_; }
  const std::filesystem::path& path() const { return path_; }

  // Size in bytes; anything but a regular file (a folder, a pipe) is refused.
  size_t size() const {
    struct stat status;
    if (fstat(descriptor_, &status) != 0) fail(path_, ": cannot read its size: ", std::strerror(errno));
    if (!S_ISREG(status.st_mode)) fail(path_, ": is not a regular file");
    return size_t(status.st_size);
  }

  // pwrite may write less than asked for: at most 2 GiB a call, or what still fits on the disk.
  void write(size_t offset, const void* data, size_t bytes) {
    const char* from = static_cast<const char*>(data);
    while (bytes > 0) {
      ssize_t written = pwrite(descriptor_, from, bytes, off_t(offset));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0 && errno == EINVAL && past_cache_) {  // not as this file system or its disk wants it
        set_past_cache(false);
        continue;
      }
      if (written <= 0) fail(path_, ": cannot write ", bytes, " bytes: ", std::strerror(errno));
      from += written;
      offset += size_t(written);
      bytes -= size_t(written);
    }
  }

  // The same, but whole blocks go past the page cache, straight from memory, where the file system can do that and
  // `data` is to its block what `offset` is to the file's. Spares the copy, and the cache for what training reads.
  void write_past_cache(size_t offset, const void* data, size_t bytes) {
    const char* from = static_cast<const char*>(data);
    const size_t before = std::min(bytes, (block - offset % block) % block), whole = (bytes - before) / block * block;
    write(offset, from, before);
    if (reinterpret_cast<uintptr_t>(from + before) % block == 0) set_past_cache(true);
    write(offset + before, from + before, whole);
    set_past_cache(false);
    write(offset + before + whole, from + before + whole, bytes - before - whole);
  }

  // Exactly so many bytes.
  void read(size_t offset, void* data, size_t bytes) const {
    char* to = static_cast<char*>(data);
    while (bytes > 0) {
      const ssize_t count = pread(descriptor_, to, bytes, off_t(offset));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) fail(path_, ": cannot read ", bytes, " bytes: ", count < 0 ? std::strerror(errno) : "the file ends");
      to += count;
      offset += size_t(count);
      bytes -= size_t(count);
    }
  }

  // After this the content survives a power cut. Network file systems report late errors here.
  void sync_and_close() {
    if (fsync(descriptor_) != 0) fail(path_, ": cannot flush to disk: ", std::strerror(errno));
    if (::close(std::exchange(descriptor_, -1)) != 0) fail(path_, ": cannot close: ", std::strerror(errno));
  }

  static constexpr size_t block = 4096;

 private:
  void set_past_cache(bool wanted) {
    const int flags = fcntl(descriptor_, F_GETFL);
    past_cache_ = fcntl(descriptor_, F_SETFL, wanted ? flags | O_DIRECT : flags & ~O_DIRECT) == 0 && wanted;
  }

  std::filesystem::path path_;
  int descriptor_;
  bool past_cache_ = false;
};

// A whole file as read-only memory; pages are read when touched and belong to the page cache, not to us.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path) {
    File file(path, O_RDONLY | O_NONBLOCK);  // else the opening of a pipe would wait for a writer
    size_ = file.size();
    if (size_ == 0) return;  // nothing can be mapped
    void* address = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.descriptor(), 0);
    if (address == MAP_FAILED) fail(path, ": cannot map ", size_, " bytes: ", std::strerror(errno));
    data_ = static_cast<const unsigned char*>(address);
  }
  ~MappedFile() {
    if (data_) munmap(const_cast<unsigned char*>(data_), size_);
  }
  MappedFile(MappedFile&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  MappedFile& operator=(MappedFile&&) = delete;

  const unsigned char* data() const { return data_; }
  size_t size() const { return size_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const unsigned char* data_ = nullptr;
  size_t size_ = 0;
};

// A new file with this content, on disk when the function returns.
inline void write_file(const std::filesystem::path& path, std::string_view content) {
  File file(path, O_WRONLY | O_CREAT | O_TRUNC);
  file.write(0, content.data(), content.size());
  file.sync_and_close();
}

// A file's name lives in its folder: creations and renames are durable only once the folder is flushed, too.
inline void sync_folder(const std::filesystem::path& path) {
  File folder(path, O_RDONLY | O_DIRECTORY);
  // Some network file systems cannot flush a folder and say EINVAL.
  if (fsync(folder.descriptor()) != 0 && errno != EINVAL) {
    fail(path, ": cannot flush the folder to disk: ", std::strerror(errno));
  }
}

// May a file that nobody vouches for name this one of its folder? Other folders are none of its business, and a name
// that does not fit into a line is no name.
inline bool is_file_name(const std::string& name) {
  const bool plain = name.find('/') == std::string::npos && name == one_line(name);
  return plain && !name.empty() && name.size() <= 255;
}

// How deep the brackets of a JSON text are nested. The parser's callback could tell, too, but makes its time quadratic:
// it then looks through all earlier neighbours at the end of each object.
inline size_t nesting(std::string_view text) {
  size_t depth = 0, deepest = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') quoted = !quoted;
    else if (quoted) i += c == '\\';  // what follows is escaped
    else if (c == '[' || c == '{') deepest = std::max(deepest, ++depth);
    else if ((c == ']' || c == '}') && depth > 0) --depth;
  }
  return deepest;
}

// JSON from a file that nobody vouches for: one object, nested at most 32 deep.
inline nlohmann::json read_json_object(const std::filesystem::path& path) {
  MappedFile file(path);
  if (nesting(file.text()) > 32) fail(path, ": the JSON is nested more than 32 deep");
  nlohmann::json result;
  try {
    result = nlohmann::json::parse(file.text());
  } catch (const nlohmann::json::exception& error) {
    fail(path, ": is not valid JSON: ", excerpt(error.what()));
  }
  if (!result.is_object()) fail(path, ": is not a JSON object");
  return result;
}
