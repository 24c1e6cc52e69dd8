// The CPU device's counts (dev/ladders/cpu/access_counts.h), as a row of a table.
//
//   moved        bytes per element that go to and from memory: 32 per sector; no cache is modelled
//   × least      `moved` divided by the bytes that the operation must move at least
//   width        bytes that a thread asks for at once, on average
//   full %       how much of the sectors is asked for: 100 % if a warp's addresses are side by side
//   conflicts    wavefronts of shared memory, divided by the wavefronts that would be enough without bank conflicts
//   barriers, shuffles, mma    instructions of warps, for 1,000 elements
#pragma once

#include <string>
#include <vector>

#include "dev/ladders/cpu/access_counts.h"

namespace ladder {

constexpr int sector_bytes = 32;

std::vector<std::string> count_columns();
// a / b with `significant` significant digits; "–" if a or b is 0.
std::string ratio(double a, double b, int significant = 3);
std::vector<std::string> count_row(const std::string& name, const std::string& idea, const cpu::AccessCounts& counts,
                                   double elements, double least_bytes);

// The source lines of a rung that cost the most transactions.
void print_lines(const std::string& rung, const std::vector<cpu::LineCounts>& lines);

}  // namespace ladder
