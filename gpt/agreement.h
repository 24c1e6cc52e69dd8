// Checks that the program, the options and the data are the same on all ranks before they work together. If a rank
// differs, the job ends with a message that shows the difference, not with a wrong result hours later.
#pragma once

#include <string>
#include <vector>

#include "gpt/ranks.h"

// The checksum of the running program's file, which is different for two builds.
std::string program_checksum();

// Collective. Fails on every rank if the texts `mine` are not the same on all ranks. They may hold any byte except NUL.
// The error message names the thing by `name`, shows the difference, and ends with `cure`. leeway: as Ranks::all_gather has it
void require_agreement(Ranks& ranks, const std::string& name, const std::vector<std::string>& mine,
                       const std::string& cure, double leeway = 1);
