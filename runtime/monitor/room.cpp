#include "gpt/room_options.h"
#include "runtime/monitor/options.h"

Room monitor_room = {
    .name = "monitor",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--monitor-every", o.of<MonitorInterval>().seconds, in_range(0., 1e6),
          "seconds between readings of devices and hosts, for monitor.jsonl in --out; outliers are reported; 0: none");
    },
};
