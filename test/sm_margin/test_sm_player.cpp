// The CPU device's log of what the host gives to its streams (cpu/log.h), and dev/sm_player.py, which plays it on model GPUs.
#include <doctest/doctest.h>

#include <map>
#include <set>
#include <sstream>

#include "test/workplace.h"

namespace {

const bool python_found = std::system("python3 --version >/dev/null 2>&1") == 0;

// One rank's log by hand, of steps 1 to 3. Stream 1 is "compute", 2 "communication", 3 "inner communication".
class HandLog {
 public:
  explicit HandLog(int rank = 0) : rank_(std::to_string(rank)) {}

  // A product of 8,192 cubed in 16 bits: 2·8192³ / (0.62·989e12) + 8192²·2 / (0.9·3.35e12) s = 1.8376 ms on 132 SMs.
  void product() { launch("matmul", 1, "product 1 8192 8192 8192 2 2"); }
  // A kernel of short blocks that moves so much in 1 ms.
  void short_kernel() { launch("gelu_forward", 1, "kernel 1 gelu_kernel 1000", "3015000000"); }
  // Of two ranks, by 16 CTAs: 3 µs + 720e6 / 2 / (0.8·450e9) s = 1.003 ms.
  void reduce_scatter(int stream = 2) { nccl("reduce_scatter", "ncclReduceScatter", stream, " 2 16 720000000 ", "-1"); }
  // Of or for the other rank, by 4 CTAs: 3 µs + 90e6 / (4·22.5e9) s = 1.003 ms.
  void send() { nccl("send", "ncclSend", 2, " 2 4 90000000 ", "1"); }
  void receive() { nccl("receive", "ncclRecv", 2, " 2 4 90000000 ", "0"); }
  void micro_batch(int number) { micro_batch_ = number; }  // of what follows
  void wait(int stream, int for_stream) {
    add("record " + std::to_string(for_stream) + " " + std::to_string(++records_));
    add("wait " + std::to_string(stream) + " " + std::to_string(records_));
  }
  template <class Issue>
  HandLog& three_steps(Issue issue) {
    for (step_ = 1; step_ <= 3; ++step_) issue(*this);
    return *this;
  }

  static void write(const TemporaryFolder& folder, const std::vector<HandLog>& ranks) {
    std::string events;
    for (const HandLog& one : ranks) {
      put(folder / ("log." + one.rank_), one.log_);
      events += (events.empty() ? "" : ",\n") + one.events_;
      for (const char* stream : {"1,\"args\":{\"name\":\"compute\"}}", "2,\"args\":{\"name\":\"communication\"}}",
                                 "3,\"args\":{\"name\":\"inner communication\"}}"})
        events += ",\n{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":" + one.rank_ + ",\"tid\":" + stream;
    }
    put(folder / "trace", "{\"traceEvents\":[" + events + "]}");
  }
  // Two ranks that do the same.
  template <class Issue>
  static void write(const TemporaryFolder& folder, Issue issue) {
    write(folder, std::vector{HandLog(0).three_steps(issue), HandLog(1).three_steps(issue)});
  }

 private:
  void add(const std::string& line) { log_ += line + "\n"; }
  void launch(const std::string& name, int stream, const std::string& line, const std::string& bytes = "1") {
    add("range " + name), add(line), add("end");
    events_ += (events_.empty() ? "" : ",\n") + ("{\"ph\":\"X\",\"name\":\"" + name) + "\",\"pid\":" + rank_ + ",\"tid\":" +
               std::to_string(stream) + ",\"args\":{\"bytes\":" + bytes + ",\"step\":" + std::to_string(step_) +
               ",\"micro-batch\":" + std::to_string(micro_batch_) + "}}";
  }
  void nccl(const char* name, const std::string& call, int stream, const std::string& size, const std::string& peer) {
    const std::string number = std::to_string(stream);
    launch(name, stream, "nccl " + number + " " + call + " world." + number + "/0 " + rank_ + size +
                             std::to_string(calls_[stream]++) + " " + peer + " 0");
  }

  std::string rank_, log_, events_;
  int step_ = 1, micro_batch_ = 0, records_ = 0;
  std::map<int, int> calls_;
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

// The GAP and the EVENT are 2 µs. Without margin the second product takes all SMs 2 µs before the reduce_scatter wants 16. So
// that moves after it, and the next step's first product waits for it: 4 + 2 µs + 2 · 1.8376 ms + 1.003 ms = 4.684 ms. With 8
// it is the same, and products take 132/124 times as long: 4.921 ms. With 16, 2 · (2 µs + 132/116 · 1.8376 ms) = 4.186 ms.
TEST_CASE("a reduce_scatter moves behind the next product with a margin, and after it without" * doctest::skip(!python_found)) {
  const TemporaryFolder folder;
  HandLog::write(folder, [](HandLog& log) {
    log.product();
    log.wait(2, 1);
    log.reduce_scatter();
    log.product();
    log.wait(1, 2);
  });
  has_rows(play(folder, "--margin 0,8,16"),
           {"| 0 | 4.68 | 3.68 | 0.00 | 1.01 |", "| 8 | 4.92 | 3.68 | 0.24 | 1.01 |", "| 16 | 4.19 | 3.68 | 0.51 | 0.00 |",
            "| 0" + scatter + "0 | 0, 0, 100 | 1.84 |", "| 8" + scatter + "0 | 0, 0, 100 | 1.95 |",
            "| 16" + scatter + "100 | 0, 100, 0 | 0.00 |"});
  // 8 CTAs find room in a margin of 8: 2 · (2 µs + 1.9562 ms), if they move as much as 16. Half as fast, they end after the
  // product of 124 blocks, 2.003 ms + 4 µs after the first one: 1.9562 + 0.004 + 2.003 + 0.004 ms.
  const std::string fewer = "--margin 8 --ctas communication=8";
  has_rows(play(folder, fewer + " --cta-gb 45"), {"| 8 | 3.92 |", "| 8" + scatter + "100 | 0, 100, 0 |"});
  has_rows(play(folder, fewer), {"| 8 | 3.97 |", "| 1 | 2.00 | 98 | 0, 98, 2 | 0.00 |"});
  // With the rule "pending" only the second product has the margin: 2 · 2 µs + (1 + 132/116) · 1.8376 ms.
  has_rows(play(folder, "--margin 16 --rule pending"), {"| 16 | 3.93 | 3.68 | 0.25 |"});
}

// The reduce_scatter comes first here, 4 µs after the product of the step before, and the product 2 µs later. 16 of its 132
// blocks wait until the sum has travelled, 1.007 ms after the step's begin, and take 1.8376 ms: a step of 2.845 ms. A product of
// 116 blocks waits for nothing: 6 µs + 132/116 · 1.8376 ms = 2.097 ms.
TEST_CASE("a product beside NCCL has a second wave of blocks without a margin" * doctest::skip(!python_found)) {
  const TemporaryFolder folder;
  HandLog::write(folder, [](HandLog& log) {
    log.reduce_scatter();
    log.product();
    log.wait(2, 1);
    log.wait(1, 2);
  });
  has_rows(play(folder, "--margin 0,16"), {"| 0 | 2.84 | 1.84 | 1.00 |", "| 16 | 2.10 | 1.84 | 0.25 |"});
  std::filesystem::remove(folder / "log.1");
  CHECK(contains(play(folder, "").error, "error: rank 0 waits for ever for 'nccl 2 ncclReduceScatter world.2/0 0 2 16 "));
}

// As above, and 2 µs after the product another reduce_scatter wants 16 SMs. It gets those of the first one, before the
// product's 16 blocks, which begin when the others end: 6 µs + 2 · 1.8376 ms. (They would end after 2.84 ms otherwise.)
TEST_CASE("NCCL gets SMs before kernels do" * doctest::skip(!python_found)) {
  const TemporaryFolder folder;
  HandLog::write(folder, [](HandLog& log) {
    log.reduce_scatter();
    log.wait(3, 1);
    log.reduce_scatter(3);
    log.product();
    log.wait(2, 1);
    log.wait(1, 2);
  });
  has_rows(play(folder, "--margin 0"), {"| 0 | 3.68 | 1.84 | 1.84 |"});
}

// A short kernel has 116 SMs from its begin at 6 µs until 1.007 ms, then all: 1.007 ms + 1 ms − 116/132 · 1.001 ms = 1.127 ms.
TEST_CASE("kernels of short blocks use what NCCL leaves" * doctest::skip(!python_found)) {
  const TemporaryFolder folder;
  HandLog::write(folder, [](HandLog& log) {
    log.reduce_scatter();
    log.short_kernel();
    log.wait(2, 1);
    log.wait(1, 2);
  });
  for (const char* margin : {"0", "16"})
    has_rows(play(folder, std::string("--margin ") + margin), {std::string("| ") + margin + " | 1.13 | 1.00 | 0.12 |"});
  HandLog::write(folder, [](HandLog& log) {  // alone: 10 · (2 µs + 1 ms)
    for (int i = 0; i < 10; ++i) log.short_kernel();
  });
  has_rows(play(folder, "--margin 0"), {"| 0 | 10.02 | 10.00 | 0.00 | 0.02 |"});
}

// 4 + 2 + 4 µs + 2 · 1.8376 ms + 1.003 ms; with a margin only the second product takes 132/116 times as long, 0.253 ms more.
TEST_CASE("passes that give NCCL nothing have no margin" * doctest::skip(!python_found)) {
  const TemporaryFolder folder;
  HandLog::write(folder, [](HandLog& log) {
    log.micro_batch(0);
    log.product();
    log.micro_batch(1);
    log.product();
    log.wait(2, 1);
    log.reduce_scatter();
    log.wait(1, 2);
  });
  has_rows(play(folder, "--margin 0,16"), {"| 0 | 4.69 | 3.68 | 0.00 |", "| 16 | 4.94 | 3.68 | 0.25 |"});
}

// Rank 0 multiplies twice before it sends: 4 + 2 + 4 µs + 2 · 1.8376 ms + 1.003 ms = 4.688 ms. Rank 1 waits for it on 4 SMs, so
// that its only product takes 1.8376 ms longer; a mean of 0.92 ms. With a margin of 4, products take 132/128 times as long: 0.057
// ms each, and none waits.
TEST_CASE("a receive holds its SMs while it waits for the sender" * doctest::skip(!python_found)) {
  const TemporaryFolder folder;
  HandLog::write(folder, std::vector{HandLog(0).three_steps([](HandLog& log) {
                                       log.product();
                                       log.product();
                                       log.wait(2, 1);
                                       log.send();
                                       log.wait(1, 2);
                                     }),
                                     HandLog(1).three_steps([](HandLog& log) {
                                       log.receive();
                                       log.product();
                                       log.wait(2, 1);
                                       log.wait(1, 2);
                                     })});
  has_rows(play(folder, "--margin 0,4"), {"| 0 | 4.69 | 2.76 | 0.92 |", "| 4 | 4.80 | 2.76 | 0.09 |"});
}

TEST_CASE("bad input of the player is one line" * doctest::skip(!python_found)) {
  const TemporaryFolder folder;
  HandLog::write(folder, [](HandLog& log) { log.product(); });
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
  for (const std::string split : {"--tp 2", "--pp 2", "--zero 1", "--cp 2"}) {
    CAPTURE(split);
    workplace.output("rm -f log.*; GPT_CPU_LOG=log GPT_CPU_DRY=1 OMP_NUM_THREADS=1 " + mpirun() +
                     " 2 $GPT --train text --layers 2 --heads 2 --channels 32 --seq-len 16 --micro-batch 2 --global-batch 8 --steps 3 "
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
        CHECK(ctas == (comm == "world" ? "4" : is_lane ? "2" : split == "--zero 1" ? "8" : split == "--cp 2" && comm == "world.1/0" ? "8" : "16"));
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
