#include "gpt/room_options.h"
#include "runtime/reports/options.h"

Room reports_room = {
    .name = "reports",
    .add_options = [](CLI::App& app, Options& o) {
      ReportOptions& report = o.of<ReportOptions>();
      add(app, "--price", report.price, in_range(0., 1e6), "price of a rank's device for an hour, in any currency, for the bill");
      app.add_flag("--profile", report.profile, "print a table of time, bytes and FLOPs per kernel at the end");
      app.add_option("--ceilings", report.ceilings, "file with dev/ceilings.cu's measurements of this device, for the table of --profile and "
                     "the time of --plan")->type_name("FILE");
    },
};
