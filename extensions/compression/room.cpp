#include "extensions/compression/low_rank.h"
#include "extensions/compression/options.h"
#include "gpt/room_options.h"

namespace {

const CLI::Validator compressed([](const std::string& text) {
  if (text.starts_with("powersgd:")) return in_range(1, most_low_rank)(text.substr(9));
  return text == "none" || code_bits(text) ? std::string() : excerpt(text) + " is unknown: give one of {none,int8,int4,powersgd:R}";
}, "{none,int8,int4,powersgd:R}");

}  // namespace

Room compression_room = {
    .name = "compression",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--compress", o.compress, compressed,
          "compress gradients that travel to other ranks, for slow links: to codes of 8 or 4 bits, or each matrix to factors of rank R, 1 to 64 "
          "(with --zero 0 and 1); the residual is added to the next gradients");
      add(app, "--compress-weights", o.compress_weights, one_of({"none", "int8"}),
          "gather weights in eight bits (--zero 1 to 3); updates are made to exact copies");
      add(app, "--compress-where", o.compress_where, one_of({"all", "hosts"}),
          "hosts: compress only messages between hosts, none inside a host");
    },
    .refuse_together = [](const Refusals& refuse, const Options& o) {
      refuse(o.compresses_gradients() && o.reduce_dtype == "bf16", {"--compress"}, "beside --reduce-dtype bf16: both say how gradients travel; leave one of them out");
      refuse(!o.compresses(), {"--compress-where"}, "is for --compress or --compress-weights: add one of them, or leave it out");
      refuse(o.low_rank() > 0, {"--compress-where"}, "beside --compress " + o.compress + ": factors are added up over all data-parallel ranks; leave one of them out");
      if (o.compress_weights == "none") return;
      refuse(o.zero == 0 && !o.chooses_mesh, {"--compress-weights"}, "is for weights that ranks gather: add --zero 1, 2 or 3, or leave it out");
      refuse(o.stochastic_rounding, {"--compress-weights"}, "beside --stochastic-rounding: its weights have no masters; leave one of them out");
      refuse(o.offloads("optimizer"), {"--compress-weights"}, "beside --offload " + o.offload + ": it reads the masters, which are not on the device; leave one of them out");
      refuse(o.lora.is_on(), {"--compress-weights"}, "beside --lora-rank is not there yet: leave one of them out");
    },
    .hand_down = [](RoomOptions& model, const StepOptions& o) {
      model.of<CompressionOptions>() = {o.compressed_bits(), o.low_rank(), o.compress_weights != "none"};
    },
    .batch_problem = [](const StepOptions& o) {
      return !o.low_rank() || o.zero < 2 ? "" : concat("--compress ", o.compress, " with --zero ", o.zero, ": factors tell all ranks the "
          "sums of a whole matrix, once a step; choose --zero 0 or 1, or --compress int8");
    },
    .add_arithmetic = [](nlohmann::json& arithmetic, const Options& o) {
      arithmetic.update({{"compress", o.compresses_gradients() ? o.compress : "off"},
          {"compress_weights", o.compress_weights == "none" ? "off" : o.compress_weights},
          {"compress_where", o.compresses() ? o.compress_where : "off"}});
    },
};
