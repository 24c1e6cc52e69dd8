// What all ranks must have alike before they work together: the program, the options, the data. A rank that differs is
// refused with the difference, not with a wrong result hours later.
#pragma once

#include <cstddef>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "parallel/control.h"

// FNV-1a over 64-bit words: not for security.
std::string checksum(const void* data, size_t bytes);

// Of the running program's file, so that two builds are told apart.
std::string program_checksum();

// `mine`: an object; `cure` follows the difference. Fails alike on every rank.
void require_agreement(Control& control, const nlohmann::json& mine, const std::string& cure);
