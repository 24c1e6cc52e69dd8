// The choices of matrix products that this user's runs have timed (kernels/gemm/gemm_choices.cuh), in a file of --products
// for the next starts, which then time nothing, and have the same bits. Names begin with the card, the library's version
// and the size of its workspace, so one file serves all machines. A text: after a heading, for each choice a line
//
//   CHECKSUM NAME<tab>CHOICE      the XXH3 checksum of what follows the space
//
// A line with another checksum counts for nothing, and whoever adds to the file leaves it out. Jobs that add at the same time
// take turns; of two choices for a name the first one stays.
#pragma once

#include <filesystem>
#include <map>
#include <string>

using ProductChoices = std::map<std::string, std::string>;

// The path in the user's cache: $XDG_CACHE_HOME/gpt.cu/products, or $HOME/.cache/gpt.cu/products; empty: neither is set.
std::string user_products();

// What the file holds, for choices_in(); empty if it can't be read.
std::string read_products(const std::filesystem::path& file);
ProductChoices choices_in(const std::string& content);

// Adds choices that were timed to the file. Never fails, but says in one line what has become of them.
std::string keep_products(const std::filesystem::path& file, ProductChoices timed);
