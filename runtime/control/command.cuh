// Ranks are watched from when their options are known.
#pragma once

#include "gpt/command.h"
#include "gpt/options.h"
#include "runtime/control/options.h"

inline void control_before_groups(Options& o, Ranks& ranks) { ranks.watch(15, o.of<ControlOptions>().collective_timeout); }
