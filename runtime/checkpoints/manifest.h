// Manifests list every byte of a checkpoint's other files with checksums, so that any damage is found. Each rank's part
// has a manifest, manifest_00002_of_00004.json, written by whoever writes the part:
//
//   {"step": 100, "rank": 2, "ranks": 4, "extents": [["model.safetensors", OFFSET, BYTES, "XXH3 CHECKSUM"], ...]}
//   (second line) the XXH3 checksum of the first line
//
// The extents of all manifests together cover every byte of the files that they name exactly once. Checksums are XXH3,
// 64 bits (https://xxhash.com).
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

// XXH3 of the files, one after the other.
std::string checksum_of(const std::vector<std::filesystem::path>& files);

// Neighbouring bytes of a file.
struct Extent {
  std::string file;
  size_t offset, bytes;
  std::string checksum;
};

struct Manifest {
  size_t step = 0;
  int rank = 0, ranks = 1;
  std::vector<Extent> extents;

  void add(const std::string& file, size_t offset, std::string_view bytes);
  std::string name() const;  // the name of the manifest's file
  std::string text() const;  // the content of that file
};

// Reads all manifests of a folder. Fails if one is missing or damaged.
std::vector<Manifest> read_manifests(const std::filesystem::path& folder);

// Fails unless the extents cover each file from its first byte to its last, without overlaps.
void check_coverage(const std::filesystem::path& folder, const std::vector<Manifest>& manifests);

// Compares every `of`-th extent, beginning with number `share`, with its checksum.
void check_extents(const std::filesystem::path& folder, const std::vector<Manifest>& manifests, size_t share,
                   size_t of);

// The files of a folder's manifests, in the order of their names; none if the folder has none or does not exist.
std::vector<std::filesystem::path> manifest_files(const std::filesystem::path& folder);

// Names the damage in a checkpoint folder; empty: none. Ranks may share the work: this one checks every `of`-th
// extent, beginning with number `share`.
std::string damage_of(const std::filesystem::path& folder, size_t share = 0, size_t of = 1);
