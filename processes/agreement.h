// What all ranks must have alike before they work together: the program, the options, the data. A rank that differs is
// refused with the difference, not with a wrong result hours later.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "processes/control.h"

// Of the running program's file, so that two builds are told apart.
std::string program_checksum();

// What is called `name`: a text, or several, of any bytes but NUL; `cure` follows the difference. Fails alike on every
// rank.
void require_agreement(Control& control, const std::string& name, const std::string& mine, const std::string& cure);
void require_agreement(Control& control, const std::string& name, const std::vector<std::string>& mine,
                       const std::string& cure);
