// --compress-where hosts needs the ranks that share a host, which are known when all ranks have connected.
#pragma once

#include "gpt/command.h"
#include "gpt/options.h"
#include "gpt/ranks.h"

// Sets how many neighbouring ranks share a host.
inline void compression_before_groups(Options& o, Ranks& ranks) {
  if (o.compress_where != "hosts" || o.generate) return;
  const int tp = o.mesh.tp, N = o.mesh.cp * o.mesh.dp;
  int inside = 1;
  while (inside < N && ranks.host(inside * tp) == ranks.host(0)) ++inside;
  if (inside == N) usage_error("--compress-where hosts: all data-parallel ranks share ", ranks.host(0), ": leave compression out");
  for (int rank = 0; rank < o.mesh.ranks(); ++rank) {
    const int place = rank / tp % N, first = rank - place % inside * tp;  // the first of its host
    const bool ends_here = place % inside || place == 0 || ranks.host(rank) != ranks.host(rank - tp);
    if (N % inside || ranks.host(rank) != ranks.host(first) || !ends_here)
      usage_error("--compress-where hosts: rank ", rank, " is on ", ranks.host(rank), ", and hosts need ", inside, " neighbouring "
                  "data-parallel ranks each: choose other hosts, or leave it out");
  }
  o.ranks_per_host = inside * tp;
}
