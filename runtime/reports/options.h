// What is told of a run besides its steps.
#pragma once

#include <string>

struct ReportOptions {
  double price = 0;      // of a rank's device for an hour; 0: not known
  bool profile = false;  // a table of kernels at the end
  std::string ceilings;  // file of what dev/ceilings.cu has measured on this device; empty: nothing is known
};
