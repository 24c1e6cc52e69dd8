// train_gpt as people run it: run folders, resuming, determinism, the reference, checkpoints, sampling.
#include <doctest/doctest.h>

#include <cmath>
#include <thread>

#include <unistd.h>

#include "gpt/safetensors.h"
#include "test/bounds.h"
#include "test/put_trainer.h"
#include "test/skip.h"
#include "test/workplace.h"

TEST_CASE("run folders: a run is never lost by mistake") {
  Workplace shell;
  const std::string train = "$TEXT --steps 4 --checkpoint-every 2 --out run ";
  put(shell / "run/notes.txt", "mine");
  shell.output(train);
  const std::string metrics = shell.content("run/metrics.jsonl");
  auto refuses = [&](int code, const std::string& arguments, const Texts& parts) {
    shell.refuses(train + arguments, code, parts);
  };
  refuses(2, "", {"run", "holds a run", "--resume", "--overwrite"});
  refuses(1, "--resume --overwrite", {"--resume", "--overwrite", "one of them"});
  refuses(1, "--resume nowhere", {"--resume nowhere", "no checkpoint"});
  refuses(1, "--overwrite --resume run/step_00000003", {"run/step_00000003", "no checkpoint"});
  refuses(2, "--overwrite --heads 3", {"--heads 3"});
  refuses(1, "--overwrite --init nowhere", {"nowhere"});
  refuses(1, "--overwrite --train nowhere", {"nowhere"});
  refuses(2, "--resume --lr 1e-2", {"lr", "0.01", "0.0003", "step_00000004", "same options"});
  refuses(2, "--resume --dtype bf16", {"dtype", "bf16", "fp32"});
  refuses(2, "--resume --micro-batch 1 --global-batch 1", {"global_batch is 1 and was 2"});
  refuses(2, "--resume --shuffle", {"shuffle"});
  refuses(2, "--resume --attention hopper", {"--attention hopper", "leave the option out"});  // in fp32
  refuses(2, "--resume --seed 1", {"seed is 1 and was 1337"});
  refuses(2, "--resume --channels 32", {"--channels 32", "have 16"});
  refuses(2, "--resume run/step_00000002 --grad-clip 0", {"grad_clip is 0.0 and was 1.0"});
  CHECK(shell.output("ls run") == "metrics.jsonl\nmonitor.jsonl\nnotes.txt\nplan.json\nstep_00000002\nstep_00000004\n");
  CHECK(shell.content("run/metrics.jsonl") == metrics);
  shell.refuses("$TEXT --out '' --resume nowhere", 1, {"--resume nowhere", "no checkpoint"});
  CHECK(contains(shell.output(train + "--resume"), "finished: the checkpoint has 4 of 4 steps"));
  CHECK(!contains(shell.output(train + "--resume"), "\nsteps "));
  CHECK(contains(shell.output(train + "--resume run/step_00000002 --steps 2"), "finished"));
  CHECK(shell.content("run/metrics.jsonl") == metrics);

  CHECK(contains(shell.output(train + "--resume run/step_00000002 --steps 6"),
                 "--steps 6 instead of 4 raises the learning rate at step 3 from 0.00015 to 0.000225 (cosine)"));
  CHECK(!contains(shell.output("$TEXT --out run --steps 6 --resume --checkpoint-every 2"), "raises"));
  CHECK(shell.output("cd run && echo *") == "metrics.jsonl monitor.jsonl notes.txt plan.json step_00000002 step_00000004 "
                                            "step_00000004.abandoned step_00000006\n");
  refuses(1, "--init run/step_00000006 --overwrite", {"--init run/step_00000006", "--overwrite would delete it"});
  shell.output("cp text run/data; cp -r run/step_00000006 weights");
  shell.output(train + "--init weights --overwrite --train run/data");
  CHECK(shell.output("cd run && echo *") == "data metrics.jsonl monitor.jsonl notes.txt plan.json step_00000002 step_00000004 "
                                            "step_00000004.abandoned\n");
  CHECK(shell.metrics("run").size() == 4);

  // monitor.jsonl: two lines, however short the run; a resumed run goes on behind them, --overwrite begins anew.
  const auto looks = [&] { return shell.output("wc -l <monitored/monitor.jsonl"); };
  for (const auto& [options, lines] : {std::pair("", "2\n"), {"--steps 3 --resume", "4\n"}, {"--resume monitored/step_00000002", "4\n"},
                                       {"--steps 4 --resume monitored/step_00000002", "6\n"}, {"--overwrite", "2\n"}}) {
    CAPTURE(options);
    shell.output("$TEXT --out monitored " + std::string(options));
    CHECK(looks() == lines);
  }
  shell.output("$TEXT --out monitored --overwrite --monitor-every 0");
  CHECK(!shell.exists("monitored/monitor.jsonl"));

  shell.output("$TEXT --checkpoint-every 1 --steps 7 --keep 2 --keep-every 3 --out kept");
  CHECK(shell.output("ls kept") == "metrics.jsonl\nmonitor.jsonl\nplan.json\nstep_00000003\nstep_00000006\nstep_00000007\n");
  // The default sequence length is the model's; gpt3's 2048 is found again.
  const std::string gpt3 = "$GPT --train text --model gpt3-125m --layers 1 --heads 1 --channels 16 "
                           "--micro-batch 1 --out gpt3 --steps ";
  shell.output(gpt3 + "1 && " + gpt3 + "2 --resume");
}

TEST_CASE("a run is resumed on the data that it began with") {
  Workplace shell;
  const std::string text = shell.content("text"), train = "$TEXT --val text --val-batches 2 --out run ";
  put(shell / "more", text);
  shell.output(train);
  put(shell / "text", "!" + text.substr(1));  // as many bytes
  shell.refuses(train + "--val more --resume --steps 4", 2, {"--resume", "--train", "other data", "--init run/step_00000002"});
  put(shell / "text", text + text);
  shell.refuses(train + "--val more --resume --steps 4", 2, {"train_tokens is 10000 and was 5000"});
  put(shell / "text", text);
  put(shell / "more", text + text);
  CHECK(!contains(shell.output(train + "--resume --steps 4"), "other data"));
  CHECK(contains(shell.output("$TEXT --out run --val more --val-batches 2 --resume --steps 6"), "--val holds other data than the run in run/"));
}

TEST_CASE("paths and prompts are any bytes") {
  Workplace shell;
  const std::string odd = "[a,b]\xe9 \xff";
  put(shell / odd, some_text(3000));
  put(shell / "empty", "");
  const std::string train = "$TINY --train '" + odd + "' empty --prompt 'caf\xe9' --sample-every 1 --out '" + odd + " run' ";
  const std::string out = shell.output(train + "--trace '" + odd + " trace'");
  CHECK(contains(out, "nothing in it: empty\n"));
  CHECK(contains(out, "---\ncaf\xe9"));
  shell.output(train + "--resume --steps 4");
  CHECK(shell.metrics(odd + " run").size() == 4);
  CHECK(Json::accept(shell.content(odd + " run/step_00000004/trainer.json")));
  CHECK(Json::accept(shell.content(odd + " trace")));

  std::string lines, wanted;  // "\n\0\n\0..."
  for (int i = 0; i < 1000; ++i) lines += std::string("\n\0", 2);
  put(shell / "zeros", lines);
  wanted = lines.substr(1, 9) + "\n";
  CHECK(contains(shell.output("$TINY --train zeros --steps 60 --lr 1e-2 --out zeros.run --sample-every 60 --sample-len 9 "
                              "--temperature 0"), "---\n" + wanted + "---\n"));
  CHECK(shell.output("$GPT --generate --out zeros.run --sample-len 9 --temperature 0") == wanted);
}

TEST_CASE("stop and resume gives the same bits") {
  Workplace shell;
  put(shell / "little", some_text(300));  // 18 samples: epochs end inside steps
  for (std::string options :
       {"--train text", "--train little --shuffle", "--train text --shuffle --dtype bf16",
        "--train little --dtype bf16 --stochastic-rounding", "--train text --dtype bf16 --layers 3 --fp8 --fp8-gradients e4m3",
        "--train text --dtype fp16 --loss-scale 16777216 --loss-scale-window 2",
        "--train text --dtype bf16 --moments bf16 --recompute block --offload optimizer,activations"}) {
    CAPTURE(options);
    const std::string train = "$TINY --steps 10 --warmup 2 --global-batch 4 --checkpoint-every 5 --val text "
                              "--val-every 2 --val-batches 2 " + options + " --out ";
    shell.output("rm -rf a b; " + train + "a");
    // As a kill after step 8 leaves it: a checkpoint half written, a line half written.
    shell.output("cp -r a b && rm -r b/step_00000010 && cp -r b/step_00000005 b/step_00000009.partial && "
                 "(head -n 11 a/metrics.jsonl; tail -n +12 a/metrics.jsonl | head -c 20) >b/metrics.jsonl");
    shell.output(train + "b --resume");
    CHECK(shell.metrics("a").size() == 15);
    CHECK(shell.same_metrics("a", "b"));
    CHECK(shell.output("ls b") == "metrics.jsonl\nmonitor.jsonl\nplan.json\nstep_00000005\nstep_00000010\n");
    shell.output("diff -r a/step_00000010 b/step_00000010");
  }
}

TEST_CASE("--resume without --steps goes on to the number of steps that the run began with") {
  const Workplace shell;
  const std::string train = "$GPT --train text --layers 1 --heads 1 --channels 16 --seq-len 16 --micro-batch 2 --warmup 110 --checkpoint-every 60 --out ";  // longer than the default of --steps
  shell.output(train + "run --steps 120");
  const std::vector<Json> wanted = shell.metrics("run");
  shell.output("rm -r run/step_00000120");
  CHECK(contains(shell.output(train + "run --resume"), "steps     61 to 120"));
  const std::vector<Json> resumed = shell.metrics("run");
  REQUIRE(resumed.size() == 120);
  for (const char* key : {"loss", "lr"}) CHECK(resumed.back()[key] == wanted.back()[key]);
  CHECK(contains(shell.output(train + "run --resume"), "the checkpoint has 120 of 120 steps; a larger --steps goes on"));
  shell.refuses(train + "new --resume", 2, {"--warmup 110 is longer than --steps 100"});  // there is no run: the default holds
}

TEST_CASE("attention is computed as the run began, if no option says otherwise; a checkpoint says by whom") {
  const Workplace shell;
  const std::string train = "$TEXT --dtype bf16 --checkpoint-every 1 ";
  const auto stored = [&](const std::string& checkpoint) {
    return Json::parse(shell.content(checkpoint + "/trainer.json"))["arithmetic"]["attention"].get<std::string>();
  };
  shell.output(train + "--steps 2 --out own");
  CHECK(stored("own/step_00000002") == (is_gpu_build() ? stored("own/step_00000001") : "own"));
  const Result on_hopper = shell(train + "--steps 2 --attention hopper --out run");
  if (contains(on_hopper.error, "leave the option out")) return skip("this GPU is not Hopper's");
  CHECK(contains(on_hopper.out, "\nattention own kernels for Hopper\n"));
  CHECK(stored("run/step_00000002") == "hopper");
  shell.output("cp -r run whole && cp -r run other && rm -r run/step_00000002");
  CHECK(contains(shell.output(train + "--steps 2 --out run --resume"), "\nattention own kernels for Hopper\n"));
  shell.output("diff -r run/step_00000002 whole/step_00000002");
  shell.refuses(train + "--steps 3 --out run --resume --attention own", 2, {"attention is \"own\" and was \"hopper\""});
  // Of an earlier version, which stored what was asked for; and of another machine, which had a library
  for (const auto& [was, now] : {std::pair("auto", "own"), {"cudnn", "own"}}) {
    if (is_gpu_build()) break;
    Json trainer = Json::parse(shell.content("whole/step_00000002/trainer.json"));
    trainer["arithmetic"]["attention"] = was;
    put_trainer(shell / "other/step_00000002", trainer.dump());
    const std::string resumed = shell.output("rm -rf other/step_00000003; " + train + "--steps 3 --out other --resume");
    CHECK(contains(resumed, "attention by other kernels than before (cudnn), so bits differ: this program was built without") ==
          (was == std::string("cudnn")));
    CHECK(stored("other/step_00000003") == now);
  }
}

TEST_CASE("offload changes no bit, and may change at a resume") {
  Workplace shell;
  const std::string train = "$TEXT --steps 6 --checkpoint-every 3 --recompute block --moments bf16 --out ";
  shell.output(train + "a");
  const std::string out = shell.output(train + "b --offload activations,optimizer");
  CHECK(contains(out, "; host memory: optimizer "));
  CHECK(contains(out, ", activations "));
  CHECK(contains(shell.content("b/plan.json"), R"("host":{"optimizer":)"));
  shell.output("cp -r b c && rm -r c/step_00000006");
  shell.output(train + "c --resume");
  for (const char* run : {"b", "c"}) {
    CHECK(shell.same_metrics("a", run));
    for (const char* file : {"model", "optimizer"})
      shell.output("cmp a/step_00000006/" + std::string(file) + ".safetensors " + run + "/step_00000006/" + file + ".safetensors");
  }
  shell.refuses("$TEXT --steps 9 --recompute block --out a --resume", 2, {R"(moments is "fp32" and was "bf16")"});
}

TEST_CASE("a run killed at any moment continues with the same bits") {
  Workplace shell;
  const std::string options = " --schedule constant --checkpoint-every 3 --keep 1 --steps ";
  for (std::string signal : {"TERM", "KILL"}) {
    shell("rm -rf a b; $TEXT --out b" + options + "99999 & \n"
          "until [ $(grep -sc loss b/metrics.jsonl) -ge 10 ]; do sleep 0.01; done; "
          "kill -" + signal + " $!; wait $!");
    const size_t newest = std::stoul(shell.output("ls b | grep '^step_[0-9]*$' | tail -1").substr(5));
    const std::string steps = std::to_string(newest + 4);
    shell.output("$TEXT --resume --out b" + options + steps);
    shell.output("$TEXT --out a" + options + steps);
    CHECK(shell.same_metrics("a", "b"));
    CHECK(shell.metrics("a").size() == newest + 4);
  }
}

TEST_CASE("a run waits for the one that still writes to its folder") {
  Workplace shell;
  const std::string out = shell.output(
      "$TEXT --schedule constant --steps 300 --out b >first & \n until [ -s b/metrics.jsonl ]; do sleep 0.01; done\n"
      "$TEXT --schedule constant --steps 310 --out b --resume; wait");
  CHECK(contains(out, "waiting for the run that still writes to b"));
  shell.output("$TEXT --schedule constant --steps 310 --out a");
  CHECK(shell.same_metrics("a", "b"));
}

TEST_CASE("of two runs that start at once in a folder that is not there yet, the second goes on where the first ends") {
  Workplace shell;
  const std::string train = "$TEXT --schedule constant --steps 30 ", racing = train + "--resume --out b";
  const std::string out = shell.output(racing + " & " + racing + "; wait");
  CAPTURE(out);
  CHECK(contains(out, "waiting for the run that still writes to b"));
  CHECK(contains(out, "finished: the checkpoint has 30 of 30 steps"));
  shell.output(train + "--out a");
  CHECK(shell.same_metrics("a", "b"));
}

TEST_CASE("cores that the launcher leaves out are named") {
  Workplace shell;
  if (std::thread::hardware_concurrency() < 2) return skip("needs two cores");
  const long cores = sysconf(_SC_NPROCESSORS_ONLN);
  CHECK(contains(shell.output("taskset -c 0 $TEXT --out bound"), ", on 1 of " + std::to_string(cores) + " cores (bound by what started it"));
  if (cores == long(std::thread::hardware_concurrency())) CHECK(!contains(shell.output("$TEXT --out free"), "bound by"));
}

TEST_CASE("fp16 overflows where fp32 does not: no text, exit code 1; training goes on without a sample") {
  Workplace shell;
  const std::string half = "--init loud/step_00000003 --dtype fp16 --sample-len 4 --prompt ab ";
  shell.output("$TEXT --steps 3 --lr 300 --grad-clip 0 --schedule constant --out loud");
  if (contains(shell("$TEXT --steps 1 --dtype fp16").error, "--dtype")) return skip("this build leaves fp16 out");
  CHECK(shell.output("$GPT --generate --init loud/step_00000003 --sample-len 4 --prompt ab").starts_with("ab"));
  for (const char* temperature : {"0", "0.8"})
    shell.refuses("$GPT --generate " + half + "--temperature " + temperature, 1, {"logits after token 2 are not finite", "bf16 or fp32"});
  const std::string out = shell.output("$TEXT --steps 2 --sample-every 1 --out quiet " + half);
  CHECK(contains(out, "no sample after step 1: the logits after token 2"));
  CHECK(contains(out, "no sample after step 2: the logits after token 2"));
}

TEST_CASE("fp16: overflows are left out, and the loss scale finds its place") {
  Workplace shell;
  const std::string train = "$TINY --train text --steps 24 --lr 1e-3 --val text --out ";
  const std::string out = shell.output(train + "half --dtype fp16 --loss-scale 16777216 --loss-scale-window 8");
  CHECK(contains(out, "not finite: update left out, loss scale "));
  CHECK(contains(out, "left-out updates "));
  shell.output(train + "fixed --dtype fp16 --loss-scale 8 --loss-scale-window 0");
  CHECK(shell.metrics("fixed")[0]["loss_scale"] == 8);  // a scale that stays is reported, too
  shell.output(train + "full");
  const std::vector<Json> half = shell.metrics("half"), full = shell.metrics("full");
  double scale = 16777216;
  size_t good = 0, left_out = 0;
  for (size_t step = 0; step < 24; ++step) {
    CAPTURE(step);
    left_out += half[step].contains("left_out");
    good = half[step].contains("left_out") ? 0 : good + 1;
    if (good == 0) scale /= 2;
    if (good == 8) scale *= 2, good = 0;
    CHECK(half[step]["loss_scale"] == scale);
  }
  CHECK(left_out > 0);
  CHECK(contains(out, "left out  " + std::to_string(left_out) + " of 24 updates: "));
  CHECK(!full[0].contains("loss_scale"));
  // 24 updates lower the loss by 7 %. Without the six that are left out, the first and largest, it falls by 4 %; 2 % at
  // least show that the others were applied, and at their size.
  CHECK_WITHIN("val_loss", half[24]["val_loss"].get<double>() / full[24]["val_loss"].get<double>() - 1, 0.05);
}

TEST_CASE("threads, recomputation and separate arrays change no bit, micro-batches hardly any") {
  Workplace shell;
  const std::string train = "$GPT --train text --layers 2 --heads 3 --channels 51 --seq-len 40 --steps 10 "
                            "--lr 1e-3 --global-batch 4 --out ";
  for (std::string dtype : {"fp32", "bf16"}) {
    const std::string options = dtype + " --dtype " + dtype + " --overwrite";
    shell.output("OMP_NUM_THREADS=1 " + train + options + " && cp -r " + dtype + " wanted");
    auto check_same = [&](const std::string& command) {
      shell.output(command + " && diff -r " + dtype + "/step_00000010 wanted/step_00000010");
      CHECK(shell.same_metrics(dtype, "wanted"));
    };
    for (std::string count : {"2", "5", "16"}) check_same("OMP_NUM_THREADS=" + count + " " + train + options);
    for (std::string part : {"gelu", "block"}) check_same(train + options + " --recompute " + part);
    check_same("GPT_SEPARATE_ARRAYS=1 " + train + options);
    shell.output("rm -r wanted");
  }
  const std::vector<Json> whole = shell.metrics("fp32");
  for (std::string size : {"1", "2"}) {
    shell.output(train + "parts --overwrite --micro-batch " + size);
    const std::vector<Json> parts = shell.metrics("parts");
    for (size_t i = 0; i < 10; ++i)  // test/README.md, Curves
      CHECK_WITHIN("loss", parts[i]["loss"].get<double>() / whole[i]["loss"].get<double>() - 1, 1e-5);
  }
}

TEST_CASE("a run over the reference's tokens gives the reference's losses, norms, rates and weights") {
  Workplace shell;
  for (std::string name : {"tiny", "odd"}) {
    CAPTURE(name);
    const SafetensorsFile file("test/reference/" + name + "/reference.safetensors");
    auto floats = [](const SafetensorsFile& from, const std::string& tensor) {
      REQUIRE_MESSAGE(from.find(tensor), tensor);
      std::vector<float> values(element_count(from.find(tensor)->shape));
      from.read(*from.find(tensor), 0, values.size(), values.data());
      return values;
    };
    const Json settings = Json::parse(content_of("test/reference/" + name + "/reference.json"));
    std::vector<uint16_t> tokens;  // sample after sample, neighbours share one token
    for (size_t i = 0, row = size_t(settings["T"]) + 1; float token : floats(file, "tokens"))
      if (i++ % row || i == 1) tokens.push_back(uint16_t(token));
    put(shell / (name + ".bin"), shard(tokens, int32_t(tokens.size())));
    std::string options;
    for (const auto& [key, value] : settings.items())
      if (std::islower(key[0]) && key != "positions") options += " --" + key + " " + value.dump();
    std::replace(options.begin(), options.end(), '_', '-');
    options += " --seq-len " + settings["T"].dump() + " --micro-batch " + settings["B"].dump();
    shell.output("$GPT --train " + name + ".bin --init $REFERENCE/" + name + " --out " + name + options);

    const std::vector<Json> metrics = shell.metrics(name);
    const auto losses = floats(file, "losses"), norms = floats(file, "norms"), rates = floats(file, "lrs");
    REQUIRE(metrics.size() == losses.size());
    for (size_t i = 0; i < losses.size(); ++i) {
      // test/README.md, Curves. The reference's rates are floats.
      CHECK_WITHIN("loss", metrics[i]["loss"].get<double>() / losses[i] - 1, 1e-5);
      CHECK_WITHIN("grad_norm", metrics[i]["grad_norm"].get<double>() / norms[i] - 1, 1e-5);
      CHECK_WITHIN("lr", metrics[i]["lr"].get<double>() / rates[i] - 1, 1e-7);
    }
    const SafetensorsFile checkpoint(shell / (name + "/step_00000010/model.safetensors"));
    for (const TensorInfo& tensor : checkpoint.tensors()) {
      if (tensor.name.ends_with("c_attn.bias")) continue;  // the key third of it is noise (test/README.md, Curves)
      CAPTURE(tensor.name);
      const auto actual = floats(checkpoint, tensor.name), wanted = floats(file, "final." + tensor.name);
      double difference = 0, norm = 0;
      for (size_t i = 0; i < wanted.size(); ++i) {
        difference += std::pow(double(actual[i]) - wanted[i], 2);
        norm += std::pow(double(wanted[i]), 2);
      }
      CHECK_WITHIN("weights", std::sqrt(difference / norm), 2e-5);  // test/test_model.cu says why
    }
  }
}

TEST_CASE("metrics, and a checkpoint as --init") {
  Workplace shell;
  put(shell / "batch", some_text(65));  // 4 samples of 16: every step sees the same
  const std::string train = "$TINY --train batch --micro-batch 4 --lr 1e-2 ";
  shell.output(train + "--steps 6 --checkpoint-every 5 --out a --sample-every 2");
  shell.output(train + "--steps 1 --init a/step_00000005 --out b");
  CHECK(shell.metrics("a")[5]["loss"] == shell.metrics("b")[0]["loss"]);
  CHECK(shell.metrics("a")[5]["grad_norm"] == shell.metrics("b")[0]["grad_norm"]);
  CHECK(shell.metrics("a")[5]["tokens"] == 6 * 64);
  shell.output(train + "--steps 6 --out c");
  CHECK(shell.same_metrics("a", "c"));  // checkpoints and samples do not disturb
  const Json line = Json::parse(shell.content("b/metrics.jsonl"));
  for (const char* key : {"step", "loss", "grad_norm", "lr", "tokens", "step_ms", "tokens_per_s", "mfu"})
    CHECK(line.contains(key));
  shell.output("mkdir empty && cd empty && $TINY --train ../batch --out ''");
  CHECK(std::filesystem::is_empty(shell / "empty"));
}

TEST_CASE("--generate: reproducible, greedy, longer than the positions") {
  Workplace shell;
  shell.output("$TEXT --steps 60 --lr 1e-2 --out run");
  const std::string generate = "$GPT --generate --out run --sample-len 40 --prompt 'line 1' ";
  const std::string sampled = shell.output(generate + "--seed 1");
  const std::string greedy = shell.output(generate + "--temperature 0");
  CHECK(sampled.starts_with("line 1"));
  CHECK(sampled.size() == 6 + 40 + 1);  // prompt, sample, line end; a byte is a token
  CHECK(sampled == shell.output(generate + "--seed 1 --init run/step_00000060"));
  CHECK(sampled != shell.output(generate + "--seed 2"));
  CHECK(greedy == shell.output(generate + "--seed 2 --top-k 1"));
  CHECK(sampled == shell.output(generate + "--seed 1 --top-k 1000"));
  CHECK(shell.output("$GPT --generate --resume run --sample-len 0") == "\n");
  for (const std::string options : {"--temperature 0", "--seed 1"})  // the positions are full several times
    CHECK(shell.output(generate + options) == shell.output(generate + options + " --no-cache"));
  const std::string three = shell.output(generate + "--seed 1 --samples 3");
  CHECK(three.starts_with(sampled + "---\nline 1"));
  CHECK(three == shell.output(generate + "--seed 1 --samples 3 --no-cache --top-p 1"));
  CHECK(contains(shell(generate + "--seed 1").error, " tokens/s; the prompt took "));
  // A checkpoint beats --init, as in training.
  shell.output("$TEXT --out other --steps 1 --seed 5");
  CHECK(greedy == shell.output(generate + "--temperature 0 --resume --init other/step_00000001"));
  CHECK(contains(shell.output("$TEXT --sample-every 1 --prompt 'lin' --out ''"), "---\nlin"));
  shell.refuses("$GPT --generate --out nowhere", 1, {"--out nowhere", "no checkpoint", "--init"});
  shell.refuses("$GPT --generate --resume nowhere", 1, {"--resume nowhere", "no checkpoint"});
  CHECK(contains(shell("$GPT --generate --out run --prompt 'line 1, line 2, line 3' --sample-len 3").error,
                 " ms for the last 14 of its 22 tokens\n"));
  shell.refuses("$GPT --generate --out run --vocab 300", 2, {"--vocab 300", "have 256"});
}

TEST_CASE("a damaged checkpoint is named, skipped and set aside; the one before goes on with the same bits") {
  Workplace shell;
  const std::string train = "$TEXT --steps 8 --checkpoint-every 2 --keep 9 --out ";
  shell.output(train + "a && cp -r a b");
  auto flip = [&](const std::string& file, size_t at) {
    std::string bytes = shell.content(file);
    bytes[at] = char(bytes[at] ^ 4);
    put(shell / file, bytes);
  };
  flip("b/step_00000008/optimizer.safetensors", shell.content("b/step_00000008/optimizer.safetensors").size() / 2);
  shell.output("rm b/step_00000006/config.json");
  const std::string text = shell.output(train + "b --resume");
  CHECK(contains(text, "skipping checkpoint b/step_00000008: b/step_00000008/optimizer.safetensors: bytes "));
  CHECK(contains(text, "skipping checkpoint b/step_00000006: b/step_00000006/config.json: cannot open"));
  CHECK(contains(text, "steps     5 to 8"));
  CHECK(shell.same_metrics("a", "b"));
  CHECK(shell.exists("b/step_00000008.abandoned"));
  shell.output("diff -r a/step_00000008 b/step_00000008");

  flip("b/step_00000008/model.safetensors", 3000);
  const std::string generate = "$GPT --generate --sample-len 9 ", text_of_6 = shell.output(generate + "--resume b/step_00000006");
  for (const char* run : {"--resume b", "--out b", "--out b --resume"}) {
    const Result generated = shell(generate + run);
    CHECK(generated.out == text_of_6);
    CHECK(contains(generated.error, "skipping checkpoint b/step_00000008: b/step_00000008/model.safetensors: bytes "));
  }
  shell.refuses(generate + "--resume b/step_00000008", 1, {"--resume b/step_00000008/model.safetensors", "damaged", "another"});

  flip("b/step_00000004/model.safetensors", 3000);
  shell.refuses(train + "b --resume b/step_00000004", 1, {"--resume b/step_00000004/model.safetensors", "damaged", "another"});
  shell.refuses("$TEXT --out c --init b/step_00000004", 1, {"--init b/step_00000004/model.safetensors", "damaged"});
  shell.refuses("$GPT --generate --out c --init b/step_00000004", 1, {"damaged"});
  CHECK(!shell.exists("c"));
  for (const char* step : {"2", "6", "8"}) flip("b/step_0000000" + std::string(step) + "/trainer.json", 5);
  shell.refuses(train + "b --resume", 1, {"--resume: no checkpoint in b is whole", "--init", "--overwrite"});
  CHECK(contains(shell(generate + "--out b").error, "train_gpt: --out: no checkpoint in b is whole: "));
}

TEST_CASE("asked to stop: the step is finished, saved, and a resumed run goes on with the same bits") {
  Workplace shell;
  const std::string train = "$TEXT --schedule constant --out ";
  for (std::string signal : {"TERM", "INT", "USR1"}) {
    CAPTURE(signal);
    const Result stopped = shell("rm -rf a b; trap - INT; $TEXT --schedule constant --steps 99999 --out b & \n"
                                 "until [ -s b/metrics.jsonl ]; do sleep 0.01; done; "
                                 "kill -" + signal + " $!; wait $!");
    CHECK(stopped.code == 75);
    CHECK(stopped.error == "");
    const size_t step = shell.metrics("b").size();
    CHECK(contains(stopped.out, "SIG" + signal + ": stopped after step " + std::to_string(step) + ", and saved"));
    const std::string steps = " --steps " + std::to_string(step + 3);
    shell.output(train + "b --resume" + steps);
    shell.output(train + "a" + steps);
    CHECK(shell.same_metrics("a", "b"));
  }
  CHECK(shell("$TEXT --steps 99999 --max-hours 0.0001 --out c").code == 75);
  // The time counts from the process' start: two seconds in which the folder is another's are more than these 0.9.
  shell.output("mkdir d; flock d sleep 2 & \nsleep 0.1; $TEXT --steps 99999 --max-hours 0.00025 --out d; test $? = 75");
  CHECK(shell.metrics("d").size() <= 2);  // and one step may be in flight
  CHECK(shell.output("ls c | wc -l") == "4\n");
}

TEST_CASE("asked to stop before the first step: exit code 75 and one line, and nothing is changed") {
  Workplace shell;
  shell.output("$TEXT --steps 4 --checkpoint-every 2 --out run");
  const std::string files = "find run -type f | sort | xargs sha1sum", before = shell.output(files);
  // It waits for the folder, which somebody else has.
  const std::string held = "trap - INT; flock -o run sleep 20 & \n", until_waiting = "until grep -sq '^waiting' out; do sleep 0.01; done; ";
  const auto stops = [&](const std::string& job, const std::string& signal, const std::string& end) {
    CAPTURE(signal);
    const Result stopped = shell("rm -f out; " + held + job + " --steps 8 --out run --resume >out & \n" + until_waiting + signal + "; wait $!; code=$?; " + end + "exit $code");
    CHECK(stopped.code == 75);
    CHECK(shell.output(files) == before);
    return stopped.error;
  };
  const std::string free = "pkill -P $$ flock; ", said = ": stopped before the first step, and nothing was changed: start it again\n";
  for (const std::string signal : {"TERM", "INT", "USR1", "HUP"}) CHECK(stops("$TEXT", "kill -" + signal + " $!", free) == "train_gpt: SIG" + signal + said);
  // A checkpoint is loaded, or weights are drawn.
  const std::string big = "$GPT --train text --layers 8 --channels 512 --heads 8 --seq-len 64 --micro-batch 1 --steps 9 --out ";
  const Result drawing = shell(big + "big & \nuntil [ -d big ]; do sleep 0.01; done; kill -USR1 $!; wait $!");
  CHECK(drawing.code == 75);
  CHECK(drawing.error == "train_gpt: SIGUSR1" + said);
  CHECK(shell.output("ls big") == "");
  // What does not train ends as any program does. (With GPT_CPU_LAZY=1 it rehearses first, as on a GPU: briefly, also before a long text.)
  for (const std::string lazy : {"", "GPT_CPU_LAZY=1 "}) {
    CAPTURE(lazy);
    const Result generating = shell("rm -f text_out; " + lazy + "$GPT --generate --resume run --sample-len 1000000 >text_out & \n"
                                    "until [ -s text_out ]; do sleep 0.01; done; kill -TERM $!; wait $!");
    CHECK(generating.code == 128 + SIGTERM);
  }
  if (!mpirun_found || is_gpu_build()) return skip("the rest is of two ranks on the CPU device; what comes before was tested");
  const std::string ranks = "OMP_NUM_THREADS=1 " + mpirun() + " 2 $TEXT", rank_1 =
      "for p in $(pgrep -P $! train_gpt); do tr '\\0' '\\n' </proc/$p/environ | grep -qx OMPI_COMM_WORLD_RANK=1 && kill -TERM $p; done";
  CHECK(contains(stops(ranks, "kill -USR1 $!", free), "train_gpt: SIGUSR1" + said));
  const std::string of_one = stops(ranks, rank_1, free);
  CHECK(contains(of_one, "train_gpt: rank 1 (host "));
  CHECK(contains(of_one, "): SIGTERM" + said));
}

TEST_CASE("signals in the middle of products damage nothing") {
  Workplace shell;
  const Result stopped = shell("$GPT --train text --layers 2 --heads 4 --channels 256 --seq-len 64 --micro-batch 16 --steps 99999 --out a & \n"
                               "until [ -s a/metrics.jsonl ]; do sleep 0.01; done; "
                               "for i in $(seq 100); do kill -USR1 $! 2>&- || break; sleep 0.002; done; wait $!");
  CHECK(stopped.code == 75);
  CHECK(stopped.error == "");
}

TEST_CASE("whatever becomes of the terminal, the run goes on, or saves") {
  Workplace shell;
  const std::string steps = "$TEXT --steps 40 --out ";
  const std::string until_begun = " until [ -s a/metrics.jsonl ]; do sleep 0.01; done; ";
  shell("{ " + steps + "a; echo $? >code; } | head -n 1");  // the reader is gone before the first step
  CHECK(shell.content("code") == "0\n");
  CHECK(shell.metrics("a").size() == 40);
  // Ctrl-C, which reaches the reader, too
  shell("rm -r a; trap - INT; { $TEXT --schedule constant --steps 99999 --out a & echo $! >pid; wait; echo $? >code; } | head -n 1 & \n" +
        until_begun + "kill -INT $(cat pid); wait");
  CHECK(shell.exists("a/metrics.jsonl"));
  CHECK(shell.output("ls a | wc -l") == "4\n");  // metrics, monitor, plan, and a checkpoint
  const std::string hang_up = "$TEXT --schedule constant --steps 400 --out a & \n" + until_begun + "kill -HUP $!; wait $!";
  const Result hung_up = shell("rm -r a; " + hang_up);
  CHECK(hung_up.code == 75);
  CHECK(contains(hung_up.out, "SIGHUP: stopped after step "));
  CHECK(shell("rm -r a; trap '' HUP; " + hang_up).code == 0);  // nohup
  CHECK(shell.metrics("a").size() == 400);
  CHECK(shell(steps + "closed <&- >&- 2>&-").code == 0);
  CHECK(shell.metrics("closed").size() == 40);  // each line is JSON
}

TEST_CASE("results that cannot be printed are an error, and nobody computes what nobody reads") {
  Workplace shell;
  CHECK(shell("$TEXT --out run >/dev/full").code == 0);  // training needs no terminal
  CHECK(shell.metrics("run").size() == 2);
  for (const char* command : {"$GPT --help", "$TEXT --plan", "$TEXT --plan --json", "$GPT --plan --days 9 --model gpt3-125m",
                              "$GPT --generate --out run --sample-len 3"})
    shell.refuses(command + std::string(" >/dev/full"), 1, {"standard output: cannot write"});
  const Result read = shell("{ $GPT --generate --out run --products none --sample-len 100000000; echo $? >code; } | head -c 40");
  CHECK(read.out.size() == 40);
  CHECK(read.error == "");
  CHECK(shell.content("code") == "141\n");
}

TEST_CASE("--train-minutes: as many steps as fit, and the curve of a run that is told their number") {
  Workplace shell;
  const std::string train = "$GPT --layers 1 --heads 1 --channels 16 --seq-len 16 --micro-batch 2 --min-lr 1e-5 --train text ";
  const auto planned = [](const std::string& out) {  // "steps     1 to 250 (0.01 minutes)"
    const size_t line = out.find("\nsteps "), begin = out.find(" to ", line) + 4;
    return out.substr(begin, out.find(' ', begin) - begin);
  };
  const std::string whole = shell.output(train + "--val text --val-batches 2 --train-minutes 0.01 --out a");
  CHECK(contains(whole, " (0.01 minutes)"));
  CHECK(std::stoi(planned(whole)) > 20);
  CHECK(shell.metrics("a").rbegin()[1]["lr"].get<double>() < 1.1e-5);
  shell.output(train + "--val text --val-batches 2 --out b --steps " + planned(whole));
  CHECK(shell.same_metrics("a", "b"));

  // A resumed run keeps the number, however fast its machine is.
  const Result stopped = shell(train + "--train-minutes 0.01 --out c --max-hours 0.000003");
  CHECK(stopped.code == 75);
  CHECK(planned(shell.output(train + "--train-minutes 0.01 --out c --resume")) == planned(stopped.out));

  const Result short_time = shell("$GPT --layers 4 --heads 4 --channels 256 --seq-len 64 --micro-batch 8 --train text --train-minutes 0.001 --out e");
  CHECK(contains(short_time.out, "--train-minutes 0.001: the time was over when 7 steps had been timed; one step follows\n"));
  CHECK(shell.metrics("e").size() == 1);
  CHECK(!contains(whole, "the time was over"));
  shell.refuses(train + "--train-minutes 0.02 --out c --resume", 2, {"--train-minutes 0.02 is not what", "--steps"});
  shell.refuses(train + "--train-minutes 1 --steps 5 --out d", 2, {"--train-minutes 1 beside --steps"});
  shell.refuses(train + "--train-minutes 0.01 --warmup 100000000 --out d", 2, {"--train-minutes 0.01 is", "--warmup"});
}

TEST_CASE("--sample-seconds: samples by the clock, which change no bit, and the planned time holds them") {
  Workplace shell;
  const auto samples = [](const std::string& out) {
    size_t lines = 0;
    for (size_t at = 0; (at = out.find("---\nline", at)) != std::string::npos; ++at) ++lines;
    return lines;
  };
  const std::string train = "$TEXT --steps 300 --val text --prompt line --sample-len 30 --checkpoint-every 100 ";
  const std::string often = shell.output(train + "--out a --sample-seconds 0.001");
  CHECK(samples(often) > 2);
  CHECK(samples(often) <= 150);  // at most one in two steps
  CHECK(samples(shell.output(train + "--out b")) == 0);
  CHECK(shell.same_metrics("a", "b"));
  shell.output("cmp a/step_00000300/model.safetensors b/step_00000300/model.safetensors");
  CHECK(samples(shell.output(train + "--out '' --checkpoint-every 0 --sample-seconds 1e6 --sample-every 100")) == 3);
  shell.output("rm -r a/step_00000300 && " + train + "--out a --resume --sample-seconds 0.01");
  CHECK(shell.same_metrics("a", "b"));

  const auto memory = [&](const std::string& options) { return Json::parse(shell.output("$TEXT --plan --json " + options))["ranks"]; };
  CHECK(memory("--sample-seconds 9") == memory("--sample-every 1"));
  CHECK(memory("--sample-seconds 0") != memory("--sample-every 1"));

  const auto steps = [&](const std::string& options) {
    shell.output("$GPT --layers 1 --heads 1 --channels 16 --seq-len 16 --train text --sample-len 100 --no-cache "
                 "--train-minutes 0.02 --overwrite --out timed " + options);
    return shell.metrics("timed").size();
  };
  const size_t most = steps("--sample-seconds 1e6");
  CHECK(3 * steps("--sample-seconds 0.001") < most);
  CHECK(3 * steps("--sample-every 1") < most);
}

TEST_CASE("a terminal shows the progress and the curve of the losses, as wide as it is" * doctest::skip(std::system("command -v script >/dev/null") != 0)) {
  Workplace shell;
  const auto shown = [&](const std::string& environment, int columns) {
    return shell.output("export TERM=dumb " + environment + "; script -qec \"stty cols " + std::to_string(columns) +
                        "; $TEXT --steps 40 --lr 1e-2 --log-every 100 --out ''\" /dev/null");
  };
  const std::string wide = shown("LC_ALL=C.UTF-8", 100), plain = shown("LC_ALL=C", 100), narrow = shown("LC_ALL=C.UTF-8", 20);
  CHECK(contains(wide, "] 39/40, "));
  CHECK(contains(wide, "█"));
  CHECK(contains(wide, "▁"));
  CHECK(!contains(plain, "█"));
  CHECK(contains(plain, " left #"));
  CHECK(contains(narrow, "\033[K39/40, 0m00s left"));
}

TEST_CASE("the end of a run says what to try next, in commands that work as they are") {
  Workplace shell;
  const auto command = [](const std::string& out, const std::string& title) {
    const size_t begin = out.find("\n" + title);
    return begin == std::string::npos ? "" : out.substr(begin + 11, out.find('\n', begin + 11) - begin - 11);
  };
  shell.output("cp text \"it's [a] text\" && ln -s \"$REFERENCE/../../dev\" dev");
  const std::string out = shell.output("$TINY --train \"it's [[]a] text\" --sample-len 5 --out \"a 'run'\" --overwrite");
  CHECK(shell.output(command(out, "to sample ") + " --sample-len 7").size() == 8);
  const std::string longer = shell.output(command(out, "to extend "));
  CHECK(shell.metrics("a 'run'").size() == 4);
  CHECK(contains(command(longer, "to extend "), " --resume --steps 8"));
  const std::string plot = command(out, "to plot   ");
  if (std::system("python3 -c 'import matplotlib' 2>/dev/null") == 0) {
    CHECK(shell.output(plot) == "wrote a 'run'/plot.png\n");
    CHECK(shell.content("a 'run'/plot.png").starts_with("\x89PNG"));
    shell.output(plot + " --output drawn.svg");
    CHECK(contains(shell.content("drawn.svg"), "<svg"));
  } else {
    CHECK(shell(plot).error == "error: a picture needs matplotlib: python3 -m pip install matplotlib\n");
  }
  CHECK(command(shell.output("$TEXT --out ''"), "to ").empty());
  CHECK(command(shell("$TEXT --steps 99999 --max-hours 0.0001 --out stopped").out, "to ").empty());
}

TEST_CASE("a spike: logged, left out, or rolled back from") {
  Workplace shell;
  // Repetition, which the model learns, then noise.
  std::string text, noise = some_text(3000);
  for (int i = 0; i < 300; ++i) text += "abcdefghijklmno\n";
  for (size_t i = 0; i < 64; ++i) text += char(33 + (i * i * 7 + i * 31) % 90);
  for (int i = 0; i < 300; ++i) text += "abcdefghijklmno\n";
  put(shell / "data", text);
  // Step 150 sees the first of the noise, as a target; steps 151 and 152 the rest.
  const std::string train = "$TINY --train data --lr 1e-2 --steps 200 --checkpoint-every 40 --spike-window 32 --spike-z 30 --out ";
  shell.output(train + "plain");
  for (std::string kind : {"log", "skip", "rollback"}) {
    CAPTURE(kind);
    const std::string out = shell.output(train + kind + " --on-spike " + kind);
    CAPTURE(out);
    CHECK(contains(out, "step   150/200 | loss "));
    CHECK(contains(out, " is a spike: above "));
    CHECK(contains(out, "update left out") == (kind == "skip"));
    // Step 121 to 150, of two samples each, then one batch more each time that step 121 sees noise.
    for (std::string back : {"rolled back from step 150 to step 120, and on without samples 240 to 299\n",
                             "rolled back from step 121 to step 120, and on without samples 240 to 301\n",
                             "rolled back from step 121 to step 120, and on without samples 240 to 303\n"})
      CHECK(contains(out, back) == (kind == "rollback"));
    CHECK(shell.same_metrics("plain", kind) == (kind == "log"));
    const std::vector<Json> lines = shell.metrics(kind);
    CHECK(lines.back()["step"] == 200);
    std::vector<Json> incidents = shell.all_metrics(kind);
    std::erase_if(incidents, [](const Json& line) { return !line.contains("incident"); });
    CHECK(incidents.empty() == (kind == "rollback"));  // whose lines say more
    if (kind != "rollback") CHECK(incidents[0]["step"] == 150);
    if (kind != "rollback") CHECK(contains(incidents[0]["incident"], kind == "log" ? ": logged" : ": update left out"));
    CHECK(lines.size() == (kind == "rollback" ? 203 : 200));  // three batches see noise: three rollbacks
    const Json trainer = Json::parse(shell.content(kind + "/step_00000200/trainer.json"));
    if (kind == "skip") CHECK(trainer["guard"]["left_out"].get<int>() >= 1);
    if (kind != "rollback") continue;
    CHECK(trainer["samples"] == 400 + 2 * 32);  // without steps 121 to 152
    const std::string metrics = shell.content("rollback/metrics.jsonl");
    const Json last = Json::parse(metrics.substr(metrics.rfind('\n', metrics.size() - 2) + 1));
    CHECK(last["lost_s"]["rollbacks"].get<double>() > 0);
  }
  // The first checkpoint is still being written when the spike comes.
  CHECK(contains(shell.output("$TINY --train data --lr 1e-2 --steps 151 --checkpoint-every 149 --spike-window 32 "
                              "--spike-z 30 --on-spike rollback --out first"),
                 "rolled back from step 150 to step 149"));
  shell.refuses("$TEXT --on-spike rollback --out x", 2, {"--on-spike rollback", "--checkpoint-every"});
}

TEST_CASE("--trace and --trace-tensors: what is trained, step by step, and no step that was measured and undone") {
  Workplace shell;
  const auto events = [&](const std::string& name) { return Json::parse(shell.content(name))["traceEvents"]; };
  const auto steps_of = [](const auto& lines, const std::string& operation) {
    std::vector<int> steps;
    for (const Json& line : lines)
      if (line.value("op", line.value("name", "")) == operation)
        steps.push_back((line.contains("args") ? line["args"] : line)["step"]);
    return steps;
  };
  shell.output("$GPT --layers 1 --heads 1 --channels 16 --seq-len 16 --train text --train-minutes 0.002 --out '' "
               "--trace trace.json --trace-tensors log");
  const Json timeline = events("trace.json");
  const std::vector<int> steps = steps_of(json_lines<Json>(shell / "log"), "cross_entropy");
  REQUIRE(steps.size() >= 2);
  for (size_t i = 0; i < steps.size(); ++i) CHECK(steps[i] == int(i / 2 + 1));  // losses and gradients
  CHECK(2 * steps_of(timeline, "cross_entropy").size() == steps.size());
  CHECK(std::any_of(timeline.begin(), timeline.end(), [](const Json& event) { return event["name"] == "thread_name"; }));

  // A run that is killed leaves its timeline: whole, or cut off in the middle of the last write. One whose disk is full
  // ends well.
  shell("$TEXT --steps 99999 --out '' --trace killed.json & \n"
        "until [ $(grep -sc cross_entropy killed.json) -ge 3 ]; do sleep 0.01; done; kill -KILL $!; wait $!");
  std::string killed = shell.content("killed.json");
  if (!Json::accept(killed)) killed = killed.substr(0, killed.rfind(",\n")) + "]}";
  CHECK(steps_of(Json::parse(killed)["traceEvents"], "cross_entropy").size() >= 3);
  // (A step takes some 9 KB, more on a slow machine, whose times have more digits; in dash 40 blocks are 20 KB.)
  const Result full = shell("ulimit -f 40; $TEXT --steps 20 --out '' --trace full.json");
  CHECK(full.code == 0);
  CHECK(std::count(full.error.begin(), full.error.end(), '\n') == 1);
  CHECK(contains(full.error, "--trace full.json: cannot write"));
  CHECK(contains(full.error, "incomplete"));
  CHECK(!steps_of(events("full.json"), "cross_entropy").empty());
  shell.refuses("$TEXT --out never --trace nowhere/trace.json", 1, {"--trace nowhere/trace.json: cannot open", "check"});
  CHECK(!shell.exists("never"));
}

// On many random meshes: test/ranks/test_meshes.cu.
TEST_CASE("--plan prints what the same command allocates, needs no data, and changes nothing") {
  Workplace shell;
  const std::string options = " --layers 2 --recompute gelu --sample-every 2 --out run ";
  const Json plan = Json::parse(shell.output("$TEXT" + options + "--plan --json"));
  CHECK(!shell.exists("run"));
  const std::string out = shell.output("$TEXT" + options);
  const std::string written = shell.content("run/plan.json");
  const Json run = Json::parse(written);
  CHECK(run["ranks"] == plan["ranks"]);
  CHECK(run["steps"] == 2);
  CHECK(plan["ranks"][0]["memory"].size() == 7);  // weights, gradients, optimizer, activations, workspace, cache, batches
  CHECK(plan["fits"] == true);
  for (const char* unknown : {"step_ms", "margin", "tokens_per_s", "mfu", "cost", "run", "time", "limit"}) {
    REQUIRE(plan.contains(unknown));
    CHECK((is_gpu_build() || plan[unknown].is_null()));
  }
  const auto line_of = [](const std::string& text) {
    const size_t begin = text.find("memory ");
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  CHECK(line_of(shell.output("$TEXT --overwrite --plan" + options)) == line_of(out));
  CHECK(shell.content("run/plan.json") == written);
  CHECK(shell.metrics("run").size() == 2);

  const Result unwritten = shell("mkdir -p other/plan.json && $TEXT --out other");
  CHECK(unwritten.code == 0);
  CHECK(contains(unwritten.error, "the run's plan could not be written, training goes on: "));
  CHECK(shell.output("ls other") == "metrics.jsonl\nmonitor.jsonl\nplan.json\nstep_00000002\n");

  CHECK(contains(shell.output("$TINY --plan"), "vocabulary 50257"));
  CHECK(contains(shell.output("$GPT --plan --init $REFERENCE/tiny --seq-len 16"), "model     2 layers"));
  const std::string large = shell.output("$GPT --plan --model gpt3-13b --ranks 64 --tp 4 --pp 4 --zero 1");
  CHECK(contains(large, "\n              3  "));
  CHECK(contains(shell.output("$GPT --plan --model gpt3-13b --micro-batch 64"), "fits      no: rank 0 needs the most, "));
}

TEST_CASE("--plan --cluster says how long a step takes and what it costs; --ceilings how long on this machine") {
  Workplace shell;
  const Json plan = Json::parse(shell.output("$TINY --plan --cluster 4x4090 --dtype bf16 --ranks 2 --json"));
  CHECK(plan["ranks"].size() == 2);
  CHECK(plan["device"]["name"] == "RTX 4090");
  CHECK(plan["device"]["here"] == false);
  CHECK(plan["device"]["reserve"] == 1 << 30);
  const double tokens_per_s = plan["tokens_per_s"], seconds = plan["step_ms"].get<double>() / 1000;
  CHECK(tokens_per_s * seconds == about(2 * 2 * 16));
  CHECK(plan["mfu"] > 0);
  CHECK(plan["margin"] == Json{{"shorter", -0.2}, {"longer", 0.3}, {"runs", "published runs on A100 and H100"}});
  CHECK(plan == Json::parse(shell.output("$TINY --plan --cluster 4x4090 --ranks 2 --json")));  // bf16 elsewhere, unless it is said
  CHECK(contains(shell.output("$TINY --plan --cluster 4x4090"), "parameters, bf16 (no --dtype was given)\n"));
  CHECK(plan["cost"]["dollars_per_hour"].get<double>() == about(2 * 0.6));
  CHECK(plan["cost"]["dollars_per_billion_tokens"].get<double>() == about(1.2 / 3600 * 1e9 / tokens_per_s));
  CHECK(plan["cost"]["spot_dollars_per_hour"].get<double>() == about(2 * 0.15));
  const double devices_hours = plan["run"]["days"].get<double>() * 24 * 2;  // 20 tokens for each parameter
  CHECK(plan["run"]["dollars"].get<double>() == about(devices_hours * 0.6));
  CHECK(plan["run"]["spot_dollars"].get<double>() < plan["run"]["dollars"].get<double>());
  CHECK(plan["run"]["spot_days"].get<double>() > plan["run"]["days"].get<double>());
  CHECK(Json::parse(shell.output("$TINY --plan --cluster 4x4090 --dtype bf16 --ranks 2 --json --steps 7"))["run"]["tokens"] == 7 * 2 * 2 * 16);
  double sum = 0;
  for (const auto& [name, part] : plan["time"].items())
    if (name != "pp") sum += (part.is_object() ? part["exposed"] : part).get<double>();  // pp's lengthen the bubble
  CHECK(sum == about(1000 * seconds));
  CHECK(plan["limit"].get<std::string>().find("of the step") != std::string::npos);

  CHECK(Json::parse(shell.output("$TINY --plan --cluster 4x4090 --json"))["ranks"].size() == 4);
  const Json mine = {{"name", "mine"}, {"device", "H100"}, {"devices_per_host", 1}, {"hosts", 1}};
  shell.output("echo '" + mine.dump() + "' > mine.json");
  const Json unpriced = Json::parse(shell.output("$TINY --plan --cluster mine.json --json"));
  CHECK(unpriced["step_ms"] > 0);
  CHECK(unpriced["cost"].is_null());
  const std::string text = shell.output("$GPT --plan --cluster 4x4090 --model gpt3-1.3b --dtype bf16 --ranks 2");
  CHECK(contains(text, "too little; --tp 2 would help most, by "));
  CHECK(contains(text, " ms a step (published runs on A100 and H100: -20 to +30 %), "));
  CHECK(contains(text, "), 1.20 an hour, "));
  double days = 0, least_days = 0, most_days = 0;
  REQUIRE(std::sscanf(text.substr(text.find(" tokens: ")).c_str(), " tokens: %lf days (%lf to %lf)", &days, &least_days, &most_days) == 3);
  CHECK(least_days == about(0.8 * days, 0.01 / days));
  CHECK(most_days == about(1.3 * days, 0.01 / days));
  CHECK(!contains(text, "no --dtype"));
  CHECK(contains(text, "\nhint      if --lr 0.0003 is right for 4 samples, 0.000424 is for these by the square-root rule"));
  CHECK(!contains(shell.output("$GPT --plan --cluster 4x4090 --model gpt2 --ranks 2 --global-batch 8"), "hint"));

  const std::string device = Json::parse(shell.output("$TINY --plan --json"))["device"]["name"];
  shell.output("echo '" + made_up_ceilings(device).dump() + "' > marks.json");
  const Json here = Json::parse(shell.output("$TINY --plan --ceilings marks.json --json"));
  CHECK(here["step_ms"] > 0);
  CHECK(here["cost"].is_null());
  const Json old = {{"device", device}, {"copy_bytes_per_s", 1e10}, {"flops_per_s", {{"fp32", 1e11}}}};
  shell.output("echo '" + old.dump() + "' > old.json");
  shell.refuses("$TINY --plan --ceilings old.json", 1, {"old.json", "update_bytes_per_s", "measure it again with dev/ceilings"});
}

TEST_CASE("without a driver: --help, and plans for a cluster as with one; the rest says in one line what is missing" *
          doctest::skip(is_gpu_build())) {
  Workplace shell;
  const std::string without = "GPT_CPU_DEVICES=0 ";
  for (const char* command : {"$GPT --help", "$TINY --plan --cluster 8xh100 --zero 3 --recompute block --offload activations,gradients,optimizer",
                              "$GPT --plan --cluster 8xh100 --model gpt3-1.3b --tp 2 --pp 2 --zero 2 --fp8 --attention hopper",
                              "$GPT --plan --cluster 16x8xh100,16x8xa100-80 --model gpt2", "$GPT --plan --budget 100 --json"})
    CHECK(shell.output(without + command) == shell.output(command));
  CHECK(contains(shell.output(without + "$GPT --plan --cluster 8xh100 --model gpt2 --mesh auto"), "\nfastest   "));
  const Texts missing = {"this is the GPU build and no GPU can be used (", "nvidia-smi", "make cpu", "--cluster"};
  for (const char* command : {"$TINY --plan", "$GPT --plan --model gpt2 --mesh auto", "$TEXT --out none", "$GPT --train text --model d1 --mesh auto", "$GPT --generate --init $REFERENCE/tiny"})
    shell.refuses(without + command, 1, missing);
}

TEST_CASE("--plan --cluster counts the host's memory: what is offloaded, what stays free, and a snapshot if there is room") {
  Workplace shell;
  const double gib = 1 << 30;
  const auto planned = [&](double host_bytes, const std::string& options) {
    const Json mine = {{"name", "mine"}, {"device", "H100"}, {"devices_per_host", 1}, {"hosts", 1}, {"host_memory_gib", host_bytes / gib}};
    put(shell / "mine.json", mine.dump());
    return shell.output("$GPT --plan --cluster mine.json --model gpt2 --offload optimizer " + options);
  };
  const Json host = Json::parse(planned(100 * gib, "--json"))["ranks"][0]["host"];
  const double offloaded = host["optimizer"], all = offloaded + host["snapshot"].get<double>(), little = 1 << 20;
  CHECK(offloaded > 12 * 124e6);
  CHECK(all > 24 * 124e6);
  CHECK(contains(planned(gib + all + little, ""), ", snapshot 1.39 GiB, "));
  CHECK(!contains(planned(gib + all - little, ""), "snapshot"));
  CHECK(contains(planned(gib + offloaded + little, ""), "fits      yes: "));
  CHECK(contains(planned(gib + offloaded - little, ""), "fits      no: --offload takes 1.39 GiB of the host's memory for a rank, which has 2.39 GiB, of which 1.00 GiB stay free"));
}

TEST_CASE("--calibrate measures steps of this model, and --plan --cluster takes what it writes; a run ends beside its forecast") {
  Workplace shell;
  const std::string step = " --layers 2 --heads 2 --channels 64 --seq-len 64 --micro-batch 4 ";
  const std::string train = "$GPT --train text" + step;
  CHECK(!contains(shell.output(train + "--steps 3 --out run"), is_gpu_build() ? "no such line" : "forecast"));
  const std::string files = shell.output("ls"), before = shell.output("md5sum run/*.* run/*/*");
  const std::string out = shell.output(train + "--steps 9999 --warmup 999 --checkpoint-every 1 --out run --calibrate m.json");
  CHECK(contains(out, "step    22/22"));
  CHECK(shell.output("md5sum run/*.* run/*/*") == before);
  CHECK(shell.output("rm m.json; ls") == files);
  shell.output(train + "--calibrate m.json --val text --val-every 1");
  shell.refuses(train + "--calibrate m.json", 2, {"--calibrate 'm.json' is there already", "--overwrite"});
  const std::string again = shell.output(train + "--calibrate m.json --overwrite");
  CHECK(contains(again, "\nbefore    forecast "));
  CHECK(contains(again.substr(again.find("\nafter ")), " attention +0, memory +0, "));
  double forecast = 0, measured = 0;
  REQUIRE(std::sscanf(again.substr(again.find("\nafter ")).c_str(), " after forecast %lf ms, measured %lf", &forecast, &measured) == 2);
  // A step has its kernels, and each kind of them has its measured time in the forecast. Only launches are added.
  CHECK(forecast < 1.3 * measured);
  CHECK(forecast > 0.5 * measured);  // what is left is gaps
  const Json file = Json::parse(shell.content("m.json"));
  CHECK(contains(file["source"], "2 layers of 64 channels"));
  CHECK(file["device"]["memory_gib"] > 0);
  CHECK(!file.contains("links"));
  for (const char* kind : {"products", "attention", "memory"}) CHECK(file["device"]["measured"][kind] > 0);
  const Json plan = Json::parse(shell.output("$GPT --plan --vocab 256 --dtype fp32 --json --cluster m.json" + step));
  CHECK(plan["step_ms"].get<double>() == about(forecast, 1e-3));  // four digits were printed
  CHECK(plan["device"]["name"] == file["device"]["name"]);
  CHECK(plan["ranks"].size() == 1);

  const auto last_line = [&](const std::string& options) {
    std::string text = shell.output(train + "--cluster m.json --out with --overwrite " + options);
    text.pop_back();
    return text.substr(text.rfind('\n') + 1);
  };
  std::string line = last_line("--steps 4");
  double expected = 0, took = 0, parts[4] = {};
  REQUIRE(std::sscanf(line.c_str(), "forecast %lf ms, measured %lf: computation %lf", &expected, &took, parts) == 3);
  CHECK(expected == about(forecast, 1e-3));
  // Times are printed with four digits, differences with three, and at most two behind the point.
  const auto differ_by = [&](std::initializer_list<double> differences) {
    double sum = 0, rounded = 5e-4 * (took + expected);
    for (double part : differences) sum += part, rounded += 5e-3 * std::abs(part) + 0.005;
    return std::abs(sum - (took - expected)) <= rounded;
  };
  CHECK(differ_by({parts[0]}));
  CHECK(Json::parse(shell.content("with/plan.json"))["step_ms"].get<double>() == about(forecast, 1e-3));
  std::vector<double> times;
  for (const Json& fields : Json::parse("[" + shell.output("paste -sd, with/metrics.jsonl") + "]")) times.push_back(fields["step_ms"]);
  CHECK(took == about(std::max(times[2], times[3]), 1e-3));  // of the steps after the first two
  line = last_line("--steps 4 --profile");
  REQUIRE(std::sscanf(line.c_str(), "forecast %*f ms, measured %lf: products %lf, attention %lf, memory %lf, launches %lf", &took,
                      &parts[0], &parts[1], &parts[2], &parts[3]) == 5);
  CHECK(differ_by({parts[0], parts[1], parts[2], parts[3]}));
  CHECK(last_line("--steps 2").ends_with(" ms; a start's first steps are not measured"));
}

TEST_CASE("--plan --mesh auto lists what is fastest and cheapest, with commands that the program plans the same way") {
  Workplace shell;
  const std::string model = "$GPT --plan --cluster 4x4090 --model gpt2 --dtype bf16 --json ";
  const Json found = Json::parse(shell.output(model + "--mesh auto --global-batch 64"));
  CHECK(found["candidates"] > 500);
  CHECK(found["too_large"] > 0);
  for (const char* list : {"fastest", "cheapest"}) {
    REQUIRE(found[list].size() == 10);
    for (const Json& c : found[list]) {
      const std::string command = c["command"], ranks = std::to_string(c["ranks"].get<int>());
      CAPTURE(command);
      if (&c != &found[list][0] && &c != &found[list][9]) continue;
      const std::string options = command.substr(command.find("--global-batch"));
      const Json plan = Json::parse(shell.output(model + "--ranks " + ranks + " " + options));
      CHECK(contains(command, "--model gpt2 --dtype bf16 --global-batch 64 "));
      CHECK(plan["fits"] == true);
      size_t largest = 0;
      for (const Json& rank : plan["ranks"]) largest = std::max(largest, rank["total"].get<size_t>());
      CHECK(c["memory"] == largest);
      CHECK(c["step_ms"].get<double>() == about(plan["step_ms"].get<double>()));
      CHECK(c["cost"]["dollars_per_billion_tokens"].get<double>() ==
            about(plan["cost"]["dollars_per_billion_tokens"].get<double>(), 1e-6));
    }
  }
  for (size_t i = 1; i < 10; ++i) {
    CHECK(found["fastest"][i - 1]["step_ms"] <= found["fastest"][i]["step_ms"]);
    CHECK(found["cheapest"][i - 1]["device_hours_per_billion_tokens"] <= found["cheapest"][i]["device_hours_per_billion_tokens"]);
  }
  CHECK(found["fastest"][0]["ranks"] == 4);
  CHECK(contains(shell.output("$GPT --plan --cluster 4x4090 --model gpt3-1.3b --dtype bf16 --mesh auto"), "\nsearched  "));
  CHECK(contains(shell.output("$GPT --plan --cluster 4x4090 --model gpt3-13b --dtype bf16 --mesh auto"),
                 "\nfits      none fits: the smallest, --global-batch 16 --micro-batch "));
  const std::string words = shell.output("$GPT --plan --cluster 4x4090 --mesh auto --ranks 2 --steps=7 --out 'it'\\''s $here'");
  CHECK(contains(words, "mpirun -np 2 "));
  CHECK(contains(words, "train_gpt --steps=7 --out 'it'\\''s $here' --dtype bf16 --global-batch 8 --micro-batch "));
  const Json timed = Json::parse(shell.output("$GPT --plan --cluster 4x4090 --ranks 2 --train-minutes 10 --json"));
  CHECK(timed["run"]["tokens"].get<double>() == about(600 * timed["tokens_per_s"].get<double>()));
  CHECK(contains(shell.output("$GPT --plan --cluster 4x4090 --mesh auto --json --model gpt3-13b --out $'\\xff'"), "\"problem\":\"none fits: "));
  shell.refuses("$GPT --plan --mesh auto", 2, {"--plan --mesh auto", "--cluster", "--ceilings"});
  // Weights travel with ZeRO only, which the search chooses.
  const std::string sixteen = "$GPT --plan --mesh auto --cluster 16x8xh100 --ranks 16 --model gpt2 --json";
  const Json gathered = Json::parse(shell.output(sixteen + " --compress-weights int8")), plain = Json::parse(shell.output(sixteen));
  CHECK(gathered["candidates"] < plain["candidates"]);
  REQUIRE(gathered["fastest"].size() == 10);
  for (const Json& one : gathered["fastest"]) CHECK(contains(one["command"], "--zero "));
  shell.refuses("$TEXT --cluster 8xh100,8xa100-80 --out ''", 2, {"--cluster '8xh100,8xa100-80': no such file", "(two clusters, A,B, are for --plan alone)"});
}

// A group has 3 buffers of 9.2 MiB for each of its CTAs, 4 of the world and 8 of others, and one more for each rank that sends
// codes to this one: the 15 others, or with hosts of 8 the one with its place in the other host.
TEST_CASE("a plan's NCCL buffers are those of the groups that gradients and weights travel in") {
  Workplace shell;
  const auto buffers = [&](const std::string& options) {
    const Json plan = Json::parse(shell.output("$GPT --plan --cluster 16x8xh100 --ranks 16 --model gpt2 --zero 1 --micro-batch 1 --global-batch 16 --json " + options));
    return plan["ranks"][0]["memory"]["NCCL"].get<double>() / (9.2 * (1 << 20));
  };
  CHECK(buffers("") == about(3 * 4 + 3 * 8, 1e-6));
  CHECK(buffers("--compress int8") == about(3 * 4 + (3 + 15) * 8, 1e-6));
  CHECK(buffers("--compress int8 --compress-where hosts") == about(3 * 4 + (3 * 3 + 1) * 8, 1e-6));
  CHECK(buffers("--compress-weights int8") == about(3 * 4 + 3 * 8, 1e-6));
  CHECK(buffers("--compress-weights int8 --compress-where hosts") == about(3 * 4 + 3 * 3 * 8, 1e-6));
}

TEST_CASE("--plan --days, --budget: what can be trained, and where it is cheapest") {
  Workplace shell;
  const std::string goal = "$GPT --plan --dtype bf16 --json ";
  const Json days = Json::parse(shell.output(goal + "--model gpt3-350m --days 5 --cluster 8xa100-80"));
  CHECK(days["meets_goal"] == true);
  REQUIRE(days["rows"].size() == 1);
  const Json& row = days["rows"][0];
  CHECK(row["run"]["days"] <= 5);
  CHECK(row["tokens_within_goal"].get<double>() == about(row["tokens_per_s"].get<double>() * 5 * 86400 * (1 - row["run"]["lost"].get<double>())));
  CHECK(contains(row["command"], "train_gpt --dtype bf16 --model gpt3-350m --global-batch 512 "));
  CHECK(contains(row["command"], " --steps " + std::to_string(std::lround(std::ceil(days["tokens"].get<double>() / (512 * 2048))))));
  const Json parts = Json::parse(shell.output(goal + "--model gpt3-350m --days 1 --cluster 8xa100-80"));
  CHECK(parts["rows"][0]["ranks"] > row["ranks"]);  // sooner on more of the devices

  // The largest model of GPT-3's whose tokens the budget pays, on any cluster; a smaller one for less
  const Json large = Json::parse(shell.output(goal + "--budget 2000")), small = Json::parse(shell.output(goal + "--budget 100"));
  CHECK(large["parameters"] > small["parameters"]);
  CHECK(large["tokens"].get<double>() == about(20 * large["parameters"].get<double>()));
  CHECK(std::min(large["rows"][0]["run"]["dollars"], large["rows"][0]["run"]["spot_dollars"]) <= 2000);
  CHECK(contains(large["rows"][0]["command"], "--model " + large["model"].get<std::string>()));

  const std::string missed = "$GPT --plan --dtype bf16 --model gpt3-13b --days 1 --cluster 8xa100-80";
  const Result unmet = shell(missed), as_json = shell(missed + " --json");
  CHECK(contains(unmet.out, "goal      --days 1 is not met"));
  CHECK(contains(unmet.out, "\nreach     8 of 8xa100-80: "));
  CHECK(Json::parse(as_json.out)["meets_goal"] == false);
  for (const Result& result : {unmet, as_json}) {
    CHECK(result.code == 1);
    CHECK(result.error == "train_gpt: --days 1 is not met: raise --days or --budget, or choose a smaller model\n");
  }
  shell.refuses("$GPT --plan --dtype bf16 --model gpt3-13b --days 1 --steps 1000000 --cluster 8xa100-80", 1,
                {"--days 1: no part of the cluster 8xa100-80 trains gpt3-13b on ", "raise --days or --budget, or lower --steps"});
  shell.refuses("$GPT --plan --dtype bf16 --model gpt3-13b --days 9 --cluster 4x4090", 1, {"--days 9: none fits: the smallest, ", " too little: "});
  shell.refuses("$GPT --plan --budget 0.01", 1, {"--budget 0.01: no part of any cluster of runtime/planner/clusters trains gpt3-125m", "raise --days or --budget"});
}

TEST_CASE("--mesh auto trains with the fastest mesh, by the rates that dev/ceilings measured") {
  Workplace shell;
  const std::string device = Json::parse(shell.output("$TINY --plan --json"))["device"]["name"];
  shell.output("echo '" + made_up_ceilings(device).dump() + "' > marks.json");
  const std::string train = "$GPT --train text --layers 2 --heads 2 --channels 32 --seq-len 16 --steps 2 --out '' --mesh auto ";
  const std::string out = shell.output(train + "--global-batch 6 --ceilings marks.json");
  CHECK(contains(out, "auto      --global-batch 6 --micro-batch "));
  CHECK(contains(out, "step     2/2"));
  if (!is_gpu_build()) shell.refuses(train, 2, {"--mesh auto", "no rates", "dev/ceilings", "--ceilings"});
}

TEST_CASE("memory of the host: room for a snapshot is taken at the start; none: checkpoints are written in chunks" *
          doctest::skip(is_gpu_build())) {
  Workplace shell;
  // One thread: stacks count, too.
  const std::string train = "OMP_NUM_THREADS=1 GPT_SEPARATE_ARRAYS= $TEXT --layers 8 --heads 4 --channels 256 --micro-batch 1 --out ";
  const auto with_limit = [&](size_t kilobytes, const std::string& command) {
    return "ulimit -d " + std::to_string(kilobytes) + " && " + command;
  };
  const std::string out = shell.output(train + "whole");
  CHECK(contains(out, "; host memory: snapshot 7"));  // 12 bytes for each of 6.4 million parameters
  // The limit under which a command has `bytes` for its arrays and a snapshot, by what its plan finds free under another one.
  const size_t mib = 1 << 20, limit = 2'000'000 * 1024ul;
  if (shell(with_limit(limit / 1024, "$GPT --help")).code != 0) return skip("AddressSanitizer takes all address space");
  const auto planned = [&](size_t bytes, const std::string& command) {
    return Json::parse(shell.output(with_limit(bytes / 1024, command + "--plan --json")));
  };
  const auto limit_for = [&](size_t bytes, const std::string& command) {
    return (limit - planned(limit, command)["device"]["bytes"].get<size_t>() + bytes) / 1024;
  };
  const auto needed = [&](const std::string& command) { return planned(limit, command)["ranks"][0]["total"].get<size_t>(); };
  const size_t arrays = needed(train + "'' "), reserve = 64 * mib, snapshot = 74 * mib, readers = 4 * 8 * mib;  // stacks of threads that read ahead
  CHECK(contains(shell.output(with_limit(limit_for(arrays + reserve + snapshot + readers + 8 * mib, train + "'' "), train + "room")), "; host memory: snapshot 7"));
  const std::string parts = shell.output(with_limit(limit_for(arrays + reserve + snapshot / 2 + readers, train + "'' "), train + "parts"));
  CHECK(contains(parts, "no room for a snapshot in the host's memory of rank 0 ("));
  CHECK(!contains(parts, "host memory: snapshot"));
  for (const char* file : {"model.safetensors", "optimizer.safetensors"})
    shell.output("cmp whole/step_00000002/" + std::string(file) + " parts/step_00000002/" + file);
  CHECK(contains(shell.output(train + "parts --steps 3 --warmup 0 --resume"), "steps     3 to 3"));
  // A plan that just fits can be trained.
  const std::string larger = train + "'' --micro-batch 16 --seq-len 128 ";
  const size_t just_enough = limit_for(needed(larger) + reserve + mib, larger);
  CHECK(planned(just_enough * 1024, larger)["fits"] == true);
  CHECK(contains(shell.output(with_limit(just_enough, larger)), "step     2/2"));
  shell.refuses(with_limit(limit_for(arrays + reserve - 8 * mib, train + "'' "), train + "none"), 1, {"not enough memory: ", "weights ", "64.0 MiB are left"});
  CHECK(!shell.exists("none"));
}

TEST_CASE("the bill counts over restarts") {
  Workplace shell;
  const std::string train = "$TEXT --steps 6 --checkpoint-every 2 --val text --val-every 2 --val-batches 2 --price 3.6 --out run";
  const auto last_line = [&] {  // of training
    Json last;
    std::istringstream lines(shell.content("run/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);)
      if (contains(line, "hours")) last = Json::parse(line);
    return last;
  };
  std::string out = shell.output(train);
  CHECK(contains(out, "bill      192 tokens"));
  CHECK(contains(out, "(1 x 3.6 an hour)"));
  const Json first = last_line();
  CHECK(first["cost"].get<double>() == about(3.6 * first["hours"].get<double>()));
  CHECK(first["lost_s"]["checkpoints"].get<double>() > 0);
  CHECK(first["lost_s"]["evaluation"].get<double>() > 0);
  CHECK(first["restarts"] == 0);
  shell.output("rm -r run/step_00000006 run/step_00000004");
  shell.output(train + " --resume");
  const Json second = last_line();
  CHECK(second["restarts"] == 1);
  CHECK(second["hours"].get<double>() > first["hours"].get<double>());
  CHECK(second["lost_s"]["restarts"].get<double>() > 0);
  CHECK(second["lost_s"]["evaluation"].get<double>() > first["lost_s"]["evaluation"].get<double>());
  shell.output("rm -r run/step_00000006");
  CHECK(contains(shell.output(train + " --resume --price 7200"), "(now 1 x 7200 an hour)"));
  const Json third = last_line();
  const double more = third["hours"].get<double>() - second["hours"].get<double>();
  CHECK(third["cost"].get<double>() == about(second["cost"].get<double>() + 7200 * more));
}

TEST_CASE("a plan for two kinds of devices: twice the same kind is one cluster, shares by speed make the step shorter") {
  Workplace shell;
  const auto cluster = [&](const std::string& name, const std::string& device, int hosts) {
    put(shell / name, R"({"name": ")" + name + R"(", "device": ")" + device + R"(", "devices_per_host": 4, "hosts": )" + std::to_string(hosts) +
        R"(, "links": {"inside": {"kind": "NVLink", "gb_per_s": 300, "latency_us": 3}, "between": {"kind": "InfiniBand", "gb_per_s": 100, "latency_us": 10}}})");
  };
  cluster("two", "H100", 2), cluster("four", "H100", 4), cluster("old", "A100-80", 2);
  const std::string plan = "$GPT --plan --model gpt3-1.3b --micro-batch 1 --global-batch 64 --zero 1 --recompute block --cluster ";
  const auto step_of = [](const std::string& out) { return std::stod(out.substr(out.find("\nstep ") + 6)); };
  const double one = Json::parse(shell.output(plan + "four --json"))["step_ms"];
  CHECK(step_of(shell.output(plan + "two,two")) == about(one, 0.05 / one));
  const std::string even = shell.output(plan + "two,old"), shared = shell.output(plan + "two,old --shares auto");
  CHECK(contains(even, "kind      8 x A100-80: 4 micro-batches at most, "));
  CHECK(contains(even, "1.00 times as long"));
  CHECK(step_of(even) > 1.3 * step_of(shared));
  CHECK(contains(shared, "; with equal shares " + even.substr(even.find("\nstep ") + 11, even.find(" ms, ", even.find("\nstep ")) - even.find("\nstep ") - 11) + " ms"));
  shell.refuses(plan + "two,old --mesh auto --micro-batch 1", 2, {"--mesh auto"});
  shell.refuses(plan + "two,old --pp 2", 2, {"two kinds of devices", "--pp"});
  shell.refuses(plan + "two,old --fp8", 2, {"--fp8", "A100-80"});
  shell.refuses(plan + "two,old --json", 2, {"two kinds of devices", "--json"});
  shell.refuses(plan + "two,none", 1, {"'none'", "no such file"});
}

// Steps of 20 ms or more, so that the host's own work between them is small beside them.
TEST_CASE("steps and what was lost add up to the bill: evaluation, checkpoints, texts, a restart, a rollback") {
  Workplace shell;
  std::string text;  // a rollback from step 25, which sees the noise
  for (int i = 0; i < 768; ++i) text += "abcdefghijklmno\n";
  for (size_t i = 0; i < 512; ++i) text += char(33 + (i * i * 7 + i * 31) % 90);
  for (int i = 0; i < 900; ++i) text += "abcdefghijklmno\n";
  put(shell / "text", text);
  const std::string train = "$GPT --layers 2 --heads 2 --channels 96 --seq-len 64 --micro-batch 8 --train text --lr 1e-2 --steps 35 "
                            "--log-every 10 --val text --val-batches 8 --val-every 10 --sample-every 10 --sample-len 160 "
                            "--checkpoint-every 10 --check-sync 9 --out ";
  std::string out;
  std::vector<Json> lines;
  const auto accounted = [&](const std::string& run) {
    lines = shell.all_metrics(run);
    const Accounted accounted(lines);
    MESSAGE(run << ": not accounted for: " << 100 * accounted.missing() << " % of " << accounted.bill << " s");
    return accounted;
  };
  accounts_for_its_time([&] {
    out = shell.output(train + "run --overwrite");
    return accounted("run").missing();
  });
  const Accounted run = accounted("run");
  const Json lost = lines.back()["lost_s"];
  for (const char* what : {"setup", "checkpoints"}) CHECK(lost[what].get<double>() > 0);
  for (const char* what : {"evaluation", "samples"}) CHECK(lost[what].get<double>() > unaccounted * run.bill);
  for (const char* share : {"time      compute ", "; set-up ", ", checkpoints ", ", evaluation ", ", samples ", "; goodput "})
    CHECK_MESSAGE(contains(out, share), out);
  CHECK(bill_at_end(out, run.steps) > 0.998 * run.bill);

  // As after a crash between steps 30 and 35: those are trained once more.
  accounts_for_its_time([&] {
    shell.output("rm -rf resumed && cp -r run resumed && rm -r resumed/step_00000035 && " + train + "resumed --resume");
    return accounted("resumed").missing();
  });
  CHECK(accounted("resumed").bill > 1.1 * run.bill);
  CHECK(lines.back()["lost_s"]["setup"].get<double>() > lost["setup"].get<double>());
  CHECK(lines.back()["lost_s"]["restarts"].get<double>() > 0);

  accounts_for_its_time([&] {
    out = shell.output(train + "back --overwrite --spike-window 8 --spike-z 20 --on-spike rollback");
    return accounted("back").missing();
  });
  CHECK(contains(out, "rolled back from step 25 to step 20"));
  const double steps = accounted("back").steps;
  CHECK(lines.back()["lost_s"]["rollbacks"].get<double>() > 4 * steps / 40);  // five steps, and loading
}

TEST_CASE("metrics hold texts as they are drawn, and what the guard finds wrong") {
  Workplace shell;
  const auto texts = [&](const std::string& key, const std::string& out) {
    std::vector<std::pair<int, std::string>> all;
    for (const Json& line : shell.all_metrics(out))
      if (line.contains(key)) all.emplace_back(line["step"], line[key]);
    return all;
  };
  const std::string train = "$TEXT --steps 6 --checkpoint-every 2 --sample-every 2 --sample-len 9 --prompt 'a \"b' --out ";
  const std::string out = shell.output(train + "a");
  const auto drawn = texts("sample", "a");
  REQUIRE(drawn.size() == 3);
  for (int i = 0; i < 3; ++i) CHECK(drawn[size_t(i)].first == 2 * i + 2);
  CHECK(drawn[0].second.starts_with("a \"b"));
  CHECK(shell.all_metrics("a").back().contains("goodput"));
  shell.output("rm -r a/step_00000006 && " + train + "a --resume");
  CHECK(texts("sample", "a") == drawn);

  const std::string overflows = "$TEXT --dtype fp16 --loss-scale 16777216 --steps 6 --checkpoint-every 3 --out ";
  if (shell(overflows + "b").code != 0) return skip("this build leaves fp16 out");
  const auto incidents = texts("incident", "b");
  REQUIRE(!incidents.empty());
  CHECK(incidents[0].first == 1);
  CHECK(contains(incidents[0].second, "not finite: update left out"));
  shell.output("rm -r b/step_00000006 && " + overflows + "b --resume");
  CHECK(texts("incident", "b") == incidents);
}
