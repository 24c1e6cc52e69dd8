// Any text as config.json and as trainer.json: either refused, or a shape within its limits, which is written and read
// back, and the number of a step and perhaps the state of a guard. Input: the file.
#include "test/fuzz/fuzz.h"

#include <nlohmann/json.hpp>

#include "gpt/base/json_fields.h"
#include "gpt/checkpoint.h"
#include "runtime/guard/guard.h"

namespace {

int depth_of(const nlohmann::json& value) {
  if (!value.is_structured()) return 0;
  int deepest = 0;
  for (const auto& element : value) deepest = std::max(deepest, depth_of(element));
  return 1 + deepest;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(data, data + size);
  ModelShape shape;
  std::filesystem::path folder = fuzzed("config.json", text).parent_path();
  if (done(size, [&] { shape = load_shape(folder); })) {
    for (int extent : {shape.layers, shape.heads, shape.channels, shape.vocabulary, shape.positions})
      require(extent >= 1 && extent <= ModelShape::most_positions, "a size of ", extent);
    fuzzed("config.json", config_of(shape).dump());
    require(load_shape(folder) == shape, "another shape is read back");
  }
  fuzzed("trainer.json", text);
  nlohmann::json trainer;
  if (done(size, [&] { trainer = load_trainer(folder); }))
    require(trainer["step"].is_number_unsigned() && depth_of(trainer) <= 32, "nested ", depth_of(trainer), " deep");
  if (trainer.contains("guard")) done(size, [&] { Guard(GuardOptions()).restore(JsonFields("trainer.json", trainer, "").object("guard"), 9); });
  return 0;
}
