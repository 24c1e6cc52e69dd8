#include "gpt/base/files.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <utility>

#include <sys/stat.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"

static_assert(std::endian::native == std::endian::little, "token shards and safetensors are little-endian");

namespace {

// The nesting depth of the brackets of a JSON text. The parser's callback could compute it, too, but with a callback
// the parser takes quadratic time: at the end of each object it looks through all earlier neighbours.
size_t nesting(std::string_view text) {
  size_t depth = 0, deepest = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '"') quoted = !quoted;
    else if (quoted) i += c == '\\';  // skip the escaped character
    else if (c == '[' || c == '{') deepest = std::max(deepest, ++depth);
    else if ((c == ']' || c == '}') && depth > 0) --depth;
  }
  return deepest;
}

// Makes a call again that a signal has interrupted, as on some network file systems. Returns its result.
template <class Call>
int uninterrupted(Call call) {
  int result;
  do result = call();
  while (result != 0 && errno == EINTR);
  return result;
}
int flush(int descriptor) { return uninterrupted([=] { return fsync(descriptor); }); }

}  // namespace

File::File(const std::filesystem::path& path, int flags)
    : path_(path), descriptor_(open(path.c_str(), flags | O_CLOEXEC, 0666)) {
  if (descriptor_ < 0) fail(path_, ": cannot open: ", std::strerror(errno));
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

size_t File::size() const {
  struct stat status;
  if (fstat(descriptor_, &status) != 0) fail(path_, ": cannot read its size: ", std::strerror(errno));
  if (!S_ISREG(status.st_mode)) fail(path_, ": is not a regular file: give one");
  return size_t(status.st_size);
}

void File::reserve(size_t bytes) {
  int result = uninterrupted([&] { return fallocate(descriptor_, 0, 0, off_t(bytes)); });
  // Not every file system can do that, and posix_fallocate() would write into each block of the file there. A full disk is
  // noticed only while writing then.
  if (result != 0 && (errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL))
    result = uninterrupted([&] { return ftruncate(descriptor_, off_t(bytes)); });
  if (result != 0) fail(path_, ": cannot reserve ", bytes, " bytes: ", std::strerror(errno));
}

void File::write(size_t offset, const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {  // pwrite may write fewer bytes: at most 2 GiB per call, or only the bytes that still fit on the disk
    ssize_t written = pwrite(descriptor_, from, bytes, off_t(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0 && errno == EINVAL && past_cache_) {  // this file system or its disk can't do it: use the cache
      set_past_cache(false);
      continue;
    }
    if (written == 0) errno = ENOSPC;  // it says nothing
    if (written <= 0) fail(path_, ": cannot write ", bytes, " bytes: ", std::strerror(errno));
    from += written;
    offset += size_t(written);
    bytes -= size_t(written);
  }
}

void File::write_past_cache(size_t offset, const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  const size_t before = std::min(bytes, (block - offset % block) % block), whole = (bytes - before) / block * block;
  write(offset, from, before);
  if (reinterpret_cast<uintptr_t>(from + before) % block == 0) set_past_cache(true);
  write(offset + before, from + before, whole);
  set_past_cache(false);
  write(offset + before + whole, from + before + whole, bytes - before - whole);
}

void File::read(size_t offset, void* data, size_t bytes) const {
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

std::string File::content() const {
  std::string content(size(), 0);
  read(0, content.data(), content.size());
  return content;
}

bool File::is_at(const std::filesystem::path& path) const {
  struct stat own, there;
  return fstat(descriptor_, &own) == 0 && ::stat(path.c_str(), &there) == 0 && own.st_ino == there.st_ino &&
         own.st_dev == there.st_dev;
}

void File::sync_and_close() {
  if (flush(descriptor_) != 0) fail(path_, ": cannot flush to disk: ", std::strerror(errno));
  // After a signal it is closed, too.
  if (::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR) fail(path_, ": cannot close: ", std::strerror(errno));
}

void File::set_past_cache(bool wanted) {
  const int flags = fcntl(descriptor_, F_GETFL);
  past_cache_ = fcntl(descriptor_, F_SETFL, wanted ? flags | O_DIRECT : flags & ~O_DIRECT) == 0 && wanted;
}

FileStamp stamp_of(const std::filesystem::path& path) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0) return {};
  return {size_t(status.st_size), status.st_ino, status.st_mtim.tv_sec * int64_t(1'000'000'000) + status.st_mtim.tv_nsec};
}

std::string read_file(const std::filesystem::path& path) { return File(path, for_reading).content(); }

bool holds_something_else(const std::filesystem::path& path, std::string_view beginning) {
  std::error_code not_there;
  if (!std::filesystem::is_regular_file(path, not_there)) return false;
  const File file(path, for_reading);
  std::string content(std::min(file.size(), beginning.size()), 0);
  file.read(0, content.data(), content.size());
  return !content.empty() && content != beginning;
}

void write_file(const std::filesystem::path& path, std::string_view content) {
  File file(path, O_WRONLY | O_CREAT | O_TRUNC);
  file.write(0, content.data(), content.size());
  file.sync_and_close();
}

void replace_file(const std::filesystem::path& path, std::string_view content) {
  const std::filesystem::path partial = path.string() + ".partial";
  try {
    write_file(partial, content);
    std::filesystem::rename(partial, path);
  } catch (...) {
    std::error_code error;
    std::filesystem::remove(partial, error);
    throw;
  }
  sync_folder(path.parent_path());
}

void sync_folder(const std::filesystem::path& path) {
  File folder(path, O_RDONLY | O_DIRECTORY);
  // Some network file systems cannot flush a folder and say EINVAL.
  if (flush(folder.descriptor()) != 0 && errno != EINVAL)
    fail(path, ": cannot flush the folder to disk: ", std::strerror(errno));
}

bool is_file_name(const std::string& name) {
  const bool plain = name.find('/') == std::string::npos && name == one_line(name);
  return plain && !name.empty() && name.size() <= 255;
}

nlohmann::json read_json_object(const std::filesystem::path& path) {
  const char* get_again = ": correct it, or get it again";
  const std::string text = read_file(path);
  if (nesting(text) > 32) fail(path, ": the JSON is nested more than 32 deep", get_again);
  nlohmann::json result;
  try {
    result = nlohmann::json::parse(text);
  } catch (const nlohmann::json::exception& error) {
    fail(path, ": is not valid JSON: ", excerpt(error.what()), get_again);
  }
  if (!result.is_object()) fail(path, ": is not a JSON object", get_again);
  return result;
}
