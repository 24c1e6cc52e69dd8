// Names that processes print and compare: of this host, and of bytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

std::string host_name();

// 16 digits.
std::string hexadecimal(uint64_t number);

// XXH3, 64 bits (https://xxhash.com), hexadecimal. Not for security.
std::string xxh3(std::string_view bytes);
