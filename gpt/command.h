// What a room does instead of training, as --generate does. A folder of extensions/ or runtime/ with a file command.cuh has a
// function in it, called NAME_command, which takes the options and returns the work that they ask for, or null;
// dev/make/rooms.sh writes the list.
#pragma once

struct Job;
struct Options;

// Returns the exit code.
using JobWork = int (*)(Job&);

// Null: the options ask for training.
JobWork command_of(const Options& options);
