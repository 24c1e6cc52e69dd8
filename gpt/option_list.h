// Every option: its name, its value's range, its group and what --help says of it.
#pragma once

#include <CLI/CLI.hpp>

#include "gpt/options.h"

void add_options(CLI::App& app, Options& options);
// Part of add_options(): those of hooks alone.
void add_hook_options(CLI::App& app, HookOptions& hooks);
