#include "gpt/room_options.h"

Room fp8_room = {
    .name = "fp8",
    .add_options = [](CLI::App& app, Options& o) {
      app.add_flag("--fp8", o.fp8, "with --dtype bf16: products of blocks in eight bits (e4m3), faster for wide blocks on "
                   "cards from 8.9 on; --plan says whether it pays");
      add(app, "--fp8-gradients", o.fp8_gradients, one_of({"e5m2", "e4m3"}),
          "e5m2 (range) or e4m3 (precision): the eight bits of gradients");
      add(app, "--fp8-scale", o.fp8_scale, one_of({"tensor", "tiles"}),
          "tensor, or tiles: a scale for each 128 numbers (weights: 128 x 128), which one large number spoils less; on Hopper alone");
      add(app, "--fp8-keep", o.fp8_keep, in_range(0, ModelShape::most_layers / 2), "first and as many last blocks that stay in bf16");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.dtype != "bf16", {"--fp8"}, "multiplies what is kept in bf16: it needs --dtype bf16");
      refuse(o.generate, {"--fp8"}, "beside --generate: it is for training, and texts are drawn in --dtype; leave it out");
      refuse(!o.fp8, {"--fp8-gradients", "--fp8-scale", "--fp8-keep"}, "is for --fp8: add that, or leave it out");
    },
    .add_arithmetic = [](nlohmann::json& arithmetic, const Options& o) {
      arithmetic.update({{"fp8", o.fp8 ? concat(o.fp8_gradients, ", keep ", o.fp8_keep, o.fp8_scale == "tiles" ? ", tiles" : "") : "off"}});
    },
};
