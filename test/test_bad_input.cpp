// What clumsy users and broken files do to train_gpt: one clear line, an exit code, nothing half-written.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <regex>
#include <sstream>

#include "gpt/options.h"
#include "test/workplace.h"

namespace {

// Damages a safetensors file: its header, given as JSON, may be changed at will.
void change_header(const std::filesystem::path& path, const std::function<void(Json&)>& change) {
  const std::string file = content_of(path);
  uint64_t length;
  std::memcpy(&length, file.data(), sizeof length);
  Json header = Json::parse(file.substr(sizeof length, length));
  change(header);
  const std::string text = header.dump(), data = file.substr(sizeof length + length);
  length = text.size();
  put(path, std::string(reinterpret_cast<const char*>(&length), sizeof length) + text + data);
}

}  // namespace

TEST_CASE("--help has the core's options on a screen, --help ROOM those of a room, and --help all everything that there ever was") {
  Workplace shell;
  const auto has = [](const std::string& help, const std::string& option) { return std::regex_search(help, std::regex("\n +" + option + "\\b(?!-)")); };
  const std::string core = shell.output("$GPT --help"), fp8 = shell.output("$GPT --help fp8"), guard = shell.output("$GPT --layers 2 --help guard"), all = shell.output("$GPT --help all");
  CHECK(std::count(core.begin(), core.end(), '\n') <= 72);
  CHECK(has(core, "--train"));
  CHECK(!has(core, "--fp8"));
  CHECK(contains(core, "--help ROOM"));
  CHECK(contains(core, ", guard, hooks, "));
  CHECK(has(fp8, "--fp8-keep"));
  CHECK(!has(fp8, "--train"));
  CHECK(has(guard, "--on-spike"));
  CHECK(!has(guard, "--fp8"));
  shell.refuses("$GPT --help gaurd", 2, {"--help 'gaurd'", "no room", "guard, hooks"});
  std::istringstream options(
      "after-checkpoint attention beta1 beta2 budget cache cache-size calibrate ceilings channels check-mesh check-ranks "
      "check-sync checkpoint-every checkpoint-seconds cluster collective-timeout compress compress-weights compress-where "
      "cooldown cp cp-method ctas days delay dtype eps fp8 fp8-gradients fp8-keep fp8-scale generate global-batch grad-clip "
      "heads hook-timeout init islands json keep keep-best keep-every layers local-steps log-every logit-chunks lora-alpha "
      "lora-rank lora-targets loss-scale loss-scale-window lr max-hours max-rollbacks max-skips merge mesh micro-batch min-lr "
      "model moments monitor-every no-cache offload on-end on-spike out outer-delay outer-dtype outer-lr outer-momentum "
      "overwrite patience plan positions pp pp-chunks pp-schedule price products profile prompt ranks recipe recompute "
      "reduce-dtype resume row sample-every sample-len sample-seconds samples schedule seed seq-len shard-size share-gpu "
      "shares shuffle sm-margin spike-window spike-z steps stochastic-rounding stop-when temperature top-k top-p tp tp-pieces "
      "trace trace-tensors train train-minutes val val-batches val-every vocab warmup weight-decay zero ");
  int count = 0;
  for (std::string option; options >> option; ++count) {
    CAPTURE(option);
    CHECK(has(all, "--" + option));
  }
  CHECK(count == 122);
}

TEST_CASE("mistakes in the options: exit code 2, one line that names option and value, nothing written") {
  Workplace shell;
  auto refuses = [&](const std::string& arguments, const Texts& parts) {
    shell.refuses("$TEXT --out run " + arguments, 2, parts);
    CHECK(!shell.exists("run"));
  };
  refuses("--frobnicate 3", {"train_gpt: '--frobnicate' is neither an option nor the value of one; train_gpt --help all", "generation, guard, hooks,"});
  refuses("stray other", {"train_gpt: 'stray' is neither an option nor"});
  refuses("\"$(printf 'two\\nlines')\"", {"train_gpt: 'two?lines' is neither"});
  refuses("--heads", {"--heads", "missing"});
  refuses("--heads 3", {"--heads 3", "--channels 16", "divisor"});
  refuses("--channels 8", {"--channels 8", "head size 8", "16 to 128"});
  refuses("--positions 8", {"--seq-len 16", "8 positions", "--positions"});
  refuses("--model gpt5", {"--model", "gpt5", "gpt3-125m"});
  // What a launch can hold: a grid's third dimension, and the rows of column_sum.
  refuses("--micro-batch 65536", {"--micro-batch: '65536' is no whole number from 1 to 65535"});
  refuses("--plan --micro-batch 65536", {"--micro-batch: '65536'"});
  refuses("--generate --samples 65536", {"--samples: '65536' is no whole number from 1 to 65535"});
  for (const char* plan : {"", "--plan "})
    refuses(plan + std::string("--micro-batch 65535 --seq-len 65"), {"--micro-batch 65535", "--seq-len 65", "more than 4194240", "lower"});
  refuses("--global-batch 3", {"--global-batch 3", "--micro-batch 2: choose 4, or lower --micro-batch"});
  refuses("--warmup 3", {"--warmup 3", "--steps 2: lower it, or train longer"});
  refuses("--schedule linear", {"--schedule", "linear", "cosine, constant or wsd"});
  refuses("--schedule wsd", {"--schedule wsd", "--cooldown N"});
  refuses("--cooldown 1", {"--cooldown 1 belongs to --schedule wsd, not cosine: leave it out"});
  for (const char* option : {"--init", "--resume", "--ceilings", "--calibrate", "--products", "--trace", "--trace-tensors"})
    refuses(std::string(option) + " ''", {option, "'' names nothing", "leave the option out"});
  refuses("--init= --overwrite", {"--init= ", "no value"});
  refuses("--prompt --shuffle", {"--prompt", "no value, but by --shuffle", "--prompt=--shuffle"});
  refuses("--trace file --trace-tensors file", {"--trace", "--trace-tensors", "'file'"});
  for (const char* seconds : {"-1", "nan", "often", "1e7"})
    refuses("--monitor-every " + std::string(seconds), {"--monitor-every: '" + std::string(seconds) + "' is no number from 0 to 1e+06"});
  refuses("--min-lr 1", {"--min-lr 1", "--lr 0.0003: lower it"});
  refuses("--val-every 2", {"--val-every 2", "--val FILES"});
  refuses("--dtype int8", {"--dtype: 'int8' is unknown: give one of {fp32,bf16,fp16}; train_gpt --help all lists all options"});
  refuses("--stochastic-rounding", {"--stochastic-rounding", "--dtype bf16"});
  refuses("--loss-scale 8", {"--loss-scale", "--dtype fp16"});
  refuses("--dtype fp16 --stochastic-rounding", {"--stochastic-rounding", "--dtype bf16"});
  refuses("--dtype fp16 --reduce-dtype bf16", {"--reduce-dtype bf16", "--dtype bf16"});
  const std::string eight = "--dtype bf16 --layers 3 --fp8 ";
  refuses("--layers 3 --fp8", {"--fp8 multiplies what is kept in bf16: it needs --dtype bf16"});
  refuses("--layers 3 --dtype fp16 --fp8", {"--fp8", "needs --dtype bf16"});
  refuses(eight + "--generate", {"--fp8 beside --generate", "leave it out"});
  refuses(eight + "--fp8-gradients e3m4", {"--fp8-gradients: 'e3m4' is unknown: give one of {e5m2,e4m3}"});
  refuses("--fp8-gradients e4m3", {"--fp8-gradients e4m3 is for --fp8: add that"});
  refuses("--fp8-keep 2", {"--fp8-keep 2 is for --fp8: add that"});
  refuses("--fp8-scale tiles", {"--fp8-scale tiles is for --fp8: add that"});
  refuses("--plan --cluster 8xl40s " + eight + "--fp8-scale tiles", {"--fp8-scale tiles: L40S does not multiply tiles", "leave it out"});
  refuses("--plan --cluster 8xh100 " + eight + "--channels 32 --fp8-scale tiles --tp 2 --tp-pieces 3", {"--fp8-scale tiles: the 32 rows", "--tp-pieces 3", "no multiple of 16"});
  refuses(eight + "--fp8-scale tiles --sample-every 5", {"--sample-every 5 beside --fp8-scale tiles is not there yet", "--generate"});
  refuses(eight + "--fp8-keep -1", {"--fp8-keep: '-1' is no whole number from 0 to 500"});
  refuses(eight + "--fp8-keep 2", {"--fp8: --fp8-keep 2 keeps all of the model's 3 blocks in bf16: lower it"});
  refuses(eight + "--channels 24", {"--fp8: 24 channels are no multiple of 16: choose --channels 32 of a fresh model"});
  refuses(eight + "--seq-len 15", {"--fp8: the 30 rows of a micro-batch, --micro-batch 2 of --seq-len 15, are no multiple of 16"});
  refuses("--plan --cluster 8xa100-80 " + eight, {"--fp8: A100-80 has no products in eight bits: leave it out"});
  refuses("--moments fp16", {"--moments: 'fp16' is unknown: give one of {fp32,bf16}"});
  refuses("--delay 2", {"--delay", "2", "0", "1"});
  refuses("--delay 1 --zero 2", {"--delay 1 with --zero 2", "choose --zero 0 or 1"});
  refuses("--delay 1 --dtype fp16", {"--delay 1 beside --dtype fp16", "loss scale", "--dtype bf16"});
  refuses("--delay 1 --generate", {"--delay 1 beside --generate", "leave it out"});
  refuses("--offload weights", {"--offload: 'weights' is unknown: give optimizer, activations, gradients, several with commas, or none"});
  refuses("--offload gradients", {"--offload gradients", "windows as masters and moments", "add optimizer"});
  refuses("--offload gradients,optimizer --lora-rank 4 --init base", {"--offload gradients,optimizer with --tp, --pp, --compress or --lora-rank", "leave gradients out"});
  refuses("--offload gradients,optimizer --delay 1", {"--offload gradients,optimizer with --delay 1", "lie on the device"});
  refuses("--offload optimizer,,activations", {"--offload: 'optimizer,,activations' is unknown"});
  refuses("--offload activations", {"--offload activations moves the inputs of blocks", "add --recompute block"});
  refuses("--offload optimizer --generate", {"--offload optimizer beside --generate", "leave it out"});
  refuses("--compress int2", {"--compress: 'int2' is unknown: give one of {none,int8,int4,powersgd:R}"});
  for (const std::string rank : {"0", "65", "2.5", "", "-1", "04", "two"})
    refuses("--compress powersgd:" + rank, {"--compress: '" + rank + "' ", rank == "04" ? "octal" : "is no whole number from 1 to 64"});
  refuses("--compress powersgd", {"--compress: 'powersgd' is unknown: give one of {none,int8,int4,powersgd:R}"});
  for (const char* zero : {"2", "3"})
    refuses(std::string("--compress powersgd:2 --zero ") + zero, {"--compress powersgd:2 with --zero ", "choose --zero 0 or 1, or --compress int8"});
  refuses("--compress powersgd:2 --compress-where hosts", {"--compress-where hosts beside --compress powersgd:2", "leave one of them out"});
  refuses("--compress powersgd:2 --reduce-dtype bf16 --dtype bf16", {"--compress powersgd:2 beside --reduce-dtype bf16", "leave one of them out"});
  refuses("--compress int8 --reduce-dtype bf16 --dtype bf16", {"--compress int8 beside --reduce-dtype bf16", "leave one of them out"});
  refuses("--compress int8 --generate", {"--compress int8 beside --generate", "leave it out"});
  refuses("--compress-where hosts", {"--compress-where hosts is for --compress or --compress-weights"});
  refuses("--compress-weights int4", {"--compress-weights: 'int4' is unknown: give one of {none,int8}"});
  refuses("--compress-weights int8", {"--compress-weights int8 is for weights that ranks gather", "--zero 1, 2 or 3"});
  refuses("--compress-weights int8 --zero 1 --dtype bf16 --stochastic-rounding", {"--compress-weights int8 beside --stochastic-rounding"});
  refuses("--compress-weights int8 --zero 1 --offload optimizer", {"--compress-weights int8 beside --offload optimizer", "not on the device"});
  refuses("--compress-weights int8 --zero 1 --lora-rank 2 --init base", {"--compress-weights int8 beside --lora-rank"});
  refuses("--recompute all", {"--recompute: 'all' is unknown: give one of {none,gelu,block}"});
  refuses("--attention flash", {"--attention", "flash", "auto,cudnn,own"});
  refuses("--attention hopper", {"--attention hopper", "leave the option out"});  // fp32
  refuses("--attention cudnn", {"--attention cudnn", "cuDNN", "leave the option out"});  // fp32, on a GPU
  refuses("--checkpoint-every 1 --out ''", {"--out ''", "name a folder"});
  refuses("--init $REFERENCE/tiny", {"--layers 1", "reference/tiny", "have 2", "leave out --layers"});
  for (std::string number :
       {"--vocab 1", "--layers 9999999", "--micro-batch 2.5", "--steps 0", "--steps -1", "--steps ",
        "--steps 1e3", "--steps 99999999999999999999", "--warmup -1", "--lr nan", "--lr inf", "--lr -1e-3",
        "--lr ", "--eps 0", "--weight-decay nan", "--beta2 1", "--grad-clip -1", "--seed -1", "--keep 0",
        "--val-batches x", "--sample-len -1", "--sample-seconds -1", "--sample-seconds nan", "--temperature nan", "--top-k -1", "--top-p 0", "--top-p 1.1", "--samples 0"}) {
    const size_t space = number.find(' ');
    const std::string option = number.substr(0, space), value = number.substr(space + 1);
    refuses(option + " '" + value + "'", {option + ": '" + value + "' is no", "number from"});
  }
  for (const char* option : {"--trace", "--trace-tensors"}) {  // nothing is lost by a slip of the hand
    const std::string before = shell.content("text");
    refuses(std::string(option) + " text", {option, "'text'", "choose another"});
    CHECK(shell.content("text") == before);
    const std::string run = "$TEXT --out '' " + std::string(option) + " of" + option;
    shell.output(run + " && " + run);
  }
  refuses("--tp", {"--tp", "missing"});
  refuses("--tp 0", {"--tp", "'0'", "from 1 to 1024"});
  refuses("--tp 2", {"--tp 2 does not divide the number of ranks, 1: choose 1", "another number of ranks"});
  refuses("--tp-pieces 4", {"--tp-pieces 4 needs --tp"});
  refuses("--check-mesh", {"--check-mesh compares several ranks with one, and this is one: leave it out"});
  refuses("--check-mesh --generate --resume", {"--check-mesh compares steps of training"});
  refuses("--ctas 8", {"--ctas is for collectives, and with one rank there are none"});
  refuses("--sm-margin 0", {"--sm-margin is for collectives"});
  refuses("--sm-margin 200", {"--sm-margin"});
  refuses("--pp 0", {"--pp", "'0'", "from 1 to 1000"});
  refuses("--pp 2", {"--pp 2 does not divide the number of ranks, 1: choose 1", "another number of ranks"});
  refuses("--pp-schedule gpipe", {"--pp-schedule gpipe needs --pp", "one stage"});
  refuses("--cp 0", {"--cp", "'0'", "from 1 to 1024"});
  refuses("--cp 2", {"--cp 2 does not divide the number of ranks, 1: choose 1", "another number of ranks"});
  refuses("--cp-method ulysses", {"--cp-method ulysses needs --cp"});
  refuses("--pp-chunks 2", {"--pp-chunks 2 needs --pp", "one stage"});
  refuses("--steps 010", {"--steps", "'010' begins with 0", "write 10"});
  refuses("--no-cache", {"--no-cache needs --generate, --sample-every or --sample-seconds"});

  refuses("--ranks 4", {"--ranks 4 is for --plan"});
  refuses("--json", {"--json is for --plan"});
  refuses("--cluster 4x4090 --generate", {"--cluster 4x4090 beside --generate", "leave one of them out"});
  for (const char* other : {"--plan", "--generate", "--resume", "--trace file"})
    refuses(std::string("--calibrate m.json ") + other, {other, " beside --calibrate", "leave one of them out"});
  shell.refuses("$GPT --calibrate m.json", 2, {"--train is missing"});
  shell.refuses("$TEXT --calibrate nowhere/m.json", 1, {"nowhere/m.json.partial: cannot open"});
  CHECK(!contains(shell("$TEXT --calibrate nowhere/m.json").out, "step "));  // before it measures
  refuses("--calibrate text", {"--calibrate 'text' is there already", "--overwrite"});
  shell.refuses("$GPT --plan --cluster h200", 1, {"--cluster 'h200': no such file", "runtime/planner/clusters: give a file's path, or one of: ", "4x4090, ", ", 8xh200, "});
  shell.refuses("$GPT --plan --cluster text", 1, {"text: "});
  refuses("--plan --cluster 4x4090 --ranks 8", {"--ranks 8: the cluster 4x4090 has 4 devices: give that many or fewer"});
  refuses("--plan --cluster 4x4090 --ceilings marks.json", {"--ceilings 'marks.json'", "--cluster", "leave one of them out"});
  refuses("--mesh best", {"--mesh", "best", "auto"});
  for (const char* option : {"--tp 2", "--cp 2", "--pp 2", "--zero 1", "--micro-batch 2", "--recompute block"})
    refuses(std::string("--plan --cluster 4x4090 --mesh auto ") + option, {" beside --mesh auto: the search chooses that", "leave one of them out"});
  refuses("--days 3", {"--days 3 is for --plan"});
  refuses("--plan --days 3 --tp 2", {"--tp 2 beside --days: the search chooses that", "leave one of them out"});
  for (const char* option : {"--ranks 2", "--train-minutes 2", "--mesh auto", "--ceilings text"})
    shell.refuses(std::string("$GPT --plan --days 3 ") + option, 2, {"--", "leave one of them out"});
  shell.output(R"(echo '{"name": "mine", "device": "H100", "devices_per_host": 1, "hosts": 1}' > mine.json)");
  shell.refuses("$GPT --plan --budget 30 --cluster mine.json", 2, {"--budget 30: the cluster mine has no price", "price_per_device_hour"});
  refuses("--plan --days 0", {"--days", "'0'", "from 0.001 to"});
  refuses("--plan --checkpoint-seconds -1 --cluster 4x4090", {"--checkpoint-seconds", "'-1'"});
  refuses("--plan --ranks 0", {"--ranks", "'0'", "from 1 to 16384"});
  refuses("--plan --ranks 4 --tp 3", {"--tp 3 does not divide the number of ranks, 4: choose 1, 2 or 4"});
  refuses("--plan --ranks 2 --tp 2", {"--tp 2 does not divide the model's 1 heads: choose 1"});
  refuses("--plan --generate", {"--generate beside --plan", "leave one of them out"});
  refuses("--plan --resume", {"--resume beside --plan", "leave one of them out"});

  shell.refuses("$GPT", 2, {"--train is missing"});
  shell.refuses("$GPT --train text --init $REFERENCE/tiny --seq-len 33", 2, {"--seq-len 33", "32 positions"});
  shell.refuses("$GPT --train text --init $REFERENCE/tiny --model gpt2", 2, {"--model gpt2", "2 layers"});
  // Values that ask for nothing are let pass; of an option given twice the last counts.
  const std::string neutral = "--tp 1 --pp 1 --cp 1 --zero 3 --reduce-dtype fp32 --steps 1";
  CHECK(contains(shell.output("$TEXT --out '' " + neutral), "step     1/1"));
}

// What follows needs no ranks: their number is given.
TEST_CASE("meshes that cannot be: one line that says what to choose") {
  const auto message = [](const std::string& arguments, int ranks) -> std::string {
    std::vector<std::string> words = {"train_gpt", "--train", "text"};
    std::istringstream text(arguments);
    for (std::string word; text >> word;) words.push_back(word);
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    try {
      Options o = parse_options(int(pointers.size()), pointers.data()).value();
      complete_options(o, ranks);
      o.shape = shape_of(o, 256);
      refuse(shape_problem(o));
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  const auto refuses = [&](const std::string& arguments, int ranks, const Texts& parts) {
    const std::string said = message(arguments, ranks);
    CAPTURE(arguments);
    CAPTURE(said);
    CHECK(!contains(said, "\n"));
    for (const std::string& part : parts) CHECK_MESSAGE(contains(said, part), part);
  };
  refuses("--pp 4", 6, {"--pp 4 does not divide the number of ranks, 6: choose 1, 2, 3 or 6, or another number of ranks"});
  refuses("--pp 4 --tp 2", 12, {"--pp 4 does not divide the number of ranks over --tp, 6: choose 1, 2, 3 or 6"});
  refuses("--pp 4 --tp 2 --cp 3", 18, {"--pp 4 does not divide the number of ranks over --tp and --cp, 3: choose 1 or 3"});
  refuses("--cp 4", 6, {"--cp 4 does not divide the number of ranks, 6: choose 1, 2, 3 or 6"});
  refuses("--cp 4 --seq-len 30", 4, {"--cp 4 cuts samples into 8 equal parts", "--seq-len 30: choose --seq-len 24"});
  const std::string eight = "--dtype bf16 --fp8 --layers 4 --heads 4 --channels 96 --micro-batch 1 ";
  refuses(eight + "--tp 4", 4, {"--fp8: 24 channels of a --tp rank are no multiple of 16: choose --channels 128"});
  refuses(eight + "--cp 4 --seq-len 72", 4, {"--fp8: the 18 rows of a micro-batch, --micro-batch 1 of --seq-len 72 over --cp 4, are no"});
  refuses("--cp 4 --seq-len 6", 4, {"8 equal parts", "--seq-len 6: lower --cp, or choose --seq-len 8"});
  refuses("--cp 4 --cp-method ulysses --seq-len 30", 4, {"--cp 4 cuts samples into 4 equal parts", "choose --seq-len 28"});
  refuses("--cp 4 --cp-method ulysses --heads 6 --channels 96", 4,
          {"--cp-method ulysses: --cp 4", "6 heads: choose 2, 3 or 6, or --cp-method ring"});
  refuses("--tp 2 --cp 2 --cp-method ulysses --heads 6 --channels 96", 4,
          {"--cp 2", "3 heads of a --tp rank: choose 3, or --cp-method ring"});
  refuses("--tp 6 --cp 2 --cp-method ulysses --heads 6 --channels 96", 12, {"1 heads of a --tp rank: choose --cp-method ring"});
  refuses("--cp 2 --cp-method star", 2, {"--cp-method", "star", "ring,ulysses"});
  refuses("--tp 4 --cp 2 --seq-len 12 --micro-batch 1", 8,
          {"--tp 4 does not divide the 6 rows", "--seq-len 12 over --cp 2: lower --tp, or choose --seq-len 16"});
  refuses("--tp 3 --cp 2 --seq-len 40 --heads 3 --channels 96", 6, {"--tp 3 does not divide", "choose --seq-len 36"});
  refuses("--pp 8 --layers 7", 8, {"--pp 8 needs 8 layers or more, and the model has 7: lower it"});
  const std::string interleaved = "--pp-schedule interleaved --pp ";
  refuses(interleaved + "2 --layers 3", 2, {"--pp 2 with --pp-chunks 2 needs 4 layers or more", "has 3: lower one of them"});
  refuses(interleaved + "2 --pp-chunks 3", 2, {"--pp 2 with --pp-chunks 3 needs 6 layers or more", "has 4"});
  refuses(interleaved + "2 --global-batch 12", 2, {"interleaved", "--global-batch 12", " 3 micro-batches", "--pp 2", "choose --global-batch 16"});
  refuses(interleaved + "2 --global-batch 24", 4, {"--global-batch 24", " 3 micro-batches", "choose --global-batch 32"});
  refuses(interleaved + "2 --pp-chunks 1", 2, {"--pp-chunks", "'1'", "from 2 to"});
  refuses("--pp 2 --pp-chunks 2", 2, {"--pp-chunks 2 needs --pp-schedule interleaved", "1f1b"});
  refuses("--pp 2 --pp-schedule zb --pp-chunks 2", 2, {"--pp-chunks 2 needs --pp-schedule interleaved", "zb"});
  refuses("--pp 2 --pp-schedule dapple", 2, {"--pp-schedule", "dapple", "1f1b,gpipe,interleaved,zb"});
  for (std::string zero : {"2", "3"})
    refuses("--pp 2 --pp-schedule zb --zero " + zero, 4, {"--pp-schedule zb with --zero " + zero, "--zero 0 or 1", "another schedule"});
  for (std::string what : {"gelu", "block"})
    refuses("--pp 2 --pp-schedule zb --recompute " + what, 2, {"--pp-schedule zb with --recompute " + what, "another schedule"});
  refuses("--pp 2 --global-batch 12", 4, {"--global-batch 12", "8, --micro-batch 4 on 2 data-parallel ranks", "choose 16"});
  refuses("--islands 2", 4, {"--islands 2 needs --local-steps"});
  refuses("--islands 2 --local-steps 0", 4, {"--local-steps"});
  refuses("--islands 3 --local-steps 5", 4, {"--islands 3 does not divide the number of ranks, 4"});
  refuses("--islands 2 --local-steps 5 --micro-batch 1 --global-batch 6", 4, {"--global-batch 6 is no multiple of 4", "2 ranks of each of 2 islands", "choose 8"});
  refuses("--outer-dtype int8", 4, {"--outer-dtype int8 is for --local-steps"});
  refuses("--outer-lr 1", 4, {"--outer-lr 1 is for --local-steps"});
  refuses("--outer-delay 1", 4, {"--outer-delay 1 is for --local-steps"});
  refuses("--islands 2 --local-steps 5 --outer-delay 5", 4, {"--outer-delay 5 beside --local-steps 5", "choose 4 or less"});
  refuses("--islands 2 --local-steps 5 --outer-delay 2 --sample-seconds 9", 4, {"--sample-seconds 9 beside --outer-delay", "choose --sample-every"});
  refuses("--islands 2 --local-steps 5 --shares 1,2", 4, {"--shares", "beside --local-steps"});
  refuses("--islands 2 --local-steps 5 --dtype fp16", 4, {"--dtype fp16 beside --local-steps"});
  refuses("--islands 2 --local-steps 5 --dtype bf16 --stochastic-rounding", 4, {"--stochastic-rounding beside --local-steps"});
  refuses("--islands 2 --local-steps 5 --dtype bf16 --offload optimizer", 4, {"--offload optimizer beside --local-steps"});
  refuses("--islands 2 --local-steps 5 --on-spike rollback --checkpoint-every 5", 4, {"--on-spike rollback beside --local-steps", "choose skip"});
  refuses("--islands 2 --local-steps 5 --mesh auto", 4, {"--islands", "beside --mesh auto"});
  for (const std::string& good : Texts{"--pp 4", "--pp 2 --pp-schedule zb --zero 1", interleaved + "2 --zero 3 --recompute block", "--pp 2 --tp 2"})
    CHECK(message(good, 4) == "");
}

TEST_CASE("data that cannot be used: exit code 1, one line, nothing written") {
  Workplace shell;
  std::vector<uint16_t> tokens(1000, 7);
  const std::string good = shard(tokens, 1000);
  put(shell / "good.bin", good);
  auto refuses = [&](const std::string& arguments, const Texts& parts) {
    shell.refuses("$TINY --out run " + arguments, 1, parts);
    CHECK((!shell.exists("run") || std::filesystem::is_empty(shell / "run")));
  };
  auto refuses_file = [&](const std::string& name, const std::string& content, Texts parts) {
    put(shell / name, content);
    parts.push_back(name);
    refuses("--train " + name, parts);
  };
  refuses_file("magic.bin", shard(tokens, 1000, 5), {"starts with 5", "20240520", "data/tokenize.py"});
  refuses_file("count.bin", shard(tokens, 2000), {"2000 tokens", "cut short"});
  refuses_file("negative.bin", shard(tokens, -1), {"-1 tokens"});
  refuses_file("trailing.bin", shard(tokens, 900), {"900 tokens", "foreign bytes"});
  refuses_file("header.bin", good.substr(0, 100), {"100 bytes", "header of 1024"});
  refuses_file("few.bin", shard({1, 2, 3}, 3), {"3 tokens", "needs 17"});
  refuses_file("none.bin", shard({}, 0), {"no tokens"});
  refuses_file("empty.bin", "", {"0 bytes"});
  refuses_file("empty", "", {"no tokens"});
  tokens[20] = 60000;
  refuses_file("token.bin", shard(tokens, 1000), {"token 20", "60000", "50256", "--vocab 60001"});
  refuses("--train text --vocab 100", {"text", "--vocab"});
  refuses("--train nowhere.bin", {"nowhere.bin", "matches no regular file"});
  refuses("--train 'no*.txt'", {"no*.txt", "quote globs"});
  refuses("--train .", {"'.'", "matches no regular file"});
  refuses("--train ''", {"''", "matches no regular file"});
  refuses("--train \"$(printf 'two\\nlines, \\377')\"", {"two?lines, ?'"});
  for (std::string word : {"[ab]", "[a,b]", "[[aa]]", "[]"}) {  // lists for CLI11, which differs between releases
    refuses("--train '" + word + "'", {"'" + word + "'", "matches no regular file"});
    refuses("--train text '" + word + "'", {"'" + word + "'", "matches no regular file"});
    refuses("--train='" + word + "'", {"'" + word + "'", "matches no regular file"});
    shell.refuses("$TEXT --model '" + word + "'", 2, {"--model '" + word + "'"});
    shell.refuses("$TEXT --shuffle '" + word + "'", 2, {"'" + word + "' is neither an option"});
  }
  put(shell / "caf\xc3\xa9", some_text(100) + "caf\xc3\xa9" + some_text(5000));
  refuses("--train text --vocab 128 --val caf*", {"caf\xc3\xa9: token 103", "195", "127", "--vocab 196"});
  refuses("--train text good.bin", {"text", "good.bin", "one kind"});
  refuses("--train text --global-batch 5000", {"--train", "5000 tokens", "312 samples", "5000 are needed"});
  refuses("--train text --val text --val-batches 900", {"--val", "1800 are needed", "--val-batches"});
  shell.refuses("$TEXT --val good.bin", 2, {"--train and --val", "one kind"});

  tokens[20] = 7, tokens[900] = 60000;  // met after 28 steps, which are in the metrics
  put(shell / "later.bin", shard(tokens, 1000));
  shell.refuses("$TINY --train later.bin --steps 99 --out run", 1, {"later.bin", "token 900", "60000"});
  CHECK(shell.metrics("run").size() == 28);
  shell.refuses("$TINY --train good.bin --out ids --sample-every 9 --prompt a", 1, {"merges.txt", "--init"});
  CHECK(!shell.exists("ids"));
  put(shell / "with a space/some text.txt", some_text(500));
  shell.output("$TINY --train 'with a space/some*' --out 'with a space/run'");
  CHECK(shell.exists("with a space/run/step_00000002/trainer.json"));
}

TEST_CASE("data that change while a run reads them end it with one line, after the steps before") {
  Workplace shell;
  const std::string until_begun = "until [ -s run/metrics.jsonl ]; do sleep 0.01; done; ";
  const auto changed = [&](const std::string& train, const std::string& change) {
    const std::string text = some_text(5000);
    put(shell / "text", text);
    shell("rm -rf run; " + train + " --schedule constant --monitor-every 0 --out run >out 2>error & \n" + until_begun + change + "; wait $!; echo $? >code");
    return shell.content("error");
  };
  for (const std::string change : {"truncate -s 1000 text", "tr a-z A-Z <text >other; cat other >text", "cp text other; mv other text", "rm text"}) {
    const std::string error = changed("$TEXT --steps 999999", change);
    CAPTURE(change);
    CAPTURE(error);
    CHECK(shell.content("code") == "1\n");
    CHECK(is_line_with(error.substr(0, error.size() - 1), "train_gpt: text: ", "put the file back", "--resume"));
    CHECK(shell.metrics("run").size() > 0);
    CHECK(shell.output("ls run") == "metrics.jsonl\nplan.json\n");
  }
  // Data that no step has read are looked at before a checkpoint.
  put(shell / "first", some_text(200000));
  CHECK(contains(changed("$TINY --train first text --steps 3000", "tr a-z A-Z <text >other; cat other >text"), "train_gpt: text: was changed"));
  CHECK(shell.metrics("run").size() == 3000);
  CHECK(!shell.exists("run/step_00003000"));
  // What is added at the end is left out.
  const std::string grown = "echo more >>text; until grep -sq grown out; do sleep 0.01; done; kill -TERM $!";
  CHECK(changed("$TEXT --steps 999999", grown) == "");
  CHECK(shell.content("code") == "75\n");
  CHECK(contains(shell.content("out"), "data      text has grown from 5000 to 5005 bytes: the run goes on without what was added"));
}

TEST_CASE("an error in mid-run waits for the checkpoint that is being written") {
  Workplace shell;
  put(shell / "text", some_text(2000) + "\x80" + some_text(2000));
  const std::string train = "$TINY --layers 4 --heads 4 --channels 256 --train text --vocab 128 "
                            "--schedule constant --checkpoint-every 62 --out run ";
  shell.refuses(train + "--steps 999", 1, {"text: token 2000 has id 128", "vocabulary"});
  const size_t steps = shell.metrics("run").size();
  CHECK(steps == 2000 / 32);  // two samples of 16 a step
  CHECK(shell.exists("run/step_000000" + std::to_string(steps)));
  shell.output(train + "--resume --steps " + std::to_string(steps));
}

TEST_CASE("text and weights whose tokens are not bytes: refused, with the way to token shards") {
  Workplace shell;
  put(shell / "ids.bin", shard(std::vector<uint16_t>(1000, 7), 1000));
  shell.output("$TINY --train ids.bin --vocab 300 --out wide && $TEXT --out bytes");
  const std::string train = "$GPT --train text --seq-len 16 --steps 2 --out out --init ";
  shell.refuses(train + "wide/step_00000002", 1, {"wide/step_00000002", "vocabulary of 300", "data/tokenize.py", "data/README.md"});
  shell.output(train + "bytes/step_00000002 && rm -r out");
  put(shell / "bytes/step_00000002/tokenizer.json", "{}");
  shell.refuses(train + "bytes/step_00000002", 1, {"bytes/step_00000002", "with a tokenizer", "data/tokenize.py"});
  CHECK(!shell.exists("out"));
}

TEST_CASE("--ceilings: the table has the share of them, and a file that was not measured here is refused") {
  Workplace shell;
  const std::string run = "$TEXT --steps 3 --out '' --profile", out = shell.output(run);
  CHECK(contains(shell.output("$TEXT --out '' --profile"), "first 2 steps are not measured"));
  CHECK(!contains(out, "of ceiling"));
  const size_t name = out.find("device    ") + 10;
  const Json here = made_up_ceilings(out.substr(name, out.find('\n', name) - name));
  auto changed = [&](const std::string& change) {
    Json ceilings = here;
    ceilings.merge_patch(Json::parse(change));
    return ceilings.dump();
  };
  put(shell / "marks.json", here.dump());
  CHECK(contains(shell.output(run + " --ceilings marks.json"), "of ceiling"));
  auto refuses = [&](const std::string& text, const std::string& options, const Texts& parts) {
    put(shell / "marks.json", text);
    shell.refuses(run + options + " --ceilings marks.json", 1, parts);
  };
  shell.refuses(run + " --ceilings nowhere", 1, {"nowhere", "cannot open"});
  refuses("", "", {"marks.json", "not valid JSON"});
  refuses(here.dump().substr(0, 40), "", {"marks.json", "not valid JSON"});
  refuses("[]", "", {"marks.json", "not a JSON object: correct it, or get it again"});
  refuses(changed(R"({"device": "abacus"})"), "", {"marks.json", "abacus", "dev/ceilings.cu"});
  refuses(changed(R"({"copy_bytes_per_s": null})"), "", {"marks.json", "\"copy_bytes_per_s\" is missing"});
  refuses(changed(R"({"copy_bytes_per_s": "fast"})"), "", {"marks.json", "copy_bytes_per_s", "fast"});
  refuses(changed(R"({"flops_per_s": {"fp32": 0}})"), "", {"marks.json", "fp32", "0"});
  refuses(changed(R"({"flops_per_s": [1]})"), "", {"marks.json", "\"flops_per_s\" is '[1]', not an object"});
  refuses(here.dump(), " --dtype bf16", {"marks.json", "bf16\" is missing"});
}

TEST_CASE("a damaged --init folder is refused before anything is written") {
  Workplace shell;
  shell.output("$TEXT --steps 1 --out run && mv run/step_00000001 good && rm good/manifest_*");  // as anybody might write it
  const std::string weights = "bad/model.safetensors", config = "bad/config.json";
  auto refuses = [&](const Texts& parts) {
    shell.refuses("$GPT --train text --init bad --seq-len 16 --out out", 1, parts);
    CHECK(!shell.exists("out"));
    shell.output("rm -rf bad; cp -r good bad");
  };
  refuses({"bad", "holds no config.json"});
  shell.output("rm " + weights), refuses({"bad", "holds no model.safetensors"});
  auto refuses_file = [&](const std::string& file, const std::string& content, const Texts& parts) {
    put(shell / file, content);
    refuses(parts);
  };
  refuses_file(weights, "short", {weights, "5 bytes", "no safetensors file: download or copy it again"});
  refuses_file(weights, std::string(100, '\x7f'), {weights, "header has 9187201950435737471 bytes"});
  refuses_file(weights, shell.content(weights).substr(0, 5000), {weights, "lie outside the file's"});
  refuses_file(weights, std::string("\x40\x1f\0\0\0\0\0\0", 8) + std::string(8000, '['), {weights, "JSON"});
  refuses_file(weights, std::string("\2\0\0\0\0\0\0\0{}", 10), {"bad", "is missing"});
  const std::string broken = shell.content(weights);
  refuses_file(weights, broken.substr(0, broken.size() - 4) + std::string("\0\0\xc0\x7f", 4), {weights, "element ", "is nan"});
  refuses_file(config, "{", {config, "JSON"});
  refuses_file(config, R"({"model_type": "llama"})", {config, "llama", "gpt2", "give such weights"});
  refuses_file(config, R"({"model_type": "gpt2", "n_layer": 500000000})", {config, "n_layer", "500000000"});
  shell.output("sed -i 's/\"n_layer\": 1/\"n_layer\": 2/' " + config), refuses({"tensor transformer.h.1.", "is missing"});

  const std::string name = "transformer.h.0.mlp.c_fc.weight";  // (16, 64)
  auto refuses_header = [&](const Texts& parts, auto change) {
    change_header(shell / weights, [&](Json& header) { change(header, header[name]); });
    refuses(parts);
  };
  refuses_header({weights, "overlaps", "download or copy it again"}, [](Json&, Json& tensor) { tensor["data_offsets"] = {0, 4096}; });
  refuses_header({weights, name, "99999"}, [](Json&, Json& tensor) { tensor["data_offsets"][1] = 99999; });
  refuses_header({weights, name}, [](Json&, Json& tensor) { tensor["data_offsets"][0] = -1; });
  refuses_header({"(64, 16)", "(16, 64)"}, [](Json&, Json& tensor) { tensor["shape"] = {64, 16}; });
  refuses_header({weights, "too large"}, [](Json&, Json& tensor) { tensor["shape"] = {1ull << 62, 16}; });
  refuses_header({weights, "F33"}, [](Json&, Json& tensor) { tensor["dtype"] = "F33"; });
  refuses_header({"h.0.mlp.c_fc.weight", "is missing"}, [&](Json& header, Json& tensor) {
    header["other"] = tensor;
    header.erase(name);
  });
}

TEST_CASE("folders that cannot be written, memory that is not there, several ranks: exit code 1, one line") {
  Workplace shell;
  for (const char* out : {"text", "text/below", "/dev/full", "/proc/gpt"})
    shell.refuses("$TEXT --out " + std::string(out), 1, {"--out", out, "choose another --out"});
  for (const char* option : {"--out ", "--resume ", "--init "})
    shell.refuses("$TEXT " + std::string(option) + std::string(300, 'a'), 1, {"train_gpt: 'aaaa", "...': File name too long: check this path"});
  CHECK(shell.content("text") == some_text(5000));
  // Files of at most 10 KiB stand in for a full disk: the metrics fit, the checkpoint does not.
  const std::string small = "ulimit -f 20; ";
  shell.refuses(small + "$TEXT --monitor-every 0 --out run", 1, {"run/step_00000002", "reserve", "check the folder and its space, and go on with --resume"});
  CHECK(shell.output("ls run") == "metrics.jsonl\nplan.json\n");
  CHECK(contains(shell.output("$TEXT --out run --resume"), "no checkpoint in run, starting afresh"));
  const Result full = shell(small + "$TEXT --steps 999 --out log");
  CHECK(full.code == 1);
  CHECK(contains(full.error, "log/metrics.jsonl: cannot write: "));
  CHECK(contains(full.error, "lines wait in memory, training goes on\n"));
  CHECK(contains(full.error, "log/step_00000999"));
  CHECK(shell.content("log/metrics.jsonl").ends_with("}\n"));

  put(shell / "data", std::string(400000, 'x'));
  shell.refuses("$GPT --train data --model gpt3-13b --micro-batch 64 --out big", 1,
                {"not enough memory", "GiB needed (weights ", "gradients ", "optimizer ", "activations ",
                 "workspace ", " free", "--micro-batch"});
  CHECK(!shell.exists("big"));
  shell.output("$TINY --train text --positions 65536 --steps 1 --out long");
  shell.refuses("$GPT --generate --out long --samples 30000", 1, {"not enough memory", "fewer --samples, a shorter --seq-len"});
  for (std::string variable : {"OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"})
    shell.refuses(variable + "=2 $TEXT --out ranks", 1, {variable, "RANK is not", "set both"});
  CHECK(!shell.exists("ranks"));
}
