// Every option of the core: its name, its value's range, its group and its text in --help. Then those of all rooms
// (gpt/room.h).
#pragma once

#include <CLI/CLI.hpp>

#include "gpt/options.h"

void add_options(CLI::App& app, Options& options);

// The room whose option it is: its name is the option's group. Null: it is the core's.
const Room* room_of(const CLI::Option& option);
