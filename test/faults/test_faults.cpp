// Nothing is lost: ranks that are killed at random moments, and disks that fail at every operation in turn.
// FAULTS_COUNT: kills (default 12); FAULTS_SEED: which (default 1); FAULTS_EVERY=60: each 60th operation fails (default: each).
#include <doctest/doctest.h>

#include <cerrno>
#include <random>

#include "runtime/checkpoints/manifest.h"
#include "runtime/checkpoints/run_folder.h"
#include "test/workplace.h"

namespace {

int number_of(const char* name, int otherwise) { return std::getenv(name) ? std::atoi(std::getenv(name)) : otherwise; }

struct Mesh {
  int ranks;
  std::string options;
};

// Small steps, and a checkpoint most of the time under way.
struct FaultyPlace : Workplace {
  static constexpr int steps = 80, interval = 3;
  FaultyPlace() {
    setenv("MPIRUN", mpirun().c_str(), 1);
    setenv("OMP_NUM_THREADS", "1", 1);
  }
  std::string job(const Mesh& mesh, const std::string& out) const {
    const std::string launcher = mesh.ranks > 1 ? "$MPIRUN " + std::to_string(mesh.ranks) + " " : "exec ";
    return launcher + "$GPT --train text --layers 2 --heads 2 --channels 32 --seq-len 16 --micro-batch 1 --global-batch 4"
           " --share-gpu --steps " + std::to_string(steps) + " --checkpoint-every " + std::to_string(interval) + " " +
           mesh.options + " --out " + out;
  }
  std::vector<Json> bits(const std::string& out) const {
    std::vector<Json> lines = metrics(out);
    for (Json& line : lines)
      for (const char* traffic : {"comm_bytes", "comm_bytes_by_group", "comm_ms", "comm_exposed_ms", "ranks"}) line.erase(traffic);
    return lines;
  }
  // Everything that has a checkpoint's name is one, down to the last byte.
  void check_checkpoints(const std::string& out) const {
    for (const Checkpoint& checkpoint : list_checkpoints(*this / out)) CHECK(damage_of(checkpoint.folder) == "");
  }
};

}  // namespace

TEST_CASE("kill -9 of one rank, or all, at a random moment: the resumed run gives the same bits") {
  FaultyPlace shell;
  std::mt19937 random(unsigned(number_of("FAULTS_SEED", 1)));
  const std::vector<Mesh> meshes = {{1, ""}, {4, "--zero 1"}, {2, "--zero 3"}};
  std::vector<double> seconds;
  for (size_t i = 0; i < meshes.size(); ++i) {
    const auto start = std::chrono::steady_clock::now();
    shell.output(shell.job(meshes[i], "wanted" + std::to_string(i)));
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  int kills = 0, most_lost = 0;
  for (int round = 0; round < number_of("FAULTS_COUNT", 12); ++round) {
    const size_t i = size_t(round) % meshes.size();
    const int rank = int(random() % unsigned(meshes[i].ranks + 1));  // 0: all
    const double moment = seconds[i] * double(random() % 1000) / 1000;
    CAPTURE(round);
    CAPTURE(moment);
    shell("rm -rf run; (" + shell.job(meshes[i], "run") + ") >log 2>&1 & job=$!\n sleep " + std::to_string(moment) +
          "\n ranks=; for p in $(pgrep -x train_gpt); do [ \"$(readlink /proc/$p/cwd)\" = \"$PWD\" ] && ranks=\"$ranks $p\"; done\n"
          "set -- $ranks; shift " + std::to_string(std::max(0, rank - 1)) + " 2>/dev/null\n kill -9 " +
          (rank ? "$1" : "$ranks") + " && touch run.killed; wait $job");
    kills += shell.exists("run.killed");
    shell("rm -f run.killed");
    shell.check_checkpoints("run");
    const std::vector<Json> before = shell.exists("run/metrics.jsonl") ? shell.metrics("run") : std::vector<Json>();
    const auto newest = newest_checkpoint(shell / "run");
    most_lost = std::max(most_lost, int(before.size()) - int(newest ? newest->step : 0));
    shell.output(shell.job(meshes[i], "run --resume"));
    CHECK(shell.bits("run") == shell.bits("wanted" + std::to_string(i)));
    shell.check_checkpoints("run");
  }
  MESSAGE(kills << " kills survived; at most " << most_lost << " steps lost, a checkpoint every " << FaultyPlace::interval);
  CHECK(kills > 0);
  // What was trained since the last checkpoint, and while the next was on its way: that one ends before a third begins.
  CHECK(most_lost <= 2 * FaultyPlace::interval);
}

TEST_CASE("disks that fail at each operation in turn: training goes on where it can, what is saved stays good") {
  FaultyPlace shell;
  const std::string library = built("failing_io.so");
  const std::string train = "$TEXT --steps 6 --checkpoint-every 2 --out ";
  shell.output(train + "wanted");
  int faults = 0, survived = 0;
  for (const auto& [error, count] : {std::pair(ENOSPC, 1), {EIO, 1}, {EROFS, 1}, {ENOSPC, 1000000}})
    for (int at = 1;; at += number_of("FAULTS_EVERY", 1)) {
      CAPTURE(error);
      CAPTURE(at);
      const Result result =
          shell("rm -rf run mark; FAIL_MARK=mark FAIL_COUNT=" + std::to_string(count) + " FAIL_AT=" + std::to_string(at) +
                " FAIL_ERRNO=" + std::to_string(error) + " LD_PRELOAD=" + library + " " + train + "run");
      if (!shell.exists("mark")) break;
      ++faults;
      CAPTURE(result.error);
      const bool goes_on = contains(result.error, "could not be written, training goes on: ");
      const bool says_why = contains(result.error, std::strerror(error));
      survived += result.code == 0;
      CHECK((result.code == 0 || result.code == 1));
      CHECK(says_why);
      CHECK((goes_on || result.code == 1));
      shell.check_checkpoints("run");
      CHECK(!contains(shell.output("ls run"), "partial"));
      shell.output(train + "run --resume");
      CHECK(shell.same_metrics("run", "wanted"));
      shell.output("diff -r run/step_00000006 wanted/step_00000006");
    }
  MESSAGE(faults << " faults injected, " << survived << " runs reached their end all the same");
  shell.output("SLOW_MS=300 LD_PRELOAD=" + library + " " + train + "slow");
  CHECK(shell.same_metrics("slow", "wanted"));
  shell.check_checkpoints("slow");
}

TEST_CASE("calls that a signal interrupts are made again, and a file system that cannot reserve files is written to without that") {
  FaultyPlace shell;
  const std::string train = "$TEXT --steps 6 --checkpoint-every 2 --out ";
  shell.output(train + "wanted");
  const auto checkpoints_with = [&](int error, int at) {
    CAPTURE(error);
    CAPTURE(at);
    shell.output("rm -rf run mark; FAIL_MARK=mark FAIL_COUNT=1 FAIL_AT=" + std::to_string(at) + " FAIL_ERRNO=" + std::to_string(error) +
                 " LD_PRELOAD=" + built("failing_io.so") + " " + train + "run");  // fails if anything is said
    if (shell.exists("mark")) shell.output("diff -r run/step_00000006 wanted/step_00000006");
    return shell.exists("mark");
  };
  int calls = 0;
  for (int at = 1; checkpoints_with(EINTR, at); at += number_of("FAULTS_EVERY", 1)) ++calls;
  CHECK(calls > 0);
  CHECK(checkpoints_with(EOPNOTSUPP, 1));  // the first call reserves a file
}
