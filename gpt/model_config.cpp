#include "gpt/model_config.h"

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/files.h"
#include "gpt/base/json_fields.h"

nlohmann::ordered_json config_of(const ModelShape& shape, const std::filesystem::path& base) {
  nlohmann::ordered_json config = {
      {"architectures", nlohmann::ordered_json::array({"GPT2LMHeadModel"})},
      {"model_type", "gpt2"},
      {"n_layer", shape.layers},
      {"n_head", shape.heads},
      {"n_embd", shape.channels},
      {"n_positions", shape.positions},
      {"n_ctx", shape.positions},
      {"n_inner", nullptr},
      {"vocab_size", shape.vocabulary},
      {"activation_function", "gelu_new"},
      {"layer_norm_epsilon", 1e-5},
      {"scale_attn_weights", true},
      {"tie_word_embeddings", true},
      {"resid_pdrop", 0.0},
      {"embd_pdrop", 0.0},
      {"attn_pdrop", 0.0},
      {"torch_dtype", "float32"}};
  // The id of <|endoftext|> in GPT-2's tokenizer, null for other vocabularies: without the key transformers assumes
  // GPT-2's id.
  nlohmann::ordered_json end_of_text;
  if (shape.vocabulary == 50257) end_of_text = 50256;
  config["bos_token_id"] = end_of_text;
  config["eos_token_id"] = end_of_text;
  if (base.empty() || !std::filesystem::exists(base / "config.json")) return config;
  const nlohmann::json before = read_json_object(base / "config.json");
  for (const auto& [key, value] : before.items())
    if (!config.contains(key) || key.ends_with("_pdrop") || key.ends_with("_token_id")) config[key] = value;
  config.erase("dtype");  // torch_dtype by its newer name
  return config;
}

ModelShape load_shape(const std::filesystem::path& folder) {
  std::filesystem::path path = folder / "config.json";
  if (!std::filesystem::exists(path)) fail(folder, ": holds no config.json: give a folder in Hugging Face's GPT-2 format");
  nlohmann::json config = read_json_object(path);
  auto require = [&](const char* key, const nlohmann::json& wanted, const nlohmann::json& when_missing) {
    nlohmann::json found = config.value(key, when_missing);
    if (found != wanted)
      fail(path, ": ", key, " is ", shown(found), ", this trainer supports only ", wanted.dump(), ": give such weights");
  };
  require("model_type", "gpt2", nullptr);
  for (const char* same : {"gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh"})  // gelu_new by other names
    if (config.value("activation_function", nlohmann::json()) == same) config["activation_function"] = "gelu_new";
  require("activation_function", "gelu_new", "gelu_new");
  require("layer_norm_epsilon", 1e-5, 1e-5);
  require("scale_attn_weights", true, true);
  require("scale_attn_by_inverse_layer_idx", false, false);
  require("add_cross_attention", false, false);
  require("tie_word_embeddings", true, true);

  JsonFields fields(path, config, ": correct it");
  auto extent = [&](const char* key, int when_missing, int most) {
    return fields.has(key) ? fields.count(key, most) : when_missing;
  };
  ModelShape shape = {extent("n_layer", 12, ModelShape::most_layers),
                      extent("n_head", 12, ModelShape::most_channels),
                      extent("n_embd", 768, ModelShape::most_channels),
                      extent("vocab_size", 50257, ModelShape::most_vocabulary),
                      extent("n_positions", 1024, ModelShape::most_positions)};
  if (!config.value("n_inner", nlohmann::json()).is_null()) require("n_inner", 4 * shape.channels, nullptr);
  return shape;
}
