// Any manifests of a checkpoint's folder: either refused, or they name the files' bytes, and no change of a byte is
// overlooked. Input: the first lines of two manifests, whose checksums are added, then the files "a" and "b".
#include "test/fuzz/fuzz.h"

#include "gpt/base/text.h"
#include "runtime/checkpoints/manifest.h"

namespace {

std::string with_checksum(const std::string& line) { return line.empty() ? "" : line + "\n" + xxh3(line + "\n") + "\n"; }

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<std::string> parts = parts_of({reinterpret_cast<const char*>(data), size}, 4);
  fuzzed_or_none("manifest_00000_of_00002.json", with_checksum(parts[0]));
  fuzzed_or_none("manifest_00001_of_00002.json", with_checksum(parts[1]));
  fuzzed_or_none("a", parts[2]);
  const std::filesystem::path folder = fuzzed_or_none("b", parts[3]).parent_path();
  std::vector<Manifest> manifests;
  const bool valid = done(size, [&] {
    manifests = read_manifests(folder);
    check_coverage(folder, manifests);
    check_extents(folder, manifests, 0, 1);
  });
  require(valid == damage_of(folder).empty(), "undecided");
  if (!valid) return 0;
  require(manifests.size() == 2, manifests.size(), " manifests");
  for (const Manifest& manifest : manifests)
    for (const Extent& extent : manifest.extents) {
      require(extent.file == "a" || extent.file == "b", "there is no file ", extent.file);
      std::string changed = extent.file == "a" ? parts[2] : parts[3];
      if (extent.bytes == 0) continue;
      changed.at(extent.offset) ^= 1;
      fuzzed(extent.file, changed);
      require(!damage_of(folder).empty(), "a change is overlooked");
    }
  return 0;
}
