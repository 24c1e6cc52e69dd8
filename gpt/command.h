// The work of rooms before or instead of training. A folder of extensions/ or runtime/ with a file command.cuh has one or more
// of these functions in it, called after the room; dev/make/rooms.sh writes the lists.
#pragma once

// bool NAME_without_devices(Options& options, Ranks& ranks): does the work that needs no device, on all ranks. Returns
// whether that is all that the options ask for.
bool is_done_without_devices(struct Options& options, class Ranks& ranks);

// void NAME_before_mesh(Options& options, Ranks& ranks, int device): the ranks have taken their devices, and the options
// are not complete.
void before_mesh(Options& options, Ranks& ranks, int device);

// void NAME_before_groups(Options& options, Ranks& ranks): the options are complete, and no group of ranks is connected.
void before_groups(Options& options, Ranks& ranks);

// JobWork NAME_command(const Options& options): the work that the options ask for; null: none. It returns the exit code.
using JobWork = int (*)(struct Job&);
JobWork command_of(const Options& options);  // null: they ask for training
