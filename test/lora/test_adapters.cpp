// LoRA in the whole program: training, checkpoints, text, and what is said where something is missing.
#include <doctest/doctest.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "extensions/lora/merged_model.h"
#include "gpt/base/files.h"
#include "gpt/model_config.h"
#include "test/fake_parameters.h"
#include "test/workplace.h"

namespace {

// A place with a model in base/step_00000004.
struct WithBase : Workplace {
  WithBase() { output("$TEXT --layers 2 --out base --steps 4 --lr 1e-2"); }
};
const std::string lora = "$TEXT --layers 2 --init base/step_00000004 --lr 1e-2 --lora-rank 4 ";

}  // namespace

TEST_CASE("LoRA: the first loss is the base's; checkpoints as peft's; resume goes on with the same bits; text") {
  const WithBase shell;
  const std::string text = shell.output(lora + "--lora-alpha 64 --steps 6 --checkpoint-every 3 --val text --val-every 2 --val-batches 1 --out run");
  CHECK(contains(text, "rank 4, alpha 64, attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj: 2,048 parameters, and nothing else is trained"));
  shell.output("$TEXT --layers 2 --init base/step_00000004 --steps 1 --out full");
  const std::vector<Json> run = shell.metrics("run");
  CHECK(run[0]["loss"] == shell.metrics("full")[0]["loss"]);
  for (const char* file : {"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "trainer.json"})
    CHECK(shell.exists("run/step_00000006/" + std::string(file)));
  for (const char* file : {"model.safetensors", "config.json"}) CHECK(!shell.exists("run/step_00000006/" + std::string(file)));
  const Json config = Json::parse(shell.content("run/step_00000006/adapter_config.json"));
  CHECK(config["r"] == 4);
  CHECK(config["fan_in_fan_out"] == true);
  CHECK(config["base_model_name_or_path"] == (shell / "base/step_00000004").string());

  const Json plan = Json::parse(shell.output(lora + "--plan --json --out run --overwrite")), made = Json::parse(shell.content("run/plan.json"));
  for (const char* part : {"memory", "host"}) CHECK(plan["ranks"][0][part] == made["ranks"][0][part]);  // to the byte

  // From the middle, and from a checkpoint that says all there is to know; on other ranks.
  shell.output("cp -r run other && rm -r other/step_00000006");
  shell.output("$TEXT --layers 2 --lr 1e-2 --steps 6 --checkpoint-every 3 --val text --val-every 2 --val-batches 1 --out other --resume");
  CHECK(shell.same_metrics("run", "other"));
  shell.output("cmp run/step_00000006/adapter_model.safetensors other/step_00000006/adapter_model.safetensors");

  const std::string generate = "$GPT --generate --prompt 'line 1' --sample-len 40 --temperature 1 --seed 2 ";
  const std::string adapted = shell.output(generate + "--resume run"), plain = shell.output(generate + "--init base/step_00000004");
  CHECK(adapted != plain);
  shell.output("$GPT --resume run --merge merged");
  CHECK(shell.output(generate + "--init merged") == adapted);
  shell.output("$TEXT --layers 2 --init merged --steps 1 --out whole");  // trains on, as any model
  shell.refuses("$GPT --resume run --merge merged", 1, {"merged: exists already: name a new folder"});
  // What an interrupted attempt has left does not count; a slash at the end does not matter.
  shell.output("mkdir again.partial && touch again.partial/junk again.partial/vocab.json && $GPT --resume run --merge again/ && ls again > names");
  CHECK(shell.content("names") == "config.json\nmodel.safetensors\n");
  shell.refuses("ulimit -f 8; $GPT --resume run --merge small", 1, {"small.partial/model.safetensors"});  // blocks of 512 bytes
  CHECK(shell.output("ls | grep small; true") == "");
  shell.refuses("$GPT --out run --init base/step_00000004 --lora-rank 4 --merge new", 2, {"--merge: name the run", "--resume"});
  shell.refuses("$GPT --resume run --merge new --dtype bf16", 2, {"--dtype", "beside --merge", "fp32"});
  shell.refuses("$GPT --resume full --merge new", 2, {"--merge: there are no adapters in", "--resume"});
}

TEST_CASE("LoRA: a base that has moved, is another, or is not there; adapters in the place of a model") {
  const WithBase shell;
  shell.output(lora + "--steps 2 --out run");
  shell.output("$TEXT --layers 2 --out strange --steps 4 --seed 9");
  const std::string generate = "$GPT --generate --sample-len 3 --resume run ";
  shell.refuses(generate + "--init strange/step_00000004", 1, {"holds other weights than those beside which the adapters in", "--init"});
  shell.output("mv base moved");
  shell.refuses(generate, 1, {"the model beside which its adapters were trained is not in", "base/step_00000004", "--init"});
  shell.output(generate + "--init moved/step_00000004");
  shell.refuses("$GPT --generate --init run/step_00000002", 1, {"holds adapters, not a model", "--resume", "--merge"});
  shell.refuses(lora + "--resume --out run --init moved/step_00000004 --lora-rank 5", 2, {"--lora-rank", "rank 4, alpha 8", "leave"});
  shell.refuses("$TEXT --layers 2 --out moved --resume --lora-rank 4 --steps 9", 2, {"--lora-rank", "holds a whole model, and no adapters", "--init"});
  shell.refuses("$TEXT --layers 2 --init run/step_00000002 --lora-rank 4", 1, {"holds adapters, not a model"});
}

TEST_CASE("LoRA: options, and mistakes in them") {
  const Workplace shell;
  const std::string plan = "$TINY --plan --lora-rank 4 ";
  CHECK(contains(shell.output(plan + "--lora-targets up,qkv"), "rank 4, alpha 8, attn.c_attn, mlp.c_fc: 576 parameters"));
  CHECK(contains(shell.output(plan + "--lora-alpha 3"), "rank 4, alpha 3, attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj: 1,024 parameters"));
  shell.refuses("$TEXT --lora-rank 4", 2, {"--lora-rank", "--init"});
  shell.refuses("$TEXT --lora-alpha 4", 2, {"--lora-alpha 4 is for --lora-rank"});
  CHECK(contains(shell.output(plan + "--lora-targets down --lora-targets up,qkv"), "attn.c_attn, mlp.c_fc: 576 parameters"));
  shell.refuses("$TEXT --lora-rank 4 --lora-targets qkv,head", 2, {"--lora-targets: 'head' is unknown: give one of {qkv,projection,up,down}"});
  shell.refuses("$TEXT --lora-rank 4 --calibrate file", 2, {"--calibrate file beside --lora-rank is not there yet"});
  shell.refuses("$TEXT --lora-rank -1", 2, {"--lora-rank: '-1' is no whole number"});
}

TEST_CASE("--merge writes what config.json says beside the shape, and the tokenizer; no folder is overwritten") {
  const TemporaryFolder folder;
  const ModelShape shape = {1, 2, 4, 10, 3};
  FakeParameters parameters(shape, [](const CheckpointBlock& block, State, float* to) { std::fill_n(to, block.count, 0.5f); });
  put(folder / "base/config.json", R"({"eos_token_id": [2, 3], "n_layer": 99, "dtype": "bfloat16", "torch_dtype": "bfloat16"})");
  put(folder / "base/vocab.json", "a vocabulary");
  write_model(parameters, folder / "base", folder / "merged/");
  const auto config = nlohmann::json::parse(content_of(folder / "merged/config.json"));
  CHECK(config["eos_token_id"] == nlohmann::json{2, 3});
  CHECK(config["n_layer"] == shape.layers);
  CHECK(config["torch_dtype"] == "float32");
  CHECK(!config.contains("dtype"));
  CHECK(load_shape(folder / "merged") == shape);
  CHECK(content_of(folder / "merged/vocab.json") == "a vocabulary");
  CHECK(is_line_with(error_of([&] { write_model(parameters, folder / "base", folder / "merged"); }), "merged: exists already", "name a new folder"));
}
