// Another trainer.json in a whole checkpoint, as an earlier version may have written it.
#pragma once

#include <filesystem>
#include <string>

#include "runtime/checkpoints/manifest.h"
#include "test/workplace.h"

inline void put_trainer(const std::filesystem::path& folder, const std::string& text) {
  Manifest manifest = read_manifests(folder)[0];
  std::erase_if(manifest.extents, [](const Extent& extent) { return extent.file == "trainer.json"; });
  manifest.add("trainer.json", 0, text);
  put(folder / "trainer.json", text);
  put(folder / manifest.name(), manifest.text());
}
