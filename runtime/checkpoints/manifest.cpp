#include "runtime/checkpoints/manifest.h"

#include <algorithm>
#include <map>
#include <memory>
#include <system_error>

#include <xxhash.h>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "gpt/base/text.h"

namespace {

// The checksum of bytes [offset, offset + bytes) of a file. The file is read, not mapped, so that a broken disk gives
// an error and not a signal.
std::string xxh3_of(const File& file, size_t offset, size_t bytes) {
  constexpr size_t block_bytes = 1 << 20;
  std::string block(std::min(bytes, block_bytes), 0);
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), XXH3_freeState);
  XXH3_64bits_reset(state.get());
  while (bytes > 0) {
    const size_t count = std::min(bytes, block_bytes);
    file.read(offset, block.data(), count);
    XXH3_64bits_update(state.get(), block.data(), count);
    offset += count;
    bytes -= count;
  }
  return hexadecimal(XXH3_64bits_digest(state.get()));
}

// Reads a manifest. Fails if the file is not exactly as Manifest::text() writes it.
Manifest read_manifest(const std::filesystem::path& path) {
  const std::string file = read_file(path);
  const std::string_view text = file;
  const size_t end = text.find('\n') + 1;
  if (end == 0 || text.substr(end) != xxh3(text.substr(0, end)) + "\n") fail(path, ": is damaged");
  try {
    const nlohmann::json json = nlohmann::json::parse(text.substr(0, end));
    const auto count = [&](const nlohmann::json& value) {
      if (!value.is_number_unsigned()) fail(path, ": is no manifest: ", excerpt(value.dump()), " is no count");
      return value.get<size_t>();
    };
    Manifest manifest = {count(json.at("step")), int(count(json.at("rank"))), int(count(json.at("ranks"))), {}};
    for (const auto& e : json.at("extents")) {
      manifest.extents.push_back({e.at(0), count(e.at(1)), count(e.at(2)), e.at(3)});
      if (!is_file_name(e.at(0))) fail(path, ": names ", excerpt(e.at(0).dump()), ", not a file of this folder");
    }
    if (manifest.rank < 0 || manifest.rank >= manifest.ranks)
      fail(path, ": is no manifest: there is no rank ", manifest.rank, " of ", manifest.ranks);
    if (path.filename() != manifest.name()) fail(path, ": belongs to another rank: ", manifest.name());
    return manifest;
  } catch (const nlohmann::json::exception& error) {
    fail(path, ": is no manifest: ", excerpt(error.what()));
  }
}

}  // namespace

std::string checksum_of(const std::vector<std::filesystem::path>& files) {
  return xxh3(joined(files, [](const auto& path) { return xxh3_of({path, for_reading}, 0, File(path, for_reading).size()); }));
}

void Manifest::add(const std::string& file, size_t offset, std::string_view bytes) {
  extents.push_back({file, offset, bytes.size(), xxh3(bytes)});
}

std::string Manifest::name() const { return formatted("manifest_%05d_of_%05d.json", rank, ranks); }

std::string Manifest::text() const {
  nlohmann::ordered_json json = {{"step", step}, {"rank", rank}, {"ranks", ranks},
                                 {"extents", nlohmann::ordered_json::array()}};
  for (const Extent& e : extents) json["extents"].push_back({e.file, e.offset, e.bytes, e.checksum});
  const std::string line = json.dump() + "\n";
  return line + xxh3(line) + "\n";
}

std::vector<std::filesystem::path> manifest_files(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  std::error_code not_there;
  for (const auto& entry : std::filesystem::directory_iterator(folder, not_there))
    if (entry.path().filename().string().starts_with("manifest_")) files.push_back(entry.path());
  std::ranges::sort(files);
  return files;
}

std::vector<Manifest> read_manifests(const std::filesystem::path& folder) {
  std::vector<Manifest> all;
  for (const std::filesystem::path& file : manifest_files(folder)) all.push_back(read_manifest(file));
  if (all.empty()) fail(folder, ": has no manifest");
  std::ranges::sort(all, {}, &Manifest::rank);
  for (int rank = 0; rank < all[0].ranks; ++rank)
    if (rank >= int(all.size()) || all[size_t(rank)].rank != rank)
      fail(folder, ": what rank ", rank, " of ", all[0].ranks, " wrote is missing");
  return all;
}

void check_coverage(const std::filesystem::path& folder, const std::vector<Manifest>& manifests) {
  std::map<std::string, std::vector<Extent>> files;
  for (const Manifest& manifest : manifests) {
    if (manifest.step != manifests[0].step)
      fail(folder, ": ", manifest.name(), " is of step ", manifest.step, ", ", manifests[0].name(), " of step ", manifests[0].step);
    if (manifest.ranks != int(manifests.size()))
      fail(folder, ": ", manifest.name(), " is of ", manifest.ranks, " ranks, and ", manifests.size(), " manifests are there");
    for (const Extent& extent : manifest.extents) files[extent.file].push_back(extent);
  }
  for (auto& [name, extents] : files) {
    std::sort(extents.begin(), extents.end(), [](auto& a, auto& b) { return a.offset < b.offset; });
    size_t end = 0;
    for (const Extent& extent : extents) {
      if (extent.offset > end) fail(folder / name, ": bytes ", end, " to ", extent.offset, " were not written by any rank");
      if (extent.offset < end) fail(folder / name, ": bytes ", extent.offset, " to ", end, " were written twice");
      if (__builtin_add_overflow(end, extent.bytes, &end)) fail(folder / name, ": it claims more bytes than any file has");
    }
    const size_t size = File(folder / name, for_reading).size();
    if (size != end) fail(folder / name, ": has ", size, " bytes and should have ", end, ": it is cut short or damaged");
  }
}

void check_extents(const std::filesystem::path& folder, const std::vector<Manifest>& manifests, size_t share,
                   size_t of) {
  size_t number = 0;
  for (const Manifest& manifest : manifests)
    for (const Extent& extent : manifest.extents) {
      if (number++ % of != share || extent.bytes == 0) continue;
      const File file(folder / extent.file, O_RDONLY);
      if (xxh3_of(file, extent.offset, extent.bytes) != extent.checksum)
        fail(folder / extent.file, ": bytes ", extent.offset, " to ", extent.offset + extent.bytes, " are damaged");
    }
}

std::string damage_of(const std::filesystem::path& folder, size_t share, size_t of) {
  return attempt([&] {
    const std::vector<Manifest> manifests = read_manifests(folder);
    check_coverage(folder, manifests);
    check_extents(folder, manifests, share, of);
  });
}
