#include "cpu/log.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "cpu/device.h"
#include "cpu/switches.h"

namespace cpu {
namespace {

// The rank that the launcher of processes has given to this one; 0 without a launcher.
std::string rank() {
  for (const char* variable : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"})
    if (const char* rank = std::getenv(variable)) return rank;
  return "0";
}

FILE* open_log() {
  if (switches().log.empty()) return nullptr;
  const std::string path = switches().log + "." + rank();
  FILE* file = std::fopen(path.c_str(), "w");
  if (!file) fatal("GPT_CPU_LOG: %s can't be written", path.c_str());
  std::setvbuf(file, nullptr, _IOLBF, 1 << 12);  // ranks end by _exit, which writes no buffers
  return file;
}

}  // namespace

void log(const char* format, ...) {
  static FILE* const file = open_log();
  if (!file) return;
  va_list values;
  va_start(values, format);
  flockfile(file);  // a line at a time, whichever thread writes it
  std::vfprintf(file, format, values);
  std::fputc('\n', file);
  funlockfile(file);
  va_end(values);
}

}  // namespace cpu
