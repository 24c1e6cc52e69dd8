// JSON: nlohmann's library (https://json.nlohmann.me), of which what everybody uses is compiled once, in json.cpp: the
// compiler would need longer for it than for most of the files that use it. Headers that only name JSON include
// nlohmann/json_fwd.hpp.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

extern template class nlohmann::basic_json<>;
extern template class nlohmann::basic_json<nlohmann::ordered_map>;
extern template nlohmann::json nlohmann::json::parse(const std::string&, nlohmann::json::parser_callback_t, bool, bool);
extern template nlohmann::json nlohmann::json::parse(std::string&, nlohmann::json::parser_callback_t, bool, bool);
extern template nlohmann::json nlohmann::json::parse(std::string&&, nlohmann::json::parser_callback_t, bool, bool);
