#include "extensions/fp8/options.h"
#include "gpt/room_options.h"

namespace {

// Rows and columns of products in eight bits lie on multiples of 16 bytes.
std::string fp8_problem(const StepOptions& o) {
  if (!o.fp8) return "";
  const int channels = o.shape.channels / o.mesh.tp;
  if (2 * o.fp8_keep >= o.shape.layers)
    return concat("--fp8: --fp8-keep ", o.fp8_keep, " keeps all of the model's ", o.shape.layers,
                  " blocks in bf16: lower it, or leave --fp8 out");
  if (channels % 16 != 0)
    return concat("--fp8: ", channels, " channels", o.mesh.tp > 1 ? " of a --tp rank" : "", " are no multiple of 16: choose ",
                  "--channels ", (channels / 16 + 1) * 16 * o.mesh.tp, " of a fresh model, or leave --fp8 out");
  if (o.rows() % 16 != 0)
    return concat("--fp8: the ", o.rows(), " rows of a micro-batch, --micro-batch ", o.micro_batch, " of --seq-len ", o.seq_len,
                  o.mesh.cp > 1 ? " over --cp " + std::to_string(o.mesh.cp) : "", ", are no multiple of 16: choose another "
                  "--micro-batch or --seq-len");
  // Tensor parallelism sends rows in pieces (cut_rows), and multiplies each.
  if (o.fp8_scale == "tiles" && o.tp_pieces > 1 && o.rows() % (16 * o.mesh.tp * o.tp_pieces) != 0)
    return concat("--fp8-scale tiles: the ", o.rows(), " rows of a micro-batch are cut into --tp-pieces ", o.tp_pieces,
                  " whose rows are no multiple of 16 for each of the --tp ranks: choose another number, or --fp8-scale tensor");
  return "";
}

}  // namespace

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
      refuse(o.fp8_scale == "tiles", {"--sample-every", "--sample-seconds"}, "beside --fp8-scale tiles is not there yet, as texts have "
             "any number of rows: draw them from checkpoints with --generate");
      refuse(!o.fp8, {"--fp8-gradients", "--fp8-scale", "--fp8-keep"}, "is for --fp8: add that, or leave it out");
    },
    .hand_down = [](RoomOptions& model, const StepOptions& o) {
      model.of<Fp8Options>() = {.is_on = o.fp8,
                                .gradients = o.fp8_gradients == "e4m3" ? Fp8Format::e4m3 : Fp8Format::e5m2,
                                .kept = o.fp8_keep,
                                .tiles = o.fp8_scale == "tiles"};
    },
    .shape_problem = fp8_problem,
    .add_arithmetic = [](nlohmann::json& arithmetic, const Options& o) {
      arithmetic.update({{"fp8", o.fp8 ? concat(o.fp8_gradients, ", keep ", o.fp8_keep, o.fp8_scale == "tiles" ? ", tiles" : "") : "off"}});
    },
};
