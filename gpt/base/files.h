// Reads and writes files in place, and makes them durable. Every error names the path and the operating system's
// reason. No file is mapped into memory, because a mapped file that is cut short, or whose disk fails, ends the program
// by a signal, and because the number of mappings is limited.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include <fcntl.h>  // O_RDONLY and others, for File

#include <nlohmann/json_fwd.hpp>

// An open file that closes itself.
class File {
 public:
  File(const std::filesystem::path& path, int flags);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int descriptor() const { return descriptor_; }
  const std::filesystem::path& path() const { return path_; }

  // Size in bytes. Fails if this is not a regular file (but a folder or a pipe).
  size_t size() const;

  // Allocates all of a file on the disk, so that a full disk is noticed before anything is written.
  void reserve(size_t bytes);

  // Writes all of these bytes.
  void write(size_t offset, const void* data, size_t bytes);

  // The same, but whole blocks are written without the page cache, directly from `data`, if the file system can do that
  // and `data` and `offset` have the same remainder modulo `block`. That saves a copy, and leaves the cache to the
  // files that training reads (dev/results/2026-11-21-faults.md#writes: the writing thread takes half of the time).
  void write_past_cache(size_t offset, const void* data, size_t bytes);

  // Reads exactly `bytes` bytes.
  void read(size_t offset, void* data, size_t bytes) const;

  // Reads all of it. The file need not have a name any more.
  std::string content() const;

  // Does this path lead to the file? No, if it was moved or deleted, or another one has taken its place.
  bool is_at(const std::filesystem::path& path) const;

  // After this the content survives a power cut. Network file systems report some write errors only here.
  void sync_and_close();

  static constexpr size_t block = 4096;

 private:
  void set_past_cache(bool wanted);

  std::filesystem::path path_;
  int descriptor_;
  bool past_cache_ = false;
};

// Tells whether a file was written to, or another one has taken its place. All zeros: there is none.
struct FileStamp {
  size_t bytes, inode;
  int64_t modified_ns;
  bool operator==(const FileStamp&) const = default;
};
FileStamp stamp_of(const std::filesystem::path& path);

// Flags to open a regular file for reading. With O_NONBLOCK, opening a pipe does not wait for a writer; File::size()
// then refuses the pipe.
constexpr int for_reading = O_RDONLY | O_NONBLOCK;

// Returns the content of a small file.
std::string read_file(const std::filesystem::path& path);

// Does the file hold anything but a text that begins so? Then it must not be replaced. A file that does not exist or is
// empty, and a device, hold nothing.
bool holds_something_else(const std::filesystem::path& path, std::string_view beginning);

// Creates a file with this content, which is on disk when the function returns.
void write_file(const std::filesystem::path& path, std::string_view content);

// The same, but a file of this name is replaced at once, and stays as it is if that fails.
void replace_file(const std::filesystem::path& path, std::string_view content);

// Flushes a folder. It holds the names of its files, so creating or renaming a file is durable only after this.
void sync_folder(const std::filesystem::path& path);

// Is this the plain name of a file in the same folder, without a path and not too long for an error line? Names that
// come from an untrusted file must pass this check.
bool is_file_name(const std::string& name);

// Reads JSON from an untrusted file: one object, nested at most 32 levels deep.
nlohmann::json read_json_object(const std::filesystem::path& path);
