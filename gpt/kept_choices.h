// Where choices of algorithms (kernels/gemm/gemm_choices.cuh) are kept from one start of the program to the next: here nowhere,
// so each start makes them by time. A room may keep them (Room::kept_choices).
#pragma once

#include <map>
#include <string>

using ProductChoices = std::map<std::string, std::string>;

class KeptChoices {
 public:
  virtual ~KeptChoices() = default;
  // Are choices made by time at all? If not, the library's recommendations are taken.
  virtual bool by_time() const { return true; }
  // Those of earlier starts.
  virtual ProductChoices read() const { return {}; }
  // Keeps what was timed. Returns one line that says whether it was kept; empty: nobody keeps it. Never fails.
  virtual std::string keep(const ProductChoices& /*timed*/) const { return ""; }
};
