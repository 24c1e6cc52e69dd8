// Files as the trainer needs them: read and written in place, and durable once an operation returns. Every error names
// the path and the operating system's reason. Nothing is mapped into memory: a mapped file that is cut short, or whose
// disk fails, ends the program by a signal, and the number of mappings is limited.
#pragma once

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

  // Size in bytes; anything but a regular file (a folder, a pipe) is refused.
  size_t size() const;

  // All of these bytes.
  void write(size_t offset, const void* data, size_t bytes);

  // The same, but whole blocks go past the page cache, straight from memory, where the file system can do that and
  // `data` is to its block what `offset` is to the file's. Spares the copy, and the cache for what training reads.
  void write_past_cache(size_t offset, const void* data, size_t bytes);

  // Exactly so many bytes.
  void read(size_t offset, void* data, size_t bytes) const;

  // After this the content survives a power cut. Network file systems report late errors here.
  void sync_and_close();

  static constexpr size_t block = 4096;

 private:
  void set_past_cache(bool wanted);

  std::filesystem::path path_;
  int descriptor_;
  bool past_cache_ = false;
};

// Flags to open a regular file for reading. File::size() refuses anything else; with O_NONBLOCK the opening of a pipe does
// not wait for a writer.
constexpr int for_reading = O_RDONLY | O_NONBLOCK;

// A whole small file.
std::string read_file(const std::filesystem::path& path);

// Is there something else than what begins so, which may be replaced? No file, an empty one and a device are nothing.
bool holds_something_else(const std::filesystem::path& path, std::string_view beginning);

// A new file with this content, on disk when the function returns.
void write_file(const std::filesystem::path& path, std::string_view content);

// A file's name lives in its folder: creations and renames are durable only once the folder is flushed, too.
void sync_folder(const std::filesystem::path& path);

// May a file that nobody vouches for name this one of its folder? Other folders are none of its business, and a name
// that does not fit into a line is no name.
bool is_file_name(const std::string& name);

// JSON from a file that nobody vouches for: one object, nested at most 32 deep.
nlohmann::json read_json_object(const std::filesystem::path& path);
