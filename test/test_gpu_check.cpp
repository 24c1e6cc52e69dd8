// dev/gpu_check.sh, its report and dev/expected.py, in a folder whose programs are made up. Left out where there is no Python.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include <sys/wait.h>

#include "test/temporary_folder.h"

namespace {

const bool python_found = std::system("python3 --version > /dev/null 2>&1") == 0;

// A tree in which two "tests of kernels" are shell scripts; each run of one adds a line to the file `runs`.
struct Tree {
  TemporaryFolder folder;

  Tree() {
    std::filesystem::create_directories(folder / "dev");
    for (const char* script : {"gpu_check.sh", "gpu_check", "gpu_report.py"})
      std::filesystem::copy(std::string("dev/") + script, folder / "dev" / script);
    set_test("first", "");
    set_test("second", "");
  }

  void set_test(const std::string& name, const std::string& command) {
    put(folder / ("kernels/" + name + ".cuh"), "");
    put(folder / ("test/test_" + name + ".cu"), "");
    set_program("build/cpu/test_" + name, "echo " + name + " >> runs\n" + command);
  }
  void set_program(const std::string& name, const std::string& commands) {
    std::filesystem::permissions(put(folder / name, "#!/bin/sh\n" + commands + "\n"), std::filesystem::perms::owner_all);
  }
  // It notes its name and arguments.
  void set_programs(const std::vector<std::string>& names, const std::string& commands = "") {
    for (const std::string& name : names)
      set_program(name, "echo " + name.substr(name.rfind('/') + 1) + " \"$@\" >> runs\n" + commands);
  }

  // Exit code of the script; what the tests of kernels did since the last call is in `ran`, sorted, and in `calls` in order.
  int check(const std::string& options, const std::string& variables = "") {
    std::filesystem::remove(folder / "runs");
    const int status = std::system(("cd '" + folder.path().string() + "' && DEVICE=cpu " + variables + " dev/gpu_check.sh " + options +
                                    " > out 2>&1; code=$?; sort runs 2> /dev/null | xargs > sorted; exit $code").c_str());
    output = content_of(folder / "out");
    ran = content_of(folder / "sorted");
    calls = content_of(folder / "runs");
    report = content_of(folder / "build/cpu/check/report.md");
    return WEXITSTATUS(status);
  }

  std::string output, ran, calls, report;
};

// Do these lines come in this order?
bool in_order(const std::string& text, const std::vector<std::string>& parts) {
  size_t at = 0;
  for (const std::string& part : parts) {
    at = text.find(part, at);
    if (at == std::string::npos) {
      MESSAGE("missing, or too early: " << part);
      return false;
    }
    at += part.size();
  }
  return true;
}

// The lines that dev/bench.py prints, of one model.
std::string bench_log(const std::string& title, const std::string& attention) {
  return R"(ceilings  {"device": "a GPU", "copy_bytes_per_s": 4e12, "flops_per_s": {"fp32": 4e14, "bf16": 8e14}})" "\n\n" + title +
         ": median (smallest to largest) of 20 steps after 5\nstep      103.00 (102.00 to 104.00) ms\n" + attention +
         "kernel                          calls         ms   share      GB/s    GFLOP/s  of ceiling   (a step, mean of 6)\n"
         "matmul_forward                   49.0     40.000   40.0%     600.0   500000.0       62.5%\n"
         "attention_backward               12.0     20.000   20.0%     500.0   145200.0       18.2%\n"
         "layernorm_backward               25.0      6.000    6.0%    2000.0      100.0       50.0%\n"
         "all                                       66.000                                   50.0%\n"
         "ceiling: the longer of bytes at 4000.0 GB/s and FLOPs at 800000.0 GFLOP/s\n";
}

std::string expected(const std::string& log) {
  TemporaryFolder folder;
  put(folder / "log", log);
  put(folder / "table.json", R"({"gpt2": [
    {"operation": "layernorm_backward", "kernel": "a", "calls": 25, "expected_us": 100, "floor_us": 90, "source": "machine code"},
    {"operation": "layernorm_backward", "kernel": "b", "calls": 25, "expected_us": 20, "floor_us": 9, "source": "machine code"},
    {"operation": "attention_backward", "kernel": "c", "calls": 12, "expected_us": 1000, "floor_us": 900, "source": "FlashAttention-2"},
    {"operation": "adamw", "kernel": "d", "calls": 14, "expected_us": 60, "floor_us": 60, "source": "machine code"}]})");
  std::system(("python3 dev/expected.py '" + (folder / "log").string() + "' --table '" + (folder / "table.json").string() +
               "' > '" + (folder / "out").string() + "' 2>&1").c_str());
  return content_of(folder / "out");
}

}  // namespace

TEST_CASE("gpu_check.sh goes on where it stopped" * doctest::skip(!python_found)) {
  Tree tree;
  CHECK(tree.check("kernels") == 0);
  CHECK(tree.ran == "first second\n");
  CHECK(contains(tree.report, "2 passed, 0 failed, 0 unfinished, 0 left out."));

  put(tree.folder / "build/cpu/check/kernels/roofline.svg", "");
  CHECK(tree.check("kernels") == 0);
  CHECK(tree.ran == "\n");
  CHECK(contains(tree.output, " s, earlier"));
  CHECK(contains(tree.report, "![roofline](kernels/roofline.svg)"));
  CHECK(contains(tree.report, "2 passed"));

  CHECK(tree.check("--again kernels") == 0);
  CHECK(tree.ran == "first second\n");

  tree.set_test("third", "");  // other sources: no result counts, and none is lost
  put(tree.folder / "build/cpu/check/keep", "");
  CHECK(tree.check("kernels") == 0);
  CHECK(tree.ran == "first second third\n");
  CHECK(contains(tree.output, "results of other sources: moved to build/cpu/check-"));
  CHECK(!std::filesystem::exists(tree.folder / "build/cpu/check/keep"));
  for (const char* folder : {"planner", "a_new_one"}) {
    put(tree.folder / folder / "source.cpp", "");
    CHECK(tree.check("kernels") == 0);
    CHECK_MESSAGE(contains(tree.output, "results of other sources"), folder);
  }
  CHECK(tree.check("kernels") == 0);
  CHECK(tree.ran == "\n");
}

TEST_CASE("gpu_check.sh kernels: Hopper's instructions first, one at a time; times last" * doctest::skip(!python_found)) {
  Tree tree;
  for (const char* kernel : {"extensions/hopper/kernels/hopper", "kernels/attention/attention"}) put(tree.folder / (std::string(kernel) + ".cuh"), "");
  for (const char* test : {"hopper/test_hopper", "test_attention"}) put(tree.folder / "test" / (std::string(test) + ".cu"), "");
  tree.set_programs({"build/cpu/test_hopper", "build/cpu/test_attention", "build/cpu/ladder_attention_forward",
                     "build/cpu/ladder_attention_backward"});
  CHECK(tree.check("kernels") == 0);
  const std::string bits = "test_attention -tc=*the same bits each time*\n";
  CHECK_MESSAGE(in_order(tree.calls, {"test_hopper\n", "test_attention -tc=attention on Hopper*\n",
                                      "test_attention -tce=attention on Hopper*\n", bits, bits, bits}), tree.calls);
  const std::string rungs = " --rung tensor_cores --rung hopper --rung library --csv build/cpu/check/attention_";
  for (const char* test : {"first\n", "second\n"})
    CHECK_MESSAGE(in_order(tree.calls, {bits, bits, bits, test, "ladder_attention_forward" + rungs + "forward.csv\n",
                                        "ladder_attention_backward" + rungs + "backward.csv\n"}), tree.calls);
  CHECK(std::count(tree.calls.begin(), tree.calls.end(), '\n') == 10);
  CHECK(contains(tree.report, "10 passed, 0 failed, 0 unfinished, 1 left out."));  // Nsight Compute

  tree.set_program("build/cpu/test_hopper", "exit 1");  // later ones run all the same
  CHECK(tree.check("--again kernels") == 1);
  CHECK(std::count(tree.calls.begin(), tree.calls.end(), '\n') == 9);
  CHECK(contains(tree.report, "- kernels: Hopper's instructions (failed: exit code 1"));
}

TEST_CASE("gpu_check.sh knows the tests of the rooms' kernels") {
  TemporaryFolder folder;
  std::system(("bash -c 'build=build/gpu; . dev/gpu_check/kernels.sh; kernel_tests' > '" + (folder / "list").string() + "'").c_str());
  const std::string list = content_of(folder / "list");
  for (const char* test : {"test_gelu", "test_attention", "test_hopper", "test_ring", "test_fp8", "test_quantize", "test_vocabulary_cross_entropy"})
    CHECK_MESSAGE(contains(list, std::string("build/gpu/") + test + "\n"), list);
  CHECK(!contains(list, "test_memory"));  // in test/cpu
}

TEST_CASE("gpu_check.sh training: every attention, beside the CPU's tensors" * doctest::skip(!python_found)) {
  Tree tree;
  // A run leaves two checkpoints.
  tree.set_programs({"build/cpu/train_gpt"}, "while [ $# -gt 0 ]; do [ \"$1\" = --out ] && [ -n \"$2\" ] && "
                                             "mkdir -p \"$2/step_00000010\" \"$2/step_00000020\"; shift; done");
  tree.set_programs({"build/cpu/ladder_matmul"});
  // Of the Python scripts only the report is real.
  tree.set_program("python", "if [ \"$1\" = dev/gpu_report.py ]; then exec python3 \"$@\"; fi\necho \"$@\" >> runs");
  CHECK(tree.check("training", "PYTHON=$PWD/python") == 0);
  const std::string traced = " --steps 1 --trace-tensors build/cpu/check/runs/bf16.jsonl";
  const std::string cpu = "dev/compare.py dev/results/cpu-training/tensors.jsonl";
  const std::string beside_the_cpu = cpu + " build/cpu/check/runs/bf16.jsonl --rtol 0.05\n";
  const std::string trained = " --init build/cpu/check/runs/trained/step_00000040 --attention ";
  CHECK_MESSAGE(in_order(tree.calls, {cpu, "--dtype fp32", traced + "\n", beside_the_cpu, traced + " --attention own\n",
                                      beside_the_cpu, traced + " --attention hopper\n", beside_the_cpu,
                                      "--dtype fp32 --out build/cpu/check/runs/trained", " --seq-len 512 ",
                                      trained + "own", "--dtype bf16 --out build/cpu/check/runs/long-hopper", trained + "hopper",
                                      "dev/same_losses.py build/cpu/check/runs/long-own build/cpu/check/runs/long-hopper --tolerance 0.002\n",
                                      "--dtype fp16", "--out build/cpu/check/runs/whole-fp32 --checkpoint-every 10\n",
                                      "--out build/cpu/check/runs/resumed-fp32 --checkpoint-every 10 --resume\n",
                                      "whole-fp32 build/cpu/check/runs/resumed-fp32 --tolerance 0\n",
                                      "ladder_matmul --csv build/cpu/check/matmul.csv\n"}),
                tree.calls);
  CHECK(contains(tree.report, "12 passed, 0 failed, 0 unfinished"));
}

TEST_CASE("gpu_check.sh confirm: what was mended without a card, and only one can tell" * doctest::skip(!python_found)) {
  Tree tree;
  std::vector<std::string> programs = {"build/cpu/train_gpt"};
  for (const char* test : {"fp8", "model", "attention", "hopper", "ring", "matmul", "trace"}) programs.push_back("build/cpu/test_" + std::string(test));
  tree.set_programs(programs, "echo \"cache ${XDG_CACHE_HOME:-none}\" >> runs");
  tree.set_programs({"dev/cluster/mpirun.sh"}, "echo $GPT_PROGRAM >> runs");
  tree.set_program("python", "if [ \"$1\" = dev/gpu_report.py ]; then exec python3 \"$@\"; fi\n[ \"$1\" = -c ] || echo \"$@\" >> runs");
  CHECK(tree.check("confirm", "PYTHON=$PWD/python") == 0);
  for (const char* test : {"test_fp8\n", "test_model -tc=a step in eight bits*\n", "test_model -tce=a step in eight bits*\n",
                           "test_attention -tc=attention*by a library*\n", "test_attention -tc=attention on Hopper*\n",
                           "test_hopper\n", "test_ring\n", "test_matmul\n", "test_trace\n"})
    CHECK_MESSAGE(in_order(tree.calls, {test, "mpirun.sh 4\nbuild/cpu/test_fp8_meshes\n"}), tree.calls);
  const std::string same = "dev/same_losses.py build/cpu/check/runs/start-one build/cpu/check/runs/start-other --tolerance 0\n";
  std::vector<std::string> parts;
  for (const char* options : {"--dtype fp32\n", "--dtype fp32 --products none\n", "--dtype bf16\n", "--dtype bf16 --products none\n"})
    for (const char* part : {"start-one ", options, "cache build/cpu/check/runs/cache\n", "start-other ", options,
                             "cache build/cpu/check/runs/cache\n", same.c_str()})
      parts.push_back(part);
  for (const char* attention : {"own", "hopper", "auto", "own", "hopper", "auto"})
    parts.push_back(" --steps 20 --log-every 5 --out  --layers 3 --heads 2 --channels 128 --vocab 50257 --seq-len 32 --micro-batch 2 --dtype bf16 --attention " +
                    std::string(attention) + "\n");
  parts.push_back(" --fp8\n");
  CHECK_MESSAGE(in_order(tree.calls, parts), tree.calls);
  CHECK(contains(tree.report, "21 passed, 0 failed, 0 unfinished, 4 left out."));  // two by cuDNN, two by racecheck
}

TEST_CASE("gpu_check.sh --built: nothing is built, and what is missing is named and not done" * doctest::skip(!python_found)) {
  Tree tree;
  std::filesystem::remove(tree.folder / "build/cpu/test_second");
  tree.set_programs({"make"});
  CHECK(tree.check("--built build kernels", "PATH=$PWD:$PATH") == 3);
  CHECK(tree.ran == "first\n");
  CHECK(contains(tree.report, "1 passed, 0 failed, 1 unfinished, 1 left out."));
  CHECK(contains(tree.report, "- kernels: test_second (build/cpu/test_second is not built)"));
  tree.set_programs({"build/cpu/test_second"});  // it has been brought along
  CHECK(tree.check("--built kernels") == 0);
  CHECK(tree.ran == "test_second\n");

  CHECK(tree.check("--built training") == 3);  // checks that are functions, and functions that these call
  CHECK(contains(tree.report, "- training: every tensor of a step in fp32, beside the CPU's (build/cpu/train_gpt is not built)"));
  CHECK(contains(tree.report, "- training: products: how fast (build/cpu/ladder_matmul is not built)"));
  CHECK(contains(tree.report, "0 failed, 12 unfinished"));
}

TEST_CASE("gpu_check.sh draws a benchmark's picture in the folder of the part that runs it" * doctest::skip(!python_found)) {
  Tree tree;
  std::system(("cd '" + tree.folder.path().string() + "' && bash -c 'part=training results=results; check() { echo \"$@\"; file=none; }; "
               ". dev/gpu_check/speed.sh; bench \"gpt2, Hopper\" --model gpt2' > out 2>&1").c_str());
  CHECK(contains(content_of(tree.folder / "out"), "under_bench --picture results/training/gpt2__Hopper.svg --model gpt2\n"));
}

TEST_CASE("gpu_check.sh scale: all of the first hour on several GPUs" * doctest::skip(!python_found)) {
  Tree tree;
  tree.set_programs({"build/cpu/ceilings"});
  const std::string refuses = "case \"$*\" in *--vocab\\ 128*) echo token 2749 has id 128; exit 1 ;; esac";
  tree.set_programs({"dev/cluster/mpirun.sh"},
                    "echo $GPT_PROGRAM $GPT_CPU_DEVICES $NCCL_DEBUG$NCCL_MIN_CTAS-$NCCL_MAX_CTAS >> runs\n" + refuses);
  put(tree.folder / "README.md", std::string(4000, 'x'));
  CHECK(tree.check("scale") == 0);
  const std::string ranks = "mpirun.sh 8 ", program = "\nbuild/cpu/train_gpt 8 ";
  const std::vector<std::string> first_hour = {
      ranks, "--check-ranks", program + "INFO-\n",
      "mpirun.sh 8\nbuild/cpu/collectives 8 8-8\n", "mpirun.sh 8\nbuild/cpu/collectives 8 16-16\n", "24-24\n", "32-32\n",
      ranks, "--zero 1 --steps 8" + program + "-\n", "--zero 1 --steps 4 --profile\n", "--zero 3 --steps 8\n",
      "--zero 3 --steps 4 --profile\n", "--tp 8 --tp-pieces 1 --steps 8\n", "--tp 8 --tp-pieces 2 --steps 8\n",
      "--zero 1 --sm-margin 0 --steps 8\n", "--tp 8 --sm-margin 24 --steps 8\n",
      "--pp 4 --tp 2 --steps 8\n", "--pp 4 --pp-schedule gpipe\n", "--pp 4 --pp-schedule 1f1b\n", "--pp 4 --pp-schedule zb\n",
      "--pp 2 --pp-schedule interleaved --steps 2", ranks + "--generate --resume", "--pp 2 --pp-schedule interleaved",
      "\nceilings\n", ranks + "--mesh auto", "--ceilings", "--tp 2 --train"};
  CHECK_MESSAGE(in_order(tree.calls, first_hour), tree.calls);
  CHECK(contains(tree.report, "30 passed, 0 failed, 0 unfinished, 0 left out."));

  // Text that does not come, a job that ends without a word of the bad token: only these fail.
  tree.set_programs({"dev/cluster/mpirun.sh"}, "case \"$*\" in *--generate* | *--vocab\\ 128*) exit 1 ;; esac");
  CHECK(tree.check("--again scale") == 1);
  CHECK(contains(tree.report, "28 passed, 2 failed, 0 unfinished"));
  CHECK(contains(tree.report, "- scale: text from an interleaved pipeline (failed: exit code 1"));
  CHECK(contains(tree.report, "- scale: a bad token, and two ranks for each layer (failed: exit code 1"));
}

TEST_CASE("gpu_check.sh: a failure stops nothing, and is named first" * doctest::skip(!python_found)) {
  Tree tree;
  // A case breaks the device: all later ones of the process fail. By itself each says how it ends.
  tree.set_test("first", "case \"$*\" in *--list-test-cases) printf '[doctest] listing all\\n===\\nright\\nwrong, always\\nlate\\n===\\n' ;; "
                         "-tc=right | -tc=late) ;; *) echo a wrong number; echo \"$*\" >> runs; exit 1 ;; esac");
  CHECK(tree.check("kernels") == 1);
  CHECK(tree.ran == "-tc=wrong? always first first first first first second\n");
  CHECK_MESSAGE(in_order(tree.report, {"a wrong number\n", "exit code 1; each case by itself:\npassed: right\nfailed, exit code 1: wrong, always\na wrong number\n",
                                       "passed: late\n1 of 3 cases failed in processes of their own\n"}), tree.report);
  CHECK(contains(tree.report.substr(0, 400), "1 passed, 1 failed"));
  CHECK(contains(tree.report.substr(0, 500), "- kernels: test_first (failed: exit code 1, "));
  CHECK(contains(tree.report.substr(0, 800), "all numbers below mean nothing"));
  CHECK(contains(tree.report, "\na wrong number\n"));
  CHECK(tree.check("kernels") == 1);  // done, and failed
  CHECK(tree.ran == "\n");
}

TEST_CASE("gpu_check.sh ends before its time is over" * doctest::skip(!python_found)) {
  Tree tree;
  tree.set_test("first", "sleep 60");
  CHECK(tree.check("--minutes 0.185 kernels") == 3);  // ten seconds are for programs to end
  const bool had_time = !contains(tree.report, "- kernels: test_first (no time was left)");  // a slow machine may not have
  CHECK(contains(tree.report, "- kernels: test_first (stopped after ") == had_time);
  tree.set_test("first", "");
  CHECK(tree.check("--minutes 0.1 kernels") == 3);
  CHECK(tree.ran == "\n");
  CHECK(contains(tree.report, "- kernels: test_first (no time was left)"));
  CHECK(tree.check("kernels") == 0);
  CHECK(contains(tree.ran, "first"));
  CHECK(tree.check("--minutes soon") == 2);
  CHECK(contains(tree.output, "--minutes 'soon': give a number"));
  CHECK(tree.check("quick") == 2);
  CHECK(contains(tree.output, "'quick' is no part: choose from build confirm kernels"));
}

TEST_CASE("expected.py: the largest differences first, from machine code or from the floor" * doctest::skip(!python_found)) {
  const std::string gpt2 = "gpt2, bf16, B=64, T=1024", own = "attention own kernels\n", library = "attention cuDNN 9.19\n";
  const std::string hopper = "attention own kernels for Hopper\n";
  // A product of 500 TFLOP/s where 800 are possible; 12 calls of 1 ms; 25 of 0.1 and 0.02 ms.
  const std::string product = "| matmul_forward | 49 | 25.00 | 40.00 | +15.00 | 1.60 | floor |\n";
  const std::string layernorm = "| layernorm_backward | 25 | 3.00 | 6.00 | +3.00 | 2.00 | machine code |\n";
  std::string text = expected(bench_log(gpt2, own));
  CHECK(contains(text, "40.00 ms expected, 66.00 ms measured by kernel, 103.00 ms a step that is not profiled"));
  CHECK(contains(text, "|---|\n" + product + "| attention_backward | 12 | 12.00 | 20.00 | +8.00 | 1.67 | FlashAttention-2 |\n" + layernorm));
  CHECK(contains(text, "Expected, but not measured: adamw."));

  // The table has not cuDNN's attention, nor ours for Hopper: 20 ms at 145.2 TFLOP/s, of 363 that are known to be possible.
  for (const std::string& other : {library, hopper}) {
    text = expected(bench_log(gpt2, other));
    CHECK(contains(text, product + "| attention_backward | 12 | 8.00 | 20.00 | +12.00 | 2.50 | floor |\n" + layernorm));
  }

  text = expected(bench_log("gpt2, bf16, B=4, T=1024", own));  // another shape than the table's
  CHECK(contains(text, "| layernorm_backward | 25 | 3.00 | 6.00 | +3.00 | 2.00 | floor |\n"));
  CHECK(contains(text, "Floors alone"));
  CHECK(contains(expected("nothing"), "has no ceilings or no table per kernel: give what dev/bench.py printed"));
}
