// train_gpt as people run it: from a shell, in a folder of its own, judged by exit code, output and files.
//
// Commands are shell text; $GPT is the program (of the build folder $GPT_BUILD, a minute at most), $TINY the options of
// a model whose step takes milliseconds, $REFERENCE the folder test/reference.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <sys/wait.h>

#include "runtime/safetensors.h"
#include "test/temporary_folder.h"

namespace {

using Json = nlohmann::json;
using Texts = std::vector<std::string>;

struct Result {
  int code;
  std::string out, error;
};

// Text that a model can learn something from; every window of it is different.
std::string some_text(size_t bytes) {
  std::string text;
  for (size_t i = 0; text.size() < bytes; ++i) text += "line " + std::to_string(i * i) + (i % 3 ? " and " : ".\n");
  return text.substr(0, bytes);
}

// llm.c's format: 256 int32 (magic, version, count), then uint16 tokens.
std::string shard(const std::vector<uint16_t>& tokens, int32_t count, int32_t magic = 20240520) {
  int32_t header[256] = {magic, 1, count};
  return std::string(reinterpret_cast<const char*>(header), sizeof header) +
         std::string(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(uint16_t));
}

// A folder with data, in which commands run.
class Workplace {
 public:
  Workplace() {
    const char* build = std::getenv("GPT_BUILD");
    const auto program = std::filesystem::absolute(std::filesystem::path(build ? build : "build/cpu") / "train_gpt");
    REQUIRE_MESSAGE(std::filesystem::exists(program), program, " is missing: run make first");
    setenv("PROGRAM", program.c_str(), 1);
    setenv("GPT", ("timeout -s KILL 60 " + program.string()).c_str(), 1);
    setenv("TINY", "--layers 1 --heads 1 --channels 16 --seq-len 16 --micro-batch 2 --steps 2", 1);
    setenv("REFERENCE", std::filesystem::absolute("test/reference").c_str(), 1);
    setenv("OMP_WAIT_POLICY", "passive", 1);  // spinning threads would make a shared machine slow
    put(folder_ / "text", some_text(5000));
  }

  Result operator()(const std::string& command) const {
    const std::string all = "cd '" + folder_.path().string() + "' && { " + command + "\n} >.stdout 2>.stderr";
    const int status = std::system(all.c_str());
    return {WEXITSTATUS(status), content_of(folder_ / ".stdout"), content_of(folder_ / ".stderr")};
  }

  // The command must succeed, in silence on stderr.
  std::string output(const std::string& command) const {
    CAPTURE(command);
    const Result result = (*this)(command);
    CHECK(result.code == 0);
    CHECK(result.error == "");
    return result.out;
  }

  // The command must fail with this code and one line that holds all the parts.
  void refuses(const std::string& command, int code, const Texts& parts) const {
    CAPTURE(command);
    const Result result = (*this)(command);
    CAPTURE(result.error);
    CHECK(result.code == code);
    CHECK(std::count(result.error.begin(), result.error.end(), '\n') == 1);
    CHECK(result.error.starts_with("train_gpt: "));
    for (const std::string& part : parts) CHECK_MESSAGE(contains(result.error, part), part);
  }

  std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }
  bool exists(const std::string& name) const { return std::filesystem::exists(folder_ / name); }
  std::string content(const std::string& name) const { return content_of(folder_ / name); }

  // The lines of OUT/metrics.jsonl, without what depends on the clock.
  std::vector<Json> metrics(const std::string& out) const {
    std::vector<Json> lines;
    std::ifstream file(folder_ / out / "metrics.jsonl");
    for (std::string line; std::getline(file, line);) {
      Json fields = Json::parse(line);
      for (const char* clock : {"step_ms", "tokens_per_s", "flops_per_s", "mfu"}) fields.erase(clock);
      lines.push_back(fields);
    }
    return lines;
  }

 private:
  TemporaryFolder folder_;
};

struct Mistake {
  std::string arguments;
  Texts parts;
};

// Damages a safetensors file: its header, given as JSON, may be changed at will.
void change_header(const std::filesystem::path& path, const std::function<void(Json&)>& change) {
  const std::string file = content_of(path);
  uint64_t length;
  std::memcpy(&length, file.data(), sizeof length);
  Json header = Json::parse(file.substr(sizeof length, length));
  change(header);
  const std::string text = header.dump();
  length = text.size();
  put(path, std::string(reinterpret_cast<const char*>(&length), sizeof length) + text +
                file.substr(sizeof length + std::string_view(file).substr(sizeof length).find("}}") + 2));
}

}  // namespace

TEST_CASE("mistakes in the options: exit code 2, one line that names option and value, nothing written") {
  Workplace shell;
  const std::vector<Mistake> mistakes = {
      {"--frobnicate", {"--frobnicate", "--help"}},
      {"stray", {"stray", "--help"}},
      {"--heads", {"--heads", "missing"}},
      {"--heads 3", {"--heads 3", "--channels 16", "divisor"}},
      {"--channels 8", {"--channels 8", "head size 8", "16 to 128"}},
      {"--positions 8", {"--seq-len 16", "8 positions", "--positions"}},
      {"--model gpt5", {"--model", "gpt5", "gpt3-125m"}},
      {"--vocab 1", {"--vocab", "'1'", "from 2"}},
      {"--layers 9999999", {"--layers", "9999999"}},
      {"--micro-batch 1048576 --seq-len 65536", {"--micro-batch 1048576", "--seq-len 65536", "lower"}},
      {"--micro-batch 2.5", {"--micro-batch", "2.5"}},
      {"--global-batch 3", {"--global-batch 3", "--micro-batch 2"}},
      {"--steps 0", {"--steps", "'0'"}},
      {"--steps -1", {"--steps", "'-1'"}},
      {"--steps ''", {"--steps", "''"}},
      {"--steps 1e3", {"--steps", "'1e3'"}},
      {"--steps 99999999999999999999", {"--steps", "99999999999999999999"}},
      {"--warmup 3", {"--warmup 3", "--steps 2"}},
      {"--warmup -1", {"--warmup", "'-1'"}},
      {"--schedule linear", {"--schedule", "linear", "cosine, constant or wsd"}},
      {"--lr nan", {"--lr", "nan"}},
      {"--lr inf", {"--lr", "inf"}},
      {"--lr -1e-3", {"--lr", "-1e-3"}},
      {"--min-lr 1", {"--min-lr 1", "--lr 0.0003"}},
      {"--weight-decay nan", {"--weight-decay", "nan"}},
      {"--beta2 1", {"--beta2", "'1'"}},
      {"--eps 0", {"--eps", "'0'"}},
      {"--grad-clip -1", {"--grad-clip", "-1"}},
      {"--seed -1", {"--seed", "'-1'"}},
      {"--seed $'a\nb'", {"--seed", "?"}},
      {"--keep 0", {"--keep", "'0'"}},
      {"--val-every 2", {"--val-every 2", "--val FILES"}},
      {"--dtype fp16", {"--dtype", "fp16", "not there yet", "fp32 or bf16"}},
      {"--dtype int8", {"--dtype", "int8", "fp32 or bf16"}},
      {"--stochastic-rounding", {"--stochastic-rounding", "--dtype bf16"}},
      {"--recompute all", {"--recompute", "all", "none,gelu,block"}},
      {"--sample-len -1", {"--sample-len", "'-1'"}},
      {"--temperature nan", {"--temperature", "nan"}},
      {"--init $REFERENCE/tiny", {"--layers 1", "reference/tiny", "have 2", "leave out --layers"}},
      {"--val '' --checkpoint-every 1 --out ''", {"--out ''"}},
      {"--tp 2", {"--tp 2", "tensor parallelism", "not there yet"}},
      {"--tp", {"--tp", "not there yet"}},
      {"--pp 2", {"--pp 2", "pipeline parallelism", "not there yet"}},
      {"--pp-schedule 1f1b", {"--pp-schedule 1f1b", "not there yet"}},
      {"--cp 2", {"--cp 2", "context parallelism", "not there yet"}},
      {"--zero 1", {"--zero 1", "ZeRO", "not there yet"}},
      {"--offload optimizer", {"--offload optimizer", "not there yet"}},
      {"--reduce-dtype bf16", {"--reduce-dtype bf16", "not there yet"}},
      {"--fp8", {"--fp8", "not there yet"}},
      {"--plan", {"--plan", "not there yet"}},
      {"--share-gpu", {"--share-gpu", "not there yet"}},
  };
  for (const Mistake& mistake : mistakes) {
    shell.refuses("$GPT --train text --out run $TINY " + mistake.arguments, 2, mistake.parts);
    CHECK(!shell.exists("run"));
  }
  shell.refuses("$GPT", 2, {"--train is missing"});
  shell.refuses("$GPT --train text --init $REFERENCE/tiny --seq-len 33", 2, {"--seq-len 33", "32 positions"});
  shell.refuses("$GPT --train text --init $REFERENCE/tiny --model gpt2", 2, {"--model gpt2", "2 layers"});
  CHECK(contains(shell.output("$GPT --help"), "--stochastic-rounding"));
  // Values that ask for nothing are let pass; of an option given twice the last counts.
  const std::string neutral = "--tp 1 --pp 1 --cp 1 --zero 0 --offload none --reduce-dtype fp32 --steps 1";
  CHECK(contains(shell.output("$GPT --train text --out '' $TINY " + neutral), "step     1/1"));
}

TEST_CASE("data that cannot be used: exit code 1, one line, nothing written") {
  Workplace shell;
  const std::vector<uint16_t> tokens(1000, 7);
  std::vector<uint16_t> late = tokens;
  late[20] = 60000;
  put(shell / "good.bin", shard(tokens, 1000));
  put(shell / "magic.bin", shard(tokens, 1000, 5));
  put(shell / "count.bin", shard(tokens, 2000));
  put(shell / "negative.bin", shard(tokens, -1));
  put(shell / "trailing.bin", shard(tokens, 900));
  put(shell / "header.bin", shard(tokens, 1000).substr(0, 100));
  put(shell / "few.bin", shard({1, 2, 3}, 3));
  put(shell / "none.bin", shard({}, 0));
  put(shell / "empty.bin", "");
  put(shell / "empty", "");
  put(shell / "token.bin", shard(late, 1000));
  const std::vector<Mistake> mistakes = {
      {"--train nowhere.bin", {"nowhere.bin", "matches no regular file"}},
      {"--train 'no*.txt'", {"no*.txt", "quote globs"}},
      {"--train .", {"'.'", "matches no regular file"}},
      {"--train ''", {"''", "matches no regular file"}},
      {"--train \"$(printf 'two\\nlines')\"", {"two?lines"}},
      {"--train magic.bin", {"magic.bin", "starts with 5", "20240520"}},
      {"--train count.bin", {"count.bin", "2000 tokens", "cut short"}},
      {"--train negative.bin", {"negative.bin", "-1 tokens"}},
      {"--train trailing.bin", {"trailing.bin", "900 tokens", "foreign bytes"}},
      {"--train header.bin", {"header.bin", "100 bytes", "header of 1024"}},
      {"--train few.bin", {"few.bin", "3 tokens", "needs 17"}},
      {"--train none.bin", {"none.bin", "no tokens"}},
      {"--train empty.bin", {"empty.bin", "0 bytes"}},
      {"--train empty", {"empty", "no tokens"}},
      {"--train token.bin", {"token.bin", "token 20", "60000", "50256", "--vocab 60001"}},
      {"--train text --vocab 100", {"text", "--vocab"}},
      {"--train text good.bin", {"text", "good.bin", "one kind"}},
      {"--train text --global-batch 5000", {"--train", "5000 tokens", "312 samples", "5000 are needed"}},
      {"--train text --val text --val-batches 900", {"--val", "1800 are needed", "--val-batches"}},
  };
  for (const Mistake& mistake : mistakes) {
    shell.refuses("$GPT --out run $TINY " + mistake.arguments, 1, mistake.parts);
    CHECK((!shell.exists("run") || std::filesystem::is_empty(shell / "run")));
  }
  shell.refuses("$GPT --train text --val good.bin $TINY", 2, {"--train and --val", "one kind"});
  late[20] = 7, late[900] = 60000;  // met after some steps: these are in the metrics
  put(shell / "later.bin", shard(late, 1000));
  shell.refuses("$GPT --train later.bin $TINY --steps 99 --out run", 1, {"later.bin", "token 900", "60000"});
  CHECK(shell.metrics("run").size() == 28);
  put(shell / "with a space/some text.txt", some_text(500));
  shell.output("$GPT --train 'with a space/some*' $TINY --out 'with a space/run'");
  CHECK(shell.exists("with a space/run/step_00000002/trainer.json"));
}

TEST_CASE("a damaged --init folder is refused before anything is written") {
  Workplace shell;
  shell.output("$GPT --train text $TINY --steps 1 --out run && mv run/step_00000001 good");
  const std::string tensor = "transformer.h.0.mlp.c_fc.weight", file = "bad/model.safetensors";
  auto entry = [&](Json& header) -> Json& { return header[tensor]; };
  const std::vector<std::pair<std::function<void()>, Texts>> damages = {
      {[&] { std::filesystem::remove_all(shell / "bad"); }, {"bad", "config.json"}},
      {[&] { std::filesystem::remove(shell / file); }, {"bad", "no model.safetensors"}},
      {[&] { put(shell / file, "short"); }, {file, "5 bytes"}},
      {[&] { put(shell / file, std::string(100, '\x7f')); }, {file, "header"}},
      {[&] { put(shell / file, shell.content(file).substr(0, 5000)); }, {file, "outside the file"}},
      {[&] { put(shell / file, std::string("\x40\x1f\0\0\0\0\0\0", 8) + std::string(8000, '[')); }, {file, "JSON"}},
      {[&] { put(shell / file, std::string("\2\0\0\0\0\0\0\0{}", 10)); }, {"bad", "missing"}},
      {[&] { change_header(shell / file, [&](Json& h) { h = Json::array(); }); }, {file, "JSON object"}},
      {[&] { change_header(shell / file, [&](Json& h) { entry(h)["data_offsets"] = {0, 4096}; }); }, {file, "overlaps"}},
      {[&] { change_header(shell / file, [&](Json& h) { entry(h)["data_offsets"][1] = 99999; }); }, {file, tensor}},
      {[&] { change_header(shell / file, [&](Json& h) { entry(h)["data_offsets"][0] = -1; }); }, {file, tensor}},
      {[&] { change_header(shell / file, [&](Json& h) { entry(h)["shape"] = {64, 16}; }); }, {file, "(64, 16)", "(16, 64)"}},
      {[&] { change_header(shell / file, [&](Json& h) { entry(h)["shape"] = {1ull << 62, 16}; }); }, {file, "too large"}},
      {[&] { change_header(shell / file, [&](Json& h) { entry(h)["dtype"] = "F33"; }); }, {file, "F33"}},
      {[&] { change_header(shell / file, [&](Json& h) { h["other"] = entry(h), h.erase(tensor); }); }, {"bad", "is missing"}},
      {[&] { put(shell / "bad/config.json", "{"); }, {"config.json", "JSON"}},
      {[&] { put(shell / "bad/config.json", "{\"model_type\": \"llama\"}"); }, {"config.json", "llama", "gpt2"}},
      {[&] { put(shell / "bad/config.json", R"({"model_type": "gpt2", "n_layer": 500000000})"); }, {"n_layer", "500000000"}},
      {[&] { put(shell / "bad/config.json", R"({"model_type": "gpt2", "n_embd": 1536})"); }, {"missing"}},
  };
  for (const auto& [damage, parts] : damages) {
    std::filesystem::remove_all(shell / "bad");
    std::filesystem::copy(shell / "good", shell / "bad");
    damage();
    shell.refuses("$GPT --train text --init bad --seq-len 16 --out out", 1, parts);
    CHECK(!shell.exists("out"));
  }
}

TEST_CASE("folders that cannot be written, memory that is not there, several ranks: exit code 1, one line") {
  Workplace shell;
  for (const char* out : {"text", "text/below", "/dev/full", "/proc/gpt"})
    shell.refuses("$GPT --train text $TINY --out " + std::string(out), 1, {"--out", out, "choose another --out"});
  CHECK(shell.content("text") == some_text(5000));
  // Files of at most 10 KiB stand in for a full disk: the metrics fit, the checkpoint does not.
  const std::string small = "trap '' XFSZ; ulimit -f 20; ";
  shell.refuses(small + "$GPT --train text $TINY --out run", 1, {"run/step_00000002", "reserve", "free space"});
  CHECK(shell.output("ls run") == "metrics.jsonl\n");
  CHECK(contains(shell.output("$GPT --train text $TINY --out run --resume"), "no checkpoint in run, starting afresh"));
  shell.refuses(small + "$GPT --train text $TINY --steps 999 --out log", 1, {"log/metrics.jsonl", "free space"});
  CHECK(shell.content("log/metrics.jsonl").ends_with("}\n"));

  put(shell / "data", std::string(400000, 'x'));
  shell.refuses("$GPT --train data --model gpt3-13b --micro-batch 64 --out big", 1,
                {"not enough memory", "GiB needed (weights ", "gradients ", "optimizer ", "activations ", "--micro-batch"});
  CHECK(!shell.exists("big"));
  for (std::string variable : {"OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"})
    shell.refuses(variable + "=2 $GPT --train text $TINY --out ranks", 1, {"2 ranks", variable, "not there yet"});
  CHECK(!shell.exists("ranks"));
}

TEST_CASE("run folders: a run is never lost by mistake") {
  Workplace shell;
  const std::string train = "$GPT --train text $TINY --steps 4 --checkpoint-every 2 --out run ";
  put(shell / "run/notes.txt", "mine");
  shell.output(train);
  const std::string metrics = shell.content("run/metrics.jsonl");
  const std::vector<std::pair<int, Mistake>> mistakes = {
      {1, {"", {"run", "holds a run", "--resume", "--overwrite"}}},
      {1, {"--resume --overwrite", {"--resume", "--overwrite", "one of them"}}},
      {1, {"--resume nowhere", {"--resume nowhere", "no checkpoint"}}},
      {1, {"--resume nowhere --out ''", {"--resume nowhere", "no checkpoint"}}},
      {1, {"--overwrite --resume run/step_00000003", {"run/step_00000003", "no checkpoint"}}},
      {2, {"--overwrite --heads 3", {"--heads 3"}}},
      {1, {"--overwrite --init nowhere", {"nowhere"}}},
      {1, {"--overwrite --train nowhere", {"nowhere"}}},
      {2, {"--resume --lr 1e-2", {"lr", "0.01", "0.0003", "step_00000004", "same options"}}},
      {2, {"--resume --dtype bf16", {"dtype", "bf16", "fp32"}}},
      {2, {"--resume --micro-batch 1 --global-batch 2", {"micro_batch is 1 and was 2"}}},
      {2, {"--resume --shuffle", {"shuffle"}}},
      {2, {"--resume --seed 1", {"seed is 1 and was 1337"}}},
      {2, {"--resume --channels 32", {"--channels 32", "have 16"}}},
      {2, {"--resume run/step_00000002 --grad-clip 0", {"grad_clip is 0.0 and was 1.0"}}},
      {1, {"--resume --train text run/notes.txt --vocab 256 --seq-len 9999", {"9999"}}},
  };
  for (const auto& [code, mistake] : mistakes) shell.refuses(train + mistake.arguments, code, mistake.parts);
  CHECK(shell.output("ls run") == "metrics.jsonl\nnotes.txt\nstep_00000002\nstep_00000004\n");
  CHECK(shell.content("run/metrics.jsonl") == metrics);
  CHECK(contains(shell.output(train + "--resume"), "finished"));
  CHECK(contains(shell.output(train + "--resume run/step_00000002 --steps 2"), "finished"));
  CHECK(shell.content("run/metrics.jsonl") == metrics);

  shell.output(train + "--resume run/step_00000002 --steps 6");
  CHECK(shell.output("ls run") == "metrics.jsonl\nnotes.txt\nstep_00000002\nstep_00000004\nstep_00000004.abandoned\n"
                                  "step_00000006\n");
  shell.output(train + "--init run/step_00000006 --overwrite");
  CHECK(shell.output("ls run") == "metrics.jsonl\nnotes.txt\nstep_00000002\nstep_00000004\nstep_00000004.abandoned\n");
  CHECK(shell.metrics("run").size() == 4);

  shell.output("$GPT --train text $TINY --checkpoint-every 1 --steps 7 --keep 2 --keep-every 3 --out kept");
  CHECK(shell.output("ls kept") == "metrics.jsonl\nstep_00000003\nstep_00000006\nstep_00000007\n");
  // The default sequence length is the model's; gpt3's 2048 is found again.
  const std::string custom = "$GPT --train text --model gpt3-125m --layers 1 --heads 1 --channels 16 --micro-batch 1 --out gpt3 ";
  shell.output(custom + "--steps 1");
  shell.output(custom + "--steps 2 --resume");
}

TEST_CASE("stop and resume gives the same bits") {
  Workplace shell;
  put(shell / "little", some_text(300));  // 18 samples: epochs end inside steps
  for (std::string options : {"--train text", "--train little --shuffle", "--train text --shuffle --dtype bf16",
                              "--train little --dtype bf16 --stochastic-rounding"}) {
    const std::string train = "rm -rf b && $GPT $TINY --steps 10 --global-batch 4 --val text --val-every 2 --val-batches 2 "
                              "--warmup 2 --checkpoint-every 5 --out b --overwrite " + options;
    shell.output("rm -rf a; " + train + " && mv b a");
    // As a kill after step 7 leaves it: a checkpoint half written, a line half written.
    shell.output("cp -r a b && rm -r b/step_00000010 && cp -r b/step_00000005 b/step_00000009.partial && "
                 "head -c 1900 a/metrics.jsonl >b/metrics.jsonl");
    shell.output(train.substr(train.find("$GPT"), train.find("--overwrite") - train.find("$GPT")) + options + " --resume");
    CAPTURE(options);
    CHECK(shell.metrics("a").size() == 15);
    CHECK(shell.metrics("a") == shell.metrics("b"));
    CHECK(shell.output("ls b") == "metrics.jsonl\nstep_00000005\nstep_00000010\n");
    shell.output("cmp a/step_00000010/model.safetensors b/step_00000010/model.safetensors && "
                 "cmp a/step_00000010/optimizer.safetensors b/step_00000010/optimizer.safetensors");
  }
}

TEST_CASE("a run killed at any moment continues with the same bits") {
  Workplace shell;
  const std::string options = " --train text $TINY --schedule constant --checkpoint-every 3 --keep 1 --steps ";
  for (std::string signal : {"INT", "KILL"}) {
    shell("rm -rf a b; $PROGRAM --out b" + options + "99999 & pid=$!; while kill -0 $pid && ! ls -d b/step_00000009*; "
          "do sleep 0.01; done; kill -" + signal + " $pid; wait $pid");
    const size_t steps = std::stoul(shell.output("ls b | grep '^step_[0-9]*$' | tail -1").substr(5)) + 4;
    shell.output("$GPT --out b --resume" + options + std::to_string(steps));
    shell.output("$GPT --out a" + options + std::to_string(steps));
    CHECK(shell.metrics("a") == shell.metrics("b"));
    CHECK(shell.metrics("a").size() == steps);
  }
}
