#include "gpt/room.h"

#include "gpt/option_values.h"
#include "runtime/monitor/options.h"

namespace {

void add_monitor_options(CLI::App& app, Options& o) {
  add(app, "--monitor-every", o.of<MonitorInterval>().seconds, in_range(0., 1e6),
      "seconds between looks at devices and hosts, for monitor.jsonl in --out, which name what stands out; 0: none");
}

}  // namespace

extern const Room monitor_room;
const Room monitor_room = {.name = "monitor", .add_options = add_monitor_options};
