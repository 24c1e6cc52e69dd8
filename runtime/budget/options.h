// How long a process may train (runtime/budget/hook.cuh).
#pragma once

struct TimeLimit {
  double hours = 0;  // after which it stops and saves; 0: no limit
};
