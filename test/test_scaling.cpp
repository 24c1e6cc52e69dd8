// dev/scaling.py with a made-up train_gpt, which takes 100 ms for a step of 8 samples on one rank with one thread, and a
// made-up mpirun and srun. Left out where there is no Python.
#include <doctest/doctest.h>

#include <sys/wait.h>

#include <nlohmann/json.hpp>

#include "test/temporary_folder.h"

namespace {

const bool python_found = std::system("python3 --version > /dev/null 2>&1") == 0;

struct Machine {
  TemporaryFolder folder;
  std::string output;

  Machine() {
    // Several ranks take 10 ms more than their share; rank 0 waits half as long as rank 1. The first two steps take longer,
    // and collectives are not timed in the last one.
    program("build/cpu/train_gpt", R"(
while [ $# -gt 0 ]; do
  case $1 in
    --tp) echo "train_gpt: --tp $2 is too many" >&2; exit 2;;
    --out) out=$2;; --global-batch) batch=$2;; --plan) plan=1;; --ranks) ranks=$2;;
  esac
  shift
done
if [ "$plan" ]; then echo "{\"step_ms\": $((ranks * 1000))}"; exit; fi
ranks=${MADE_UP_RANKS:-1}
ms=$((batch * 100 / 8 / ranks / OMP_NUM_THREADS))
mkdir -p "$out"
bytes='"comm_bytes_by_group": {"world": {"all_reduce": 3000000}}'
for extra in 5000 5000 0; do
  if [ $ranks = 1 ]; then echo "{\"step_ms\": $((ms + extra))}"; continue; fi
  echo "{\"step_ms\": $((ms + 10 + extra)), \"ranks\": [{$bytes, \"comm_ms\": 20, \"comm_exposed_ms\": 5}, {$bytes, \"comm_ms\": 40, \"comm_exposed_ms\": 10}]}"
done > "$out/metrics.jsonl"
[ $ranks = 1 ] || echo "{\"step_ms\": $((ms + 10)), \"ranks\": [{$bytes}, {$bytes}]}" >> "$out/metrics.jsonl"
)");
    // Both print what they were asked for, and what real ones say after an error.
    for (const char* launcher : {"mpirun", "srun"})
      program("bin/" + std::string(launcher), R"(
while [ $# -gt 0 ]; do
  case $1 in
    -np) ranks=$2;; --ntasks=*) ranks=${1#--ntasks=};; */train_gpt) break;;
  esac
  shift
done
echo "$(basename "$0") $ranks" >> "$MADE_UP_LOG"
MADE_UP_RANKS=$ranks "$@" || { echo "Primary job terminated normally"; exit 1; }
)");
  }

  void program(const std::string& name, const std::string& text) {
    std::filesystem::permissions(put(folder / name, "#!/bin/sh" + text), std::filesystem::perms::owner_all);
  }

  int run(const std::string& options, const std::string& variables = "") {
    const std::string at = folder.path().string();
    const std::string environment = "env -u SLURM_JOB_ID -u HOSTS OMP_NUM_THREADS=1 PATH='" + at + "/bin':\"$PATH\" MADE_UP_LOG='" +
                                    at + "/log' " + variables;
    const int status = std::system((environment + " python3 dev/scaling.py --build '" + at + "/build/cpu' --steps 1 --warmup 2 " +
                                    options + " > '" + at + "/out' 2> '" + at + "/err'").c_str());
    output = content_of(folder / "out") + content_of(folder / "err");
    return WEXITSTATUS(status);
  }
};

}  // namespace

TEST_CASE("efficiency and communication by rank, beside the forecast" * doctest::skip(!python_found)) {
  Machine machine;
  const std::string json = (machine.folder / "json").string();
  REQUIRE_MESSAGE(machine.run("--ranks 2 --modes 'dp, tp' --json '" + json + "' -- --train text") == 0, machine.output);
  INFO(machine.output);
  // weak: 16 samples on two ranks take 110 ms
  CHECK(contains(machine.output, "| alone | 1 | 1 | 100.0 |"));
  CHECK(contains(machine.output, "| dp | 2 | 1 | 110.0 | 91% |"));
  CHECK(contains(machine.output, "| dp | 2 | 1 | 60.0 | 83% |"));  // strong: 100 / (2 · 60)
  CHECK(contains(machine.output, "| 0.36, 0.80 | 8%, 17% | 3.0, 3.0 | 2,000.0 |"));  // 20 / (60 - 5), 40 / (60 - 10)
  CHECK(contains(machine.output, "| tp | 2 | 1 | train_gpt: --tp 2 is too many |"));
  const auto runs = nlohmann::json::parse(content_of(json)).at("runs");
  REQUIRE(runs.size() == 8);
  CHECK(runs[1]["mode"] == "alone, work of 2");
  CHECK(runs[2]["ratio"] == 110 / runs[1]["step_ms"].get<double>());
  CHECK(runs[3]["error"] == "train_gpt: --tp 2 is too many");
  CHECK(runs[6]["bytes_by_group"][1]["world"]["all_reduce"] == 3000000);
}

TEST_CASE("without a step in which collectives were timed nothing is said of them" * doctest::skip(!python_found)) {
  Machine machine;
  REQUIRE_MESSAGE(machine.run("--ranks 2 --modes dp --strong --warmup 3 -- --train text") == 0, machine.output);
  CHECK_MESSAGE(contains(machine.output, "| dp | 2 | 1 | 60.0 |"), machine.output);
  CHECK(!contains(machine.output, "exposed"));
  CHECK(contains(machine.output, "| 3.0, 3.0 |"));
}

TEST_CASE("in a job of Slurm ranks start by srun" * doctest::skip(!python_found)) {
  Machine machine;
  REQUIRE(machine.run("--ranks 2 --modes dp --strong -- --train text", "SLURM_JOB_ID=1") == 0);
  CHECK(content_of(machine.folder / "log") == "srun 1\nsrun 2\n");
}

TEST_CASE("bad input is one line, with exit code 2" * doctest::skip(!python_found)) {
  Machine machine;
  for (const char* options : {"--ranks 0", "--modes 'dp, ep'", "--steps 0", "--json /nowhere/json", "-- --vocab 0", "--what"}) {
    CAPTURE(options);
    CHECK(machine.run(options) == 2);
    CHECK(is_line_with(machine.output.substr(0, machine.output.size() - 1), "error: "));
  }
}
