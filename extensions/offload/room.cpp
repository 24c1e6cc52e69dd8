#include "gpt/room_options.h"

namespace {

// A list with commas of what --offload can move.
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
      add(app, "--offload", o.offload, offloaded, "what lives in the host's pinned memory, and comes to the device for its use: "
          "optimizer (masters, moments), activations (inputs of blocks, with --recompute block), gradients (with optimizer, and on "
          "several ranks --zero 3), several with commas, or none");
    },
};
