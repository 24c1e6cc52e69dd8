#include "gpt/room_options.h"
#include "runtime/cache/disk_cache.h"
#include "runtime/cache/product_file.h"

namespace {

struct CacheOptions {
  std::string folder;  // empty: data is not kept
  double gigabytes = 64;
  std::string products = user_products();
};

}  // namespace

Room cache_room = {
    .name = "cache",
    .add_options = [](CLI::App& app, Options& o) {
      CacheOptions& cache = o.of<CacheOptions>();
      app.add_option("--cache", cache.folder, "folder on a local disk that keeps data that was read from slow storage")
          ->type_name("DIR");
      add(app, "--cache-size", cache.gigabytes, in_range(0.01, 1e6), "largest size of the cache, GB; a twentieth of the disk stays free");
      app.add_option("--products", cache.products, "on GPUs: file for the fastest algorithms of matrix products, so that the next "
                     "start times nothing and has the same bits; none: time nothing")->type_name("FILE");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.of<CacheOptions>().folder.empty(), {"--cache-size"}, "is for --cache DIR: add that, or leave it out");
    },
    .data_cache = [](const Options& o) -> std::unique_ptr<DataCache> {
      const CacheOptions& cache = o.of<CacheOptions>();
      if (cache.folder.empty() || o.plan) return nullptr;
      return std::make_unique<DiskCache>(cache.folder, size_t(1e9 * cache.gigabytes));
    },
    .kept_choices = [](const Options& o) -> std::unique_ptr<KeptChoices> {
      return std::make_unique<ProductFile>(o.of<CacheOptions>().products);
    },
};
