#include "gpt/room_options.h"

Room cache_room = {
    .name = "cache",
    .add_options = [](CLI::App& app, Options& o) {
      app.add_option("--cache", o.cache, "folder on a local disk that keeps data that was read from slow storage")
          ->type_name("DIR");
      add(app, "--cache-size", o.cache_size, in_range(0.01, 1e6), "largest size of the cache, GB; a twentieth of the disk stays free");
      app.add_option("--products", o.products, "on GPUs: file for the fastest algorithms of matrix products, so that the next "
                     "start times nothing and has the same bits; none: time nothing")->type_name("FILE");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.cache.empty(), {"--cache-size"}, "is for --cache DIR: add that, or leave it out");
    },
};
