// NVTX for the CPU device: no profiler shows its ranges, but the log has them (cpu/log.h).
#pragma once

#include "cpu/log.h"

inline int nvtxRangePushA(const char* name) { return cpu::log("range %s", name), 0; }
inline int nvtxRangePop() { return cpu::log("end"), 0; }
