// Runs of several ranks that go on from a checkpoint: on the same mesh with the same bits, on any other with the same curve. What
// the ranks compute is the business of test/ranks/test_zero.cu.
#include "test/rank_workplace.h"
#include "test/turns.h"

namespace {

// How a job is spread, and after which step it ends.
struct Leg {
  int steps, ranks, zero, micro_batch, tp = 1;
  const char* split = "";  // of layers and sequences
  std::string options() const {
    return " --steps " + std::to_string(steps) + " --zero " + std::to_string(zero) + " --micro-batch " + std::to_string(micro_batch) +
           " --tp " + std::to_string(tp) + split;
  }
};

// Root-mean-square of the relative differences.
double distance(const std::vector<Json>& a, const std::vector<Json>& b, const char* key) {
  REQUIRE(a.size() == b.size());
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) squares += std::pow(a[i][key].get<double>() / b[i][key].get<double>() - 1, 2);
  return std::sqrt(squares / double(a.size()));
}

const std::string job_of_islands = "$TEXT --share-gpu --micro-batch 1 --global-batch 8 --seed 3 --steps ";

void same_weights(const Workplace& shell, const std::string& a, const std::string& b) {
  for (const char* file : {"/model.safetensors", "/optimizer.safetensors"}) CHECK(shell.content(a + file) == shell.content(b + file));
}

}  // namespace

TEST_CASE("a checkpoint of any mesh goes on in any other, with the same curve" * doctest::skip(!mpirun_found)) {
  RankWorkplace shell;
  // Sizes that nothing divides, and gradients that travel every way.
  const std::string job = " $GPT --share-gpu --train text --layers 4 --heads 6 --channels 102 --seq-len 24 --schedule constant "
                          "--lr 1e-3 --global-batch 12 --resume --out ";
  const std::vector<Leg> one_rank = {{10, 1, 0, 2}},
                         in_fp32 = {{2, 3, 3, 1, 1, " --cp 3 --cp-method ulysses"},
                                    {4, 4, 1, 1, 1, " --pp 2 --pp-schedule zb"},
                                    {5, 1, 0, 2},
                                    {6, 6, 0, 1, 3, " --pp 2 --pp-schedule interleaved"},
                                    {7, 4, 2, 1, 1, " --cp 2"},
                                    {9, 8, 1, 3, 2, " --cp 2 --pp 2"},
                                    {10, 4, 3, 1, 1, " --pp 2 --pp-schedule gpipe"}},
                         in_bf16 = {in_fp32[0], in_fp32[3], in_fp32[4], in_fp32[6]};  // what is saved is fp32 there, too
  std::vector<Json> wanted;
  for (std::string dtype : {"fp32", "bf16"}) {
    CAPTURE(dtype);
    const auto train = [&](const std::string& out, const std::vector<Leg>& parts) {
      for (const Leg& leg : parts)
        shell.output("$MPIRUN " + std::to_string(leg.ranks) + job + out + leg.options() + " --dtype " + dtype);
      return shell.metrics(out);
    };
    const std::vector<Json> alone = train(dtype, one_rank), relay = train(dtype + ".relay", dtype == "fp32" ? in_fp32 : in_bf16);
    // test/README.md, Curves, of one rank's fp32 curve: fp32 within 1e-5, in bf16 losses within twice the distance of one
    // rank's bf16 curve, in root-mean-square. (Norms in bf16: test/ranks/test_zero.cu.)
    if (dtype == "fp32") wanted = alone;
    if (dtype == "fp32") CHECK_WITHIN("fp32 losses", largest_difference(relay, wanted, "loss"), 1e-5);
    if (dtype == "fp32") CHECK_WITHIN("fp32 norms", largest_difference(relay, wanted, "grad_norm"), 1e-5);
    CHECK(relay[0]["comm_bytes_by_group"]["cp"].contains("all_to_all"));    // Ulysses and
    CHECK(relay[6]["comm_bytes_by_group"]["cp"].contains("send_receive"));  // the ring give the same curve
    if (dtype == "bf16") CHECK_WITHIN("bf16 losses", distance(relay, wanted, "loss"), 2 * distance(alone, wanted, "loss"));
  }
  const std::string generate = " $GPT --share-gpu --generate --out fp32.relay --prompt line --sample-len 5 --top-k 1";
  const std::string sample = shell.output("$MPIRUN 1" + generate);
  CHECK(sample.size() == 10);
  for (const char* split : {" --pp 2 --tp 2", " --cp 2 --tp 2", " --cp 2 --cp-method ulysses --pp 2 --no-cache"})
    CHECK(shell.output("$MPIRUN 4" + generate + split) == sample);
}

TEST_CASE("on the same mesh a resumed run gives the same bits" * doctest::skip(!mpirun_found)) {
  RankWorkplace shell;
  for (const std::string& options : in_turn<std::string>({"--zero 1 --dtype bf16 --stochastic-rounding --shuffle", "--zero 1 --delay 1",
                              "--zero 2 --dtype bf16 --reduce-dtype bf16", "--zero 2 --compress int4 --check-sync 2",
                              "--compress int8 --on-spike skip --check-sync 1", "--zero 1 --compress int8 --delay 1 --check-sync 1",
                              "--zero 1 --compress int8 --compress-weights int8 --check-sync 2",
                              "--compress powersgd:2 --on-spike skip --check-sync 1", "--zero 1 --compress powersgd:3 --delay 1 --check-sync 1",
                              "--tp 3 --heads 3 --channels 48 --seq-len 24 --recompute block",
                              "--pp 3 --layers 3 --pp-schedule zb", "--cp 3 --seq-len 18 --zero 3 --recompute block --moments bf16 --offload gradients,optimizer,activations"})) {
    CAPTURE(options);
    const std::string job = "$MPIRUN 3 $TEXT --share-gpu --global-batch 12 --steps 6 --checkpoint-every 3 "
                            "--val text --val-every 2 --val-batches 2 " + options + " --out ";
    shell.output("rm -rf a b && " + job + "a && cp -r a b && rm -r b/step_00000006 && " + job + "b --resume");
    const auto bits = [&](const std::string& out) { return without_traffic(shell.metrics(out)); };
    CHECK(bits("a").size() == 9);
    CHECK(bits("a") == bits("b"));
    shell.output("diff -r a/step_00000006 b/step_00000006");
  }
}

TEST_CASE("--delay 1: gradients that wait go on, on any mesh, and the last ones are applied before the last checkpoint" *
          doctest::skip(!mpirun_found)) {
  RankWorkplace shell;
  const std::string shape = "--share-gpu --layers 2 --heads 2 --channels 32 --micro-batch 1 --global-batch 8 --steps ";
  // After one step there is one update, as without a delay.
  for (const std::string ranks : {"1", "2"}) {
    CAPTURE(ranks);
    const std::string one = "$MPIRUN " + ranks + " $TEXT --zero 1 --overwrite " + shape + "1 --out ";
    shell.output(one + "plain && " + one + "delayed --delay 1");
    for (const char* file : {"model", "optimizer"}) shell.output("cmp */step_00000001/" + std::string(file) + ".safetensors");
  }
  const std::string delayed = shape + "4 --delay 1 --checkpoint-every 2 --out ";
  shell.output("$TEXT " + delayed + "alone");
  const std::vector<Json> wanted = shell.metrics("alone");
  CHECK(wanted[0]["grad_norm"] == 0);
  for (const Json& line : wanted) CHECK(!line.contains("left_out"));
  CHECK(shell.output("grep -acF '\"g.transformer.wte.weight\"' alone/*/optimizer.safetensors") ==
        "alone/step_00000002/optimizer.safetensors:1\nalone/step_00000004/optimizer.safetensors:0\n");
  for (const std::string& mesh : in_turn<std::string>({"2 --zero 1", "2 --tp 2", "2 --pp 2", "2 --cp 2 --zero 1", "4 --zero 1 --pp 2", "4 --tp 2"})) {
    CAPTURE(mesh);
    const size_t space = mesh.find(' ');
    shell.output("rm -rf run && cp -r alone run && rm -r run/step_00000004 && $MPIRUN " + mesh.substr(0, space) + " $TEXT " + delayed +
                 "run --resume" + mesh.substr(space));
    const std::vector<Json> lines = shell.metrics("run");
    REQUIRE(lines.size() == 4);
    for (size_t i = 2; i < 4; ++i)
      for (const char* key : {"loss", "grad_norm"}) CHECK(lines[i][key].get<double>() == about(wanted[i][key].get<double>(), 1e-5));
  }
  // A run that goes on after its end has applied everything: its next step has nothing to apply.
  shell.output("$TEXT --share-gpu --layers 2 --heads 2 --channels 32 --micro-batch 1 --global-batch 8 --delay 1 --out alone --resume --steps 6");
  CHECK(shell.metrics("alone")[4]["grad_norm"] == 0);
  shell.refuses("$TEXT " + shape + "8 --out alone --resume", 2, {"delay is \"off\" and was \"1 step\""});
}

// What the islands compute: test/islands/ranks/test_islands.cu.
TEST_CASE("--islands: resumed runs, other numbers of islands, and what waits for outer steps" * doctest::skip(!mpirun_found)) {
  RankWorkplace shell;
  const auto bits = [&](const std::string& out) { return without_traffic(shell.metrics(out)); };
  const std::string text = job_of_islands;
  // One island, and the mean: the run without islands.
  shell.output(text + "4 --out plain && " + text + "4 --out one --islands 1 --local-steps 3 --outer-lr 1 --outer-momentum 0");
  CHECK(bits("plain") == bits("one"));
  same_weights(shell, "plain/step_00000004", "one/step_00000004");

  for (const std::string& options : in_turn<std::string>({"--zero 0 --shuffle --on-spike skip --spike-window 2 --spike-z 0.5", "--zero 3 --recompute block",
                                    "--tp 2 --heads 2 --channels 32", "--pp 2 --layers 2 --zero 1", "--cp 2 --zero 2 --moments bf16 --outer-dtype int4",
                                    "--zero 1 --init plain/step_00000004 --lora-rank 2 --outer-dtype int8"})) {
    CAPTURE(options);
    const std::string job = "$MPIRUN 4 " + text + "8 --islands 2 --local-steps 3 --check-sync 1 --checkpoint-every 2 --val text --val-every 2 --val-batches 1 " +
                            options + " --out ";
    shell.output("rm -rf a b && " + job + "a && cp -r a b && rm -r b/step_00000006 b/step_00000008 && " + job + "b --resume");
    CHECK(bits("a") == bits("b"));
    shell.output("diff -r a/step_00000008 b/step_00000008");
    // Steps 3, 6 and 8 are outer steps. What is due between them waits.
    std::vector<int> validated, means;
    for (const Json& line : shell.metrics("a")) {
      if (line.contains("val_loss")) validated.push_back(line["step"]);
      else if (line.contains("loss") && line["island"] == "mean") means.push_back(line["step"]);
      else if (line.contains("loss")) CHECK(line["island"] == 0);
    }
    CHECK(means == std::vector{3, 6, 8});
    CHECK(validated == std::vector{3, 6, 8});
    shell.output("ls a | grep -c ^step_ | grep -qx 3 && test -d a/step_00000003 -a -d a/step_00000006");
  }
  // Another number of islands: more have the moments of those that there were, in turn, and fewer those of the first.
  const std::string job = text + "6 --local-steps 3 --out ";
  shell.output("rm -rf a b && $MPIRUN 2 " + job + "a --islands 2 --checkpoint-every 3 && rm -r a/step_00000006 && cp -r a b && cp -r a c");
  CHECK(shell.content("a/step_00000003/optimizer.safetensors") != shell.content("a/step_00000003/optimizer_island_1.safetensors"));
  shell.output("$MPIRUN 4 " + job + "a --islands 4 --resume && $MPIRUN 2 " + job + "b --islands 1 --resume");
  for (const char* run : {"a", "b"}) {
    CHECK(shell.metrics(run).size() == 6);
    CHECK(shell.content(std::string(run) + "/step_00000006/outer.safetensors").size() == shell.content("c/step_00000003/outer.safetensors").size());
  }
  shell.output("test -f a/step_00000006/optimizer_island_3.safetensors -a ! -f b/step_00000006/optimizer_island_1.safetensors");
  // A stop waits for the next outer step, too.
  CHECK(shell("$MPIRUN 2 " + text + "1000000 --islands 2 --local-steps 7 --max-hours 0.0006 --out stopped").code == 75);
  const std::vector<Json> lines = shell.metrics("stopped");
  CHECK(lines.back()["step"].get<int>() % 7 == 0);
  CHECK(lines.back()["island"] == "mean");
  CHECK(shell(text + "1000000 --local-steps 7 --max-hours 0.0003 --out alone").code == 75);
  CHECK(shell.metrics("alone").back()["step"].get<int>() % 7 == 0);
  shell.refuses(text + "6 --resume --out plain --local-steps 3", 2, {"outer is", "and was \"off\""});
}

// The islands go on with other numbers, but not where all outer steps wait (after steps 3 and 6, for a checkpoint), and a resumed
// run has the bits of one that was not interrupted.
TEST_CASE("--outer-delay: outer steps that wait, resumed runs, and a stop" * doctest::skip(!mpirun_found)) {
  RankWorkplace shell;
  const auto bits = [&](const std::string& out) { return without_traffic(shell.metrics(out)); };
  const std::string text = job_of_islands;
  for (const std::string& options : in_turn<std::string>({"--zero 1 --outer-dtype int8 ", "--zero 0 --tp 2 "})) {
    CAPTURE(options);
    const std::string islands = "$MPIRUN 4 " + text + "8 --heads 2 --channels 32 --islands 2 --local-steps 3 " + options, job = islands + "--outer-delay 2 --checkpoint-every ";
    shell.output("rm -rf a b c d && " + job + "6 --out a && cp -r a b && rm -r b/step_00000008 && " + job + "6 --out b --resume");
    CHECK(bits("a") == bits("b"));
    shell.output("diff -r a/step_00000008 b/step_00000008 && " + job + "3 --out c && " + islands + "--out d --checkpoint-every 3");
    CHECK(bits("c") == bits("d"));
    same_weights(shell, "c/step_00000006", "d/step_00000006");
    CHECK(bits("a") != bits("c"));
    shell.ranks_refuse(job + "3 --out a --resume --steps 9", {"outer_waits is", "checkpoint 3", "checkpoint 6"}, 2);
  }
  // Where a run is stopped, the outer step under way ends, and the islands go on from the same weights.
  CHECK(shell("$MPIRUN 2 " + text + "1000000 --islands 2 --local-steps 7 --outer-delay 6 --max-hours 0.0006 --out behind").code == 75);
  shell.output("$MPIRUN 2 " + text + std::to_string(shell.metrics("behind").back()["step"].get<int>() + 9) +
               " --islands 2 --local-steps 7 --outer-delay 6 --out behind --resume");
}

TEST_CASE("adapters of one rank go on, on any mesh, with one rank's losses" * doctest::skip(!mpirun_found)) {
  RankWorkplace shell;
  const std::string shape = "--share-gpu --layers 2 --heads 2 --channels 32 --micro-batch 1 --global-batch 4 --steps ";
  shell.output("$TEXT " + shape + "3 --out base && $TEXT " + shape + "4 --init base/step_00000003 --lora-rank 4 --lr 1e-2 --checkpoint-every 2 --out alone");
  for (const std::string& mesh : in_turn<std::string>({"2 --tp 2", "2 --pp 2", "2 --cp 2", "4 --zero 3 --tp 2"})) {
    CAPTURE(mesh);
    const size_t space = mesh.find(' ');
    shell.output("rm -rf run && cp -r alone run && rm -r run/step_00000004 && $MPIRUN " + mesh.substr(0, space) + " $TEXT " + shape +
                 "4 --lr 1e-2 --checkpoint-every 2 --out run --resume" + mesh.substr(space));
    const std::vector<Json> lines = shell.metrics("run"), wanted = shell.metrics("alone");
    REQUIRE(lines.size() == 4);
    for (size_t i = 2; i < 4; ++i) CHECK(lines[i]["loss"].get<double>() == about(wanted[i]["loss"].get<double>(), 1e-5));
  }
}

TEST_CASE("disks that the hosts don't share: rank 0's holds whole checkpoints, from which a run goes on with the same bits" *
          doctest::skip(!mpirun_found)) {
  RankWorkplace shell;
  std::string text;  // a spike, from which the run rolls back
  for (int i = 0; i < 180; ++i) text += "abcdefghijklmno\n";
  for (size_t i = 0; i < 64; ++i) text += char(33 + (i * i * 7 + i * 31) % 90);
  for (int i = 0; i < 180; ++i) text += "abcdefghijklmno\n";
  for (const char* folder : {"shared", "a", "b"}) put(shell / folder / "text", text);
  const std::string program = "$TEXT --share-gpu --zero 3 --lr 1e-2 --steps 80 --checkpoint-every 20 --keep 9 "
                              "--spike-window 32 --spike-z 30 --on-spike rollback --out ";
  const auto job = [&](const std::string& options, int ranks = 1) {
    const std::string each = std::to_string(ranks);
    return "$MPIRUN " + each + " -wdir a " + program + options + " : -np " + each + " -wdir b " + program + options;
  };
  shell.output("cd shared && $MPIRUN 2 " + program + "run");
  const std::string out = shell.output(job("run"));
  CHECK(contains(out, "run on the host of rank 0 ("));
  CHECK(contains(out, "is not seen by rank 1 ("));
  CHECK(contains(out, " to step 40, and on without samples "));
  shell.output("for step in shared/run/step_*; do diff -r $step a/${step#shared/} || exit 1; done");
  shell.output("rm -r a/run/step_00000080");
  CHECK(contains(shell.output(job("run --resume")), "steps     61 to 80"));
  shell.output(job("other --resume run/step_00000060"));
  for (std::string folder : {"run", "other"}) {
    CAPTURE(folder);
    shell.output("diff -r shared/run/step_00000080 a/" + folder + "/step_00000080");
    CHECK(std::filesystem::is_empty(shell / "b" / folder));
  }

  // The same where each host has one stage of a pipeline, whose two ranks split each tensor, and gather it to save it.
  const std::string split = "split --pp 2 --layers 2 --tp 2 --heads 2 --channels 32 --global-batch 4";
  CHECK(contains(shell.output("cd shared && $MPIRUN 4 " + program + split), " to step 40, and on without samples "));
  CHECK(contains(shell.output(job(split, 2)), " to step 40, and on without samples "));
  shell.output("diff -r shared/split/step_00000080 a/split/step_00000080");

  // What another host has that rank 0's lacks is neither mixed in nor left behind.
  shell.output("mv a/run/step_00000080 b/run");
  shell.ranks_refuse(job("run --resume"), {"--resume: run holds step 80 on ", " (rank 1) and step 60 on ", "copy the checkpoint"});
  shell.output("mv a/run a/mine");
  shell.ranks_refuse(job("fresh --resume run"), {"--resume: run holds step 80 on ", " (rank 1) and no checkpoint on "});
  shell.ranks_refuse(job("run"), {"rank 1", "run: holds a run", "--overwrite"}, 2);
  for (const char* folder : {"a/run", "a/fresh"})  // where rank 0 is told to end before it removes what it made
    CHECK((!shell.exists(folder) || std::filesystem::is_empty(shell / folder)));
}

// The bound is that of curves in fp32 (test/README.md): another machine adds in another order.
TEST_CASE("checkpoints of 2026-11-27 go on: plain, adapters, islands, --delay, PowerSGD" * doctest::skip(!mpirun_found)) {
  RankWorkplace shell;
  std::string text;
  for (int i = 1; i <= 300; ++i) text += "line " + std::to_string(i * i) + ".\n";
  put(shell / "text", text);
  for (const std::string run : {"zero2", "lora", "islands", "delay", "powersgd"}) {
    CAPTURE(run);
    std::filesystem::copy("test/fixtures/" + run, shell / run, std::filesystem::copy_options::recursive);
    std::string how = shell.content(run + "/how");  // the number of ranks, and options
    how.insert(how.find(' '), " $GPT --train text --micro-batch 1 --global-batch 4 --shuffle --seed 3 --lr 3e-3 --schedule constant --steps 4 "
                              "--resume --out " + run);
    shell.output("$MPIRUN " + how);
    const std::vector<Json> wanted = json_lines<Json>(shell / (run + "/wanted.jsonl")), found = shell.metrics(run);
    CHECK(wanted.size() == 2);
    for (const char* number : {"loss", "grad_norm"}) CHECK_WITHIN("fp32, fixtures", largest_difference(found, wanted, number), 1e-5);
  }
}

TEST_CASE("SIGTERM to one rank of four: all save after the same step, and go on from there" * doctest::skip(!mpirun_found)) {
  RankWorkplace shell;
  const std::string job = "$MPIRUN 4 $TEXT --share-gpu --zero 1 --schedule constant --out ";
  const Result stopped = shell(job + "run --steps 99999 & job=$!\n"
      "until [ -s run/metrics.jsonl ]; do sleep 0.02; done\n"
      "for p in $(pgrep -x train_gpt); do [ \"$(readlink /proc/$p/cwd)\" = \"$PWD\" ] && "
      "tr '\\0' '\\n' </proc/$p/environ | grep -qx OMPI_COMM_WORLD_RANK=2 && kill -TERM $p; done; wait $job");
  CHECK(stopped.code == 75);
  CHECK(!contains(stopped.error, "train_gpt: "));
  const size_t steps = shell.metrics("run").size();
  CHECK(contains(stopped.out, "another rank was asked to stop: stopped after step " + std::to_string(steps) + ", and saved"));
  const std::string more = " --steps " + std::to_string(steps + 2);
  shell.output(job + "run --resume" + more);
  shell.output(job + "whole" + more);
  CHECK(largest_difference(shell.metrics("run"), shell.metrics("whole"), "loss") == 0);
  CHECK(largest_difference(shell.metrics("run"), shell.metrics("whole"), "grad_norm") == 0);
}
