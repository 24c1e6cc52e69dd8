// The house as its tests see it: its files, which of them include which, and what is code in them. Paths begin at the top
// of the repository, where tests run.
#pragma once

#include <filesystem>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "test/temporary_folder.h"

// The files that each file includes in quotes.
using Includes = std::map<std::string, std::set<std::string>>;

inline bool is_source(const std::filesystem::path& file) {
  return std::set<std::string>{".h", ".cpp", ".cu", ".cuh"}.contains(file.extension());
}

// All sources of these folders (or files).
inline std::set<std::string> sources_of(const std::vector<std::string>& folders) {
  std::set<std::string> files;
  for (const std::string& folder : folders) {
    if (!std::filesystem::is_directory(folder)) files.insert(folder);
    else
      for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
        if (is_source(entry.path())) files.insert(entry.path().string());
  }
  return files;
}

inline const std::vector<std::string> core_folders = {"train_gpt.cu", "gpt", "kernels"};
inline std::set<std::string> sources_of_the_house() {
  return sources_of({"train_gpt.cu", "gpt", "kernels", "extensions", "runtime", "cpu"});
}

inline std::vector<std::string> lines_of(const std::string& file) {
  std::vector<std::string> lines;
  std::istringstream text(content_of(file));
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

// The room of a file of extensions/ or runtime/: "extensions/fp8". Else "".
inline std::string room_of(const std::string& file) {
  std::smatch match;
  return std::regex_search(file, match, std::regex("^(extensions|runtime)/[^/]+(?=/)")) ? match.str() : "";
}

// What files include in quotes, of what there is.
inline Includes includes_of(const std::set<std::string>& files) {
  Includes includes;
  const std::regex quoted("^#include \"([^\"]+)\"");
  for (const std::string& file : files) {
    std::smatch match;
    for (const std::string& line : lines_of(file))
      if (line.starts_with("#include") && std::regex_search(line, match, quoted) && std::filesystem::exists(match[1].str())) includes[file].insert(match[1]);
  }
  return includes;
}

// Lines that are neither empty nor a comment.
inline int code_lines(const std::string& file) {
  int lines = 0;
  for (const std::string& line : lines_of(file)) {
    const size_t first = line.find_first_not_of(" \t");
    lines += first != line.npos && line.compare(first, 2, "//") != 0;
  }
  return lines;
}
