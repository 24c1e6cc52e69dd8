// After a kernel has faulted (an illegal address or instruction, a trap), every later CUDA call of the process fails with
// the same error. test/run_cases.h asks here when a case has failed; test/kernel_test.cuh gives the answer.
#pragma once

#include <string>

inline std::string (*device_error)() = [] { return std::string(); };  // CUDA's message; empty: the device still works
