// How often devices and hosts are looked at (runtime/monitor/monitor.h).
#pragma once

struct MonitorInterval {
  double seconds = 10;  // 0: never
};
