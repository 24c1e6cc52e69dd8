// The CPU device's log of what the host gives to its streams (cpu/log.h), and dev/sm_player.py, which plays it on model GPUs.
#include <doctest/doctest.h>

#include <map>
#include <set>
#include <sstream>

#include "test/workplace.h"

namespace {

const bool python_found = std::system("python3 --version >/dev/null 2>&1") == 0;
const bool mpirun_found = std::system("command -v mpirun >/dev/null") == 0;

// A log by hand: two ranks that do the same in steps 1 to 3. Stream 1 is "compute", 2 "communication".
class HandLog {
 public:
  // A product of 8,192 cubed in 16 bits: 2·8192³ / (0.62·989e12) + 8192²·2 / (0.9·3.35e12) s = 1.8376 ms on 132 SMs.
  void product() { launch("matmul", 1, "product 1 8192 8192 8192 2 2"); }
  // Of two ranks, by 16 CTAs: 3 µs + 720e6 / 2 / (0.8·450e9) s = 1.003 ms.
  void reduce_scatter() {
    launch("reduce_scatter", 2, "nccl 2 ncclReduceScatter world.1/0 @ 2 16 720000000 " + std::to_string(scatters_++) + " -1 0");
  }
  void wait(int stream, int for_stream) {
    add("record " + std::to_string(for_stream) + " " + std::to_string(++records_));
    add("wait " + std::to_string(stream) + " " + std::to_string(records_));
  }
  template <class Issue>
  void three_steps(Issue issue) {
    for (step_ = 1; step_ <= 3; ++step_) issue();
  }

  void write(const TemporaryFolder& folder, int ranks = 2) const {
    std::string events;
    for (int rank = 0; rank < ranks; ++rank) {
      std::string log = log_, part = events_;
      const std::string number = std::to_string(rank);
      for (std::string* text : {&log, &part})
        for (size_t at; (at = text->find('@')) != std::string::npos;) text->replace(at, 1, number);
      put(folder / ("log." + number), log);
      for (const char* stream : {"1,\"args\":{\"name\":\"compute\"}}", "2,\"args\":{\"name\":\"communication\"}}"})
        events += (events.empty() ? "" : ",") + ("{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":" + number) + ",\"tid\":" + stream;
      events += part;
    }
    put(folder / "trace", "{\"traceEvents\":[" + events + "]}");
  }

 private:
  void add(const std::string& line) { log_ += line + "\n"; }
  void launch(const std::string& name, int stream, const std::string& line) {
    add("range " + name), add(line), add("end");
    events_ += ",{\"ph\":\"X\",\"name\":\"" + name + "\",\"pid\":@,\"tid\":" + std::to_string(stream) +
               ",\"ts\":0,\"dur\":1,\"args\":{\"bytes\":1,\"step\":" + std::to_string(step_) + "}}";
  }

  std::string log_, events_;
  int step_ = 1, records_ = 0, scatters_ = 0;
};

Result play(const TemporaryFolder& folder, const std::string& options) {
  const std::string at = folder.path().string(), out = at + "/out", error = at + "/error";
  const std::string command = "python3 dev/sm_player.py '" + at + "/log' '" + at + "/trace' " + options;
  const int status = std::system((command + " >'" + out + "' 2>'" + error + "'").c_str());
  return {WEXITSTATUS(status), content_of(out), content_of(error)};
}

void has_rows(const Result& played, const Texts& rows) {
  CAPTURE(played.out + played.error);
  CHECK(played.code == 0);
  for (const std::string& row : rows) CHECK_MESSAGE(contains(played.out, row), row);
}

const std::string scatter = " | reduce_scatter, 2 ranks, communication | 1 | 1.00 | ";

}  // namespace

// The GAP and the EVENT are 2 µs. Without margin the second product takes all SMs 2 µs before the reduce_scatter wants 16, so
// it moves after it, and the next step's first product waits for it: 4 + 2 µs + 2 · 1.8376 ms + 1.003 ms = 4.684 ms. With 8 SMs it
// is the same, and products take 132/124 times as long: 4.921 ms. With 16, 2 · (2 µs + 132/116 · 1.8376 ms) = 4.186 ms.
TEST_CASE("a reduce_scatter moves behind the next product with a margin, and after it without" * doctest::skip(!python_found)) {
  HandLog log;
  log.three_steps([&] {
    log.product();
    log.wait(2, 1);
    log.reduce_scatter();
    log.product();
    log.wait(1, 2);
  });
  const TemporaryFolder folder;
  log.write(folder);
  has_rows(play(folder, "--margin 0,8,16"),
           {"| 0 | 4.68 | 3.68 | 0.00 | 1.01 |", "| 8 | 4.92 | 3.68 | 0.24 | 1.01 |", "| 16 | 4.19 | 3.68 | 0.51 | 0.00 |",
            "| 0" + scatter + "0 | 0, 0, 100 | 1.84 |", "| 8" + scatter + "0 | 0, 0, 100 | 1.95 |",
            "| 16" + scatter + "100 | 0, 100, 0 | 0.00 |"});
  // 8 CTAs find room in a margin of 8: 2 · (2 µs + 1.9562 ms), if they move as much as 16. Half as fast, they end after the
  // product of 124 blocks, 2.003 ms + 4 µs after the first one: 1.9562 + 0.004 + 2.003 + 0.004 ms.
  const std::string fewer = "--margin 8 --ctas communication=8";
  has_rows(play(folder, fewer + " --cta-gb 45"), {"| 8 | 3.92 |", "| 8" + scatter + "100 | 0, 100, 0 |"});
  has_rows(play(folder, fewer), {"| 8 | 3.97 |", "| 1 | 2.00 | 98 | 0, 98, 2 | 0.00 |"});
}

// The reduce_scatter comes first here, 4 µs after the product of the step before, and the product 2 µs later. 16 of its 132
// blocks wait until the sum has travelled, 1.007 ms after the step's begin, and take 1.8376 ms: a step of 2.845 ms. A product of
// 116 blocks waits for nothing: 6 µs + 132/116 · 1.8376 ms = 2.097 ms.
TEST_CASE("a product beside NCCL has a second wave of blocks without a margin" * doctest::skip(!python_found)) {
  HandLog log;
  log.three_steps([&] {
    log.reduce_scatter();
    log.product();
    log.wait(2, 1);
    log.wait(1, 2);
  });
  const TemporaryFolder folder;
  log.write(folder);
  has_rows(play(folder, "--margin 0,16"), {"| 0 | 2.84 | 1.84 | 1.00 |", "| 16 | 2.10 | 1.84 | 0.25 |"});
  // With the rule "pending" the product has the margin, as nothing has waited for the sum.
  has_rows(play(folder, "--margin 16 --rule pending"), {"| 16 | 2.10 | 1.84 | 0.25 |"});
  log.write(folder, 1);
  std::filesystem::remove(folder / "log.1");
  CHECK(contains(play(folder, "").error, "error: rank 0 waits for ever for 'nccl 2 ncclReduceScatter world.1/0 0 2 16 "));
}

TEST_CASE("bad input of the player is one line" * doctest::skip(!python_found)) {
  HandLog log;
  log.three_steps([&] { log.product(); });
  const TemporaryFolder folder;
  log.write(folder);
  const auto refuses = [&](const std::string& options) {
    const Result played = play(folder, options);
    CAPTURE(played.error);
    CHECK(played.code == 2);
    CHECK(played.error.starts_with("error: "));
    CHECK(std::ranges::count(played.error, '\n') == 1);
  };
  CHECK(play(folder, "").code == 0);
  for (const char* bad : {"--margin x", "--margin 132", "--margin -1", "--ctas 8", "--attention 1", "--attention 0,0", "--cta-gb 0",
                          "--rule never", "--what"})
    refuses(bad);
  put(folder / "log.1", "range another\nend\n");
  refuses("");
  put(folder / "trace", "[]");
  refuses("");
}

TEST_CASE("the log of two ranks: waits name earlier records, collectives are numbered alike, and the player ends" *
          doctest::skip(is_gpu_build() || !mpirun_found || !python_found)) {
  const Workplace workplace;
  const std::string root = geteuid() == 0 ? "--allow-run-as-root " : "";
  for (const std::string split : {"--tp 2", "--pp 2", "--zero 1", "--cp 2"}) {
    CAPTURE(split);
    workplace.output("rm -f log.*; GPT_CPU_LOG=log GPT_CPU_DRY=1 OMP_NUM_THREADS=1 mpirun --oversubscribe --bind-to none " + root +
                     "-np 2 $GPT --train text --layers 2 --heads 2 --channels 32 --seq-len 16 --micro-batch 2 --global-batch 8 --steps 3 "
                     "--out '' --trace trace " + split);
    std::vector<std::vector<std::string>> collectives;  // by rank: communicator, number, call, bytes
    std::map<std::string, int> kinds;
    for (const char* rank : {"log.0", "log.1"}) {
      std::set<std::string> recorded = {"0"};
      std::istringstream lines(workplace.content(rank));
      collectives.emplace_back();
      int depth = 0;
      for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string what, stream, name, comm, of_rank, ranks, ctas, bytes, number, peer;
        words >> what >> stream;
        ++kinds[what];
        if (what == "range") ++depth;
        if (what == "end") CHECK(--depth >= 0);
        if (what == "record") CHECK((words >> number, recorded.insert(number).second));
        if (what == "wait") CHECK((words >> number, recorded.contains(number)));
        if (what != "nccl") continue;
        words >> name >> comm >> of_rank >> ranks >> ctas >> bytes >> number >> peer;
        CHECK(ranks == "2");
        const bool is_lane = split == "--pp 2" && comm != "world" && comm != "world.1/0";  // whoever sends is rank 0
        if (!is_lane) CHECK(of_rank == rank + 4);
        if (peer != "-1") CHECK(std::stoi(of_rank) + std::stoi(peer) == 1);
        CHECK(ctas == (comm == "world" ? "0" : is_lane ? "4" : "16"));
        if (peer == "-1") collectives.back().push_back(comm + " " + number + " " + name + " " + bytes);
      }
      CHECK(depth == 0);
    }
    for (const char* kind : {"range", "kernel", "product", "copy", "memset", "record", "wait", "nccl", "stream"})
      CHECK_MESSAGE(kinds[kind] > 0, kind);
    CHECK(collectives[0] == collectives[1]);
    const std::string player = "python3 '" + std::filesystem::absolute("dev/sm_player.py").string() + "' log trace --margin 0,16";
    CHECK(contains(workplace.output(player), "\n| 16 | "));
  }
}
