// Every option of the core: its name, its value's range, its group and what --help says of it. Then those of all rooms
// (gpt/room.h).
#pragma once

#include <CLI/CLI.hpp>

#include "gpt/options.h"

void add_options(CLI::App& app, Options& options);
