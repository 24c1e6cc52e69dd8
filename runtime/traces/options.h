// The files of runtime/traces/tracing.cuh; empty: none.
#pragma once

#include <string>

struct TraceFiles {
  std::string timeline, tensors;
};
