// A ladder's table as a picture.
#pragma once

#include <string>

#include "dev/ladders/table.h"

namespace ladder {

// Writes an SVG with one bar per rung, and prints its path. The length of a bar is, on a GPU, the share of the card's
// peak rate; on the CPU device, the share of the moved bytes that had to be moved; for all-reduce, the bandwidth of the
// bus. A dashed line is at the library's length.
//
// title: operation, storage type and sizes; machine: whose figures these are
void draw(const Table& table, const std::string& title, const std::string& machine, const std::string& path);

// build/cpu/ladder_gelu.svg, beside the program that calls this
std::string usual_picture();

}  // namespace ladder
