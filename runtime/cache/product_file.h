// The choices of matrix products that this user's runs have timed (kernels/gemm/gemm_choices.cuh), in a file of
// --products for the next starts, which then time nothing, and have the same bits. Names begin with the card, the
// library's version and the size of its workspace, so one file serves all machines. After a heading it has a line for
// each choice:
//
//   CHECKSUM NAME<tab>CHOICE      XXH3 of the text behind the space
//
// A line with another checksum is damaged. It is ignored, and left out when the file is written the next time. Jobs
// that add at the same time take turns; of two choices for a name the first one stays.
#pragma once

#include <filesystem>
#include <map>
#include <string>

using ProductChoices = std::map<std::string, std::string>;

// $XDG_CACHE_HOME/gpt.cu/products, or else $HOME/.cache/gpt.cu/products; empty: neither is set.
std::string user_products();

// The file's content, for choices_in(); empty if it can't be read.
std::string read_products(const std::filesystem::path& file);
ProductChoices choices_in(const std::string& content);

// Adds choices that were timed to the file. Never fails; returns one line that says whether they were kept.
std::string keep_products(const std::filesystem::path& file, const ProductChoices& timed);
