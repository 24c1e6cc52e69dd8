#include "gpt/room_options.h"

namespace {

// Checks the value of --offload: kinds of data, with commas.
const CLI::Validator offloaded([](const std::string& text) {
  for (const std::string& word : words_of(text))
    if (word != "optimizer" && word != "activations" && word != "gradients" && text != "none")
      return excerpt(text) + " is unknown: give optimizer, activations, gradients, several with commas, or none";
  return std::string();
}, "LIST");

}  // namespace

Room offload_room = {
    .name = "offload",
    .add_options = [](CLI::App& app, Options& o) {
      add(app, "--offload", o.offload, offloaded, "data that is kept in the host's pinned memory, and copied to the device when it is used: "
          "optimizer (masters, moments), activations (inputs of blocks, with --recompute block), gradients (with optimizer, and on "
          "several ranks --zero 3), several with commas, or none");
    },
    .batch_problem = [](const StepOptions& o) -> std::string {
      const bool gradients = o.offloads("gradients");
      if (gradients && (!o.offloads("optimizer") || (o.mesh.dp * o.mesh.cp > 1 && o.zero < 3)))
        return concat("--offload ", o.offload, " moves the pieces of gradients that --zero 3 keeps, in the same windows as masters "
                      "and moments: ", o.offloads("optimizer") ? "add --zero 3" : "add optimizer to the list");
      if (gradients && (o.mesh.tp > 1 || o.mesh.pp > 1 || o.lora.is_on() || o.compresses_gradients()))
        return concat("--offload ", o.offload, " with --tp, --pp, --compress or --lora-rank: sums of gradients over these ranks, or "
                      "of codes, are made on the device, and those of adapters are few; leave gradients out of the list");
      if (gradients && o.delay)
        return concat("--offload ", o.offload, " with --delay 1: gradients that wait for the next update lie on the device; leave "
                      "gradients out of the list, or --delay out");
      if (o.offloads("activations") && o.recompute != "block")
        return concat("--offload ", o.offload, " moves the inputs of blocks, and --recompute ", o.recompute, " keeps other "
                      "activations on the device: add --recompute block");
      return "";
    },
};
