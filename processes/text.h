// Texts that processes print and compare: the name of this host, and checksums.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

std::string host_name();

// The number in 16 hexadecimal digits.
std::string hexadecimal(uint64_t number);

// The 64-bit XXH3 checksum (https://xxhash.com), hexadecimal. It is not secure against attackers.
std::string xxh3(std::string_view bytes);
