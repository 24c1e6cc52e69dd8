// What a checkpoint's folder holds, byte for byte, so that no damage goes unnoticed. Every rank that writes a
// checkpoint leaves a manifest of what it wrote, manifest_00002_of_00004.json:
//
//   {"step": 100, "rank": 2, "ranks": 4, "extents": [["model.safetensors", OFFSET, BYTES, "XXH3 CHECKSUM"], ...]}
//   the XXH3 checksum of that line
//
// Together the extents of all manifests tile every file they name. Checksums are XXH3, 64 bits (https://xxhash.com).
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

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
  std::string name() const;  // of its file
  std::string text() const;  // the content
};

// All manifests of a folder; fails if one is missing or damaged.
std::vector<Manifest> read_manifests(const std::filesystem::path& folder);

// Fails unless the extents tile each file, from its first byte to its last.
void check_coverage(const std::filesystem::path& folder, const std::vector<Manifest>& manifests);

// Compares every `of`-th extent, beginning with number `share`, with its checksum.
void check_extents(const std::filesystem::path& folder, const std::vector<Manifest>& manifests, size_t share,
                   size_t of);

bool has_manifest(const std::filesystem::path& folder);

// Why a checkpoint folder is not to be trusted; empty: all is well. Ranks may share the work: this is number `share`.
std::string damage_of(const std::filesystem::path& folder, size_t share = 0, size_t of = 1);
