// Options of reports other than the lines of steps.
#pragma once

#include <string>

struct ReportOptions {
  double price = 0;      // of a rank's device for an hour; 0: not known
  bool profile = false;  // a table of kernels at the end
  std::string ceilings;  // file with dev/ceilings.cu's measurements of this device; empty: none
};
