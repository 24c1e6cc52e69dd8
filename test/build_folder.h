// The folders with the programs of this build, as a test finds them.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "test/temporary_folder.h"

inline std::string build_folder() {
  const char* set = std::getenv("GPT_BUILD");
  return set ? set : "build/cpu";
}

inline bool is_gpu_build() { return contains(build_folder(), "gpu"); }

// The path of a program or library of this build
inline std::string built(const std::string& name) { return std::filesystem::absolute(build_folder() + "/" + name); }

// The path of a program that needs no device: those of the sanitizers' build and of the debugger's lie beside (dev/make/host.mk).
inline std::string built_for_host(const std::string& name) {
  const std::string build = build_folder();
  const std::string variant = build.ends_with("-asan") ? "-asan" : build.ends_with("-debug") ? "-debug" : "";
  return std::filesystem::absolute("build/host" + variant + "/" + name);
}
