// --check-ranks names the network that NCCL has found, if links between hosts are slow.
#pragma once

#include "gpt/command.h"
#include "gpt/options.h"
#include "runtime/checks/options.h"
#include "runtime/checks/rank_check.cuh"

inline void checks_before_mesh(Options& o, Ranks& ranks, int) {
  if (o.of<CheckOptions>().ranks && ranks.rank() == 0) note_network();
}
