// The control plane between processes of this machine: joining, what stray connections cannot do, all_gather, and how
// a job ends when a rank dies, stops, fails or hangs.
#include "runtime/control/control.h"

#include <nlohmann/json.hpp>

#include "gpt/base/text.h"
#include "test/bounds.h"
#include "test/ranks.h"

namespace {

constexpr double never = 0, join_s = 15, silence_s = 1;

int free_port() { return Listener(0).port(); }

void sleep_for(double seconds) { usleep(useconds_t(seconds * 1e6)); }

std::unique_ptr<Control> start(int rank, int size, int port, double timeout_s = join_s,
                               const std::string& token = "secret") {
  if (size == 1) return std::make_unique<Control>();
  if (rank == 0) return std::make_unique<Control>(0, wait_for_ranks(Listener(port), size, token, timeout_s));
  return std::make_unique<Control>(rank, join({{"127.0.0.1"}, port, token}, rank, size, timeout_s));
}

void require(bool right, const std::string& what) {
  if (!right) throw std::runtime_error("wrong: " + what);
}

void check_silent_success(Processes& ranks) {
  const std::vector<Outcome> outcomes = ranks.wait();
  INFO(describe(outcomes));
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.code == 0);
    CHECK(outcome.printed == "");
  }
}

// Every rank but `gone` (-1: none) ends with `code` within `seconds`; together they print one line, with all `parts`.
using Texts = std::vector<std::string>;
void check_one_line(Processes& ranks, int gone, int code, double seconds, const Texts& parts) {
  const std::vector<Outcome> outcomes = ranks.wait(seconds + 3);
  INFO(describe(outcomes));
  std::string printed;
  for (int rank = 0; rank < int(outcomes.size()); ++rank) {
    printed += outcomes[size_t(rank)].printed;
    if (rank == gone) continue;
    CHECK(outcomes[size_t(rank)].code == code);
    CHECK(outcomes[size_t(rank)].seconds < seconds);
  }
  CHECK(lines(printed) == 1);
  CHECK(printed.starts_with("train_gpt: "));
  for (const std::string& part : parts) CHECK_MESSAGE(contains(printed, part), part);
}
template <class... Parts>
void check_one_line(Processes& ranks, int gone, int code, double seconds, const Parts&... parts) {
  check_one_line(ranks, gone, code, seconds, Texts{std::string(parts)...});
}

std::string noise(size_t bytes, int seed) {
  std::string text(bytes, 0);
  for (size_t i = 0; i < bytes; ++i) text[i] = char(i * i * 31 + size_t(seed) * 7);
  return text;
}

std::string named(int rank, pid_t pid) {
  return "rank " + std::to_string(rank) + " (host " + this_process().host + ", pid " + std::to_string(pid) + ")";
}
std::string named(const Processes& ranks, int rank) { return named(rank, ranks.pid(rank)); }

}  // namespace

TEST_CASE("ranks meet in any order, know each other and end in silence") {
  using Delays = std::vector<double>;
  for (const Delays& delays : {Delays{0}, Delays{0, 0}, Delays{0.3, 0}, Delays{0, 0.3}, Delays{0.3, 0, 0.1, 0.2, 0}}) {
    const int size = int(delays.size()), port = free_port();
    Processes ranks(size, [&](int rank) {
      sleep_for(delays[size_t(rank)]);
      const auto control = start(rank, size, port);
      require(control->rank() == rank && control->size() == size, "rank and size");
      const auto pids = control->all_gather(std::to_string(getpid()));
      for (int r = 0; r < size; ++r) {
        require(pids[size_t(r)] == std::to_string(control->pid(r)), "pid of rank " + std::to_string(r));
        require(control->host(r) == this_process().host, "host of rank " + std::to_string(r));
      }
      control->finish();
    });
    check_silent_success(ranks);
  }
}

TEST_CASE("all_gather: empty, odd and large messages, and many of them") {
  const int size = 3, port = free_port();
  Processes ranks(size, [&](int rank) {
    const auto control = start(rank, size, port);
    for (size_t bytes : {0ul, 1ul, 13ul, 65537ul, 5'000'003ul}) {
      const auto all = control->all_gather(noise(bytes + size_t(rank), rank));
      require(all.size() == size, "number of messages");
      for (int r = 0; r < size; ++r)
        require(all[size_t(r)] == noise(bytes + size_t(r), r), "message of " + std::to_string(bytes));
    }
    for (int i = 0; i < 1000; ++i) {
      const int next = (rank + 1) % size;
      const auto all = control->all_gather(std::to_string(i * size + rank));
      require(all[size_t(next)] == std::to_string(i * size + next), "a short message");
    }
    control->finish();
  });
  check_silent_success(ranks);
}

TEST_CASE("a barrier waits for the last rank") {
  const int port = free_port();
  Processes ranks(3, [&](int rank) {
    const auto control = start(rank, 3, port);
    control->barrier();
    const double begin = steady_seconds();
    if (rank == 2) sleep_for(0.5);
    control->barrier();
    require(steady_seconds() - begin > 0.45, "waited " + std::to_string(steady_seconds() - begin) + " s");
    control->finish();
  });
  check_silent_success(ranks);
}

TEST_CASE("ranks that meet in different places are told where, and nobody gets the other's data") {
  struct Job {
    std::string places;  // a letter a rank: g gathers, b enters a barrier, B another one, - comes too late to be heard
    std::string ranks_in_first, ranks_in_second;
    std::unique_ptr<Processes> ranks;
  };
  std::vector<Job> jobs;
  jobs.push_back({"gb", ") in host all_gather (test_control.cpp:", ") in host barrier (test_control.cpp:", {}});
  jobs.push_back({"gbg", ") in host barrier (test_control.cpp:", ", ranks 0, 2 in host all_gather (test_", {}});
  jobs.push_back({"Bbb", ") in host barrier (test_control.cpp:", ", ranks 1, 2 in host barrier (test_control.cpp:", {}});
  jobs.push_back({"gb-", ") in host all_gather (test_control.cpp:", ") in host barrier (test_control.cpp:", {}});
  for (Job& job : jobs)
    job.ranks = std::make_unique<Processes>(int(job.places.size()), [&, port = free_port()](int rank) {
      const auto control = start(rank, int(job.places.size()), port);
      control->barrier();
      control->all_gather("both");
      switch (job.places[size_t(rank)]) {
        case 'g': control->all_gather("gathered"); break;
        case 'b': control->barrier(); break;
        case 'B': control->barrier(); break;
        default: sleep_for(10);
      }
      throw std::runtime_error("rank " + std::to_string(rank) + " went on");
    });
  for (Job& job : jobs) {
    CAPTURE(job.places);
    check_one_line(*job.ranks, -1, 1, 4, "ranks meet in different places of the program (meeting 3): ",
                   named(*job.ranks, job.places == "gbg" ? 1 : 0), job.ranks_in_first, job.ranks_in_second);
  }
}

TEST_CASE("a rank that waits in a meeting goes on with its work") {
  const int port = free_port();
  Processes ranks(2, [&](int rank) {
    const auto control = start(rank, 2, port);
    control->watch(silence_s, never);
    int calls = 0;
    control->meanwhile([&] { ++calls; });
    if (rank == 1) sleep_for(0.5);
    control->barrier();
    if (rank == 0) require(calls > 50, "called " + std::to_string(calls) + " times in half a second");
    control->finish();
  });
  check_silent_success(ranks);
}

TEST_CASE("strays can neither join nor hold up a job") {
  const int size = 3, port = free_port();
  const uint32_t huge[] = {0xffffffffu, uint32_t(FrameType::hello)}, half[] = {100, uint32_t(FrameType::hello)};
  const auto frame = [](FrameType type, const std::string& payload) { return *pack(type, payload); };
  const auto hello = [&](const nlohmann::json& token, const nlohmann::json& rank, const nlohmann::json& host) {
    const nlohmann::json fields = {{"protocol", control_protocol}, {"token", token}, {"rank", rank},
                                   {"size", 3},                    {"host", host},   {"pid", 1}};
    return frame(FrameType::hello, fields.dump());
  };
  const auto header = [](const uint32_t(&words)[2]) { return std::string(reinterpret_cast<const char*>(words), 8); };
  const std::vector<std::string> first_words = {"",
                                                "GET / HTTP/1.1\r\nHost: rank0\r\n\r\n",
                                                noise(100'000, 1),
                                                header(huge),
                                                header(half) + "{\"protocol\"",
                                                frame(FrameType::hello, "{"),
                                                frame(FrameType::hello, std::string(60'000, '[')),
                                                frame(FrameType::verdict, "1"),
                                                frame(FrameType::for_all, "x"),
                                                hello("guess", 1, "h"),
                                                hello(7, 1, "h"),
                                                hello("secret", "1", "h"),
                                                hello("secret", 1, 5),
                                                hello("secret", -1, "h"),
                                                hello("secret", 3, "h"),
                                                hello("secret", 0, "h")};
  const auto job = [&](int at) {
    return [=](int rank) {
      if (rank > 0) sleep_for(0.5);
      const auto control = start(rank, size, at);
      control->barrier();
      control->finish();
    };
  };
  double slowness = 0;  // seconds that a job alone takes besides, on a machine with other work
  for (const Outcome& outcome : Processes(size, job(free_port())).wait()) slowness = std::max(slowness, outcome.seconds - 0.5);
  Processes ranks(size, job(port));
  std::vector<Descriptor> strays;  // they stay as long as they are let
  for (int round = 0; round < 10; ++round)
    for (const std::string& words : first_words) {
      std::string problem;
      while (!strays.emplace_back(connect_to("127.0.0.1", port, 1, problem))) strays.pop_back();
      (void)!send(strays.back().get(), words.data(), words.size(), MSG_NOSIGNAL);
    }
  const std::vector<Outcome> outcomes = ranks.wait();
  INFO(describe(outcomes));
  for (const Outcome& outcome : outcomes) {
    CHECK(outcome.code == 0);
    CHECK(outcome.printed == "");
    CHECK(outcome.seconds < 4.5 + 5 * slowness);  // one stray that is waited for takes 5
  }
}

TEST_CASE("a rank whose stream turns to nonsense counts as dead") {
  const int port = free_port();
  Processes ranks(1, [&](int) { start(0, 2, port)->barrier(); });
  std::string problem;
  Descriptor socket;
  while (!(socket = connect_to("127.0.0.1", port, 1, problem))) sleep_for(0.01);
  Connection rank_1(std::move(socket), longest_frame);
  rank_1.send(FrameType::hello, nlohmann::json{{"protocol", control_protocol}, {"token", "secret"}, {"rank", 1},
                                               {"size", 2}, {"host", "elsewhere"}, {"pid", 5}}.dump());
  const uint32_t too_long[] = {uint32_t(longest_frame) + 1, uint32_t(FrameType::heartbeat)};
  rank_1.send(std::make_shared<const std::string>(reinterpret_cast<const char*>(too_long), sizeof too_long));
  check_one_line(ranks, -1, 1, 5, "rank 1 (host elsewhere, pid 5) died", "Protocol error");
}

TEST_CASE("ranks that never come are named, and the ranks that came end too") {
  const int port = free_port();
  Processes ranks(6, [&](int rank) {
    if (rank != 3 && rank != 5) start(rank, 8, port, 1);
  });
  const std::vector<Outcome> outcomes = ranks.wait();
  INFO(describe(outcomes));
  CHECK(outcomes[0].printed == "train_gpt: ranks 3, 5-7 of 8 did not arrive within 1 s: start them all, or give them "
                               "longer with GPT_JOIN_TIMEOUT (seconds)\n");
  for (size_t rank : {0, 1, 2, 4}) CHECK(outcomes[rank].code == 1);
  for (size_t rank : {1, 2, 4}) CHECK(outcomes[rank].printed == "");
  for (size_t rank : {0, 1, 2, 4}) CHECK(outcomes[rank].seconds < 3);
}

TEST_CASE("who cannot reach rank 0, or is refused, says why") {
  const int port = free_port();
  SUBCASE("nobody listens") {
    Processes ranks(1, [&](int) { start(1, 2, port, 0.5); });
    check_one_line(ranks, -1, 1, 3, named(1, ranks.pid(0)),
                   ": no rank 0 at 127.0.0.1 port " + std::to_string(port) + " within 0.5 s (Connection refused)");
  }
  SUBCASE("somebody else listens") {
    Processes ranks(2, [&](int rank) { start(rank, 2, port, 1, "token of " + std::to_string(rank)); });
    const std::vector<Outcome> outcomes = ranks.wait();
    INFO(describe(outcomes));
    CHECK(contains(outcomes[0].printed, "rank 1 of 2 did not arrive within 1 s"));
    CHECK(contains(outcomes[1].printed, "does not know this job"));
    CHECK(lines(outcomes[0].printed + outcomes[1].printed) == 2);
  }
  SUBCASE("a rank is there twice, or has another idea of the size") {
    Processes ranks(4, [&](int rank) {
      sleep_for(0.2 * rank);
      if (rank == 2) start(1, 3, port);       // the second rank 1
      else if (rank == 3) start(2, 4, port);  // thinks there are four
      else start(rank, 3, port, 1);
    });
    const std::vector<Outcome> outcomes = ranks.wait();
    INFO(describe(outcomes));
    CHECK(contains(outcomes[2].printed, "train_gpt: " + named(1, ranks.pid(2)) + ": refused by rank 0"));
    CHECK(contains(outcomes[2].printed, named(ranks, 1) + " is there already"));
    CHECK(contains(outcomes[3].printed, "4 ranks, rank 0 says 3"));
    CHECK(contains(outcomes[0].printed, "rank 2 of 3 did not arrive"));
    for (const Outcome& outcome : outcomes) CHECK(outcome.code == 1);
  }
  SUBCASE("the port is in use") {
    const Listener other(0);
    const std::string error = error_of([&] { Listener(other.port()); });
    CHECK(is_line_with(error, "port " + std::to_string(other.port()) + " is in use", "MASTER_PORT"));
  }
  SUBCASE("a name that is none") {
    std::string problem;
    CHECK(!connect_to("no-such-host.invalid", port, 1, problem));
    CHECK(contains(problem, "'no-such-host.invalid' does not resolve"));
  }
}

TEST_CASE("a rank that goes ends the job, which names it") {
  struct Fate {
    std::string name;
    std::function<void(Control&)> action;
    std::string message;
    int code;
  };
  const Fate fates[] = {
      {"kill -9", [](Control&) { raise(SIGKILL); }, " died", 1},
      {"kill -9, survived by a child",
       [](Control&) { raise(std::system("sleep 3 &") == 0 ? SIGKILL : SIGUSR1); }, " died", 1},
      {"SIGSTOP", [](Control&) { raise(SIGSTOP); }, " has not answered for 1 s", 1},
      {"exit", [](Control&) { exit(0); }, " died", 1},
      {"out of scope", [](Control&) {}, " died", 1},
      {"fail", [](Control& control) { control.fail("the\ndata ran out", 3); }, ": the?data ran out", 3}};
  struct Job {
    const Fate& fate;
    int gone;
    std::unique_ptr<Processes> ranks;
  };
  std::vector<Job> jobs;  // side by side: they spend their time waiting
  for (const Fate& fate : fates)
    for (int gone : {0, 2})
      jobs.push_back({fate, gone, std::make_unique<Processes>(4, [&, gone, port = free_port()](int rank) {
                        const auto control = start(rank, 4, port);
                        control->watch(silence_s, never);
                        control->barrier();
                        if (rank == gone) return fate.action(*control);
                        control->barrier();
                      })});
  for (Job& job : jobs) {
    CAPTURE(job.fate.name);
    CAPTURE(job.gone);
    const std::string message = named(*job.ranks, job.gone) + job.fate.message;
    if (job.gone == 2 || job.fate.name == "fail") {
      check_one_line(*job.ranks, job.gone, job.fate.code, 6, message);
      continue;
    }
    const std::vector<Outcome> outcomes = job.ranks->wait();  // rank 0 is gone: each survivor speaks for itself
    INFO(describe(outcomes));
    for (int rank = 1; rank < 4; ++rank) {
      CHECK(outcomes[size_t(rank)].code == 1);
      CHECK(outcomes[size_t(rank)].seconds < 6);
      CHECK(outcomes[size_t(rank)].printed.starts_with("train_gpt: " + named(*job.ranks, rank) + ": " + message));
      CHECK(lines(outcomes[size_t(rank)].printed) == 1);
    }
  }
}

TEST_CASE("several ranks that die together are named together") {
  const int port = free_port();
  Processes ranks(5, [&](int rank) {
    const auto control = start(rank, 5, port);
    control->barrier();
    if (rank >= 2) pause();
    control->barrier();
  });
  sleep_for(0.7);  // by then they have met
  kill(ranks.pid(0), SIGSTOP);
  for (int rank : {4, 2, 3}) kill(ranks.pid(rank), SIGKILL);
  sleep_for(0.1);
  kill(ranks.pid(0), SIGCONT);
  const std::vector<Outcome> outcomes = ranks.wait();
  INFO(describe(outcomes));
  CHECK(outcomes[0].printed == "train_gpt: " + named(ranks, 2) + " died; likewise ranks 3, 4\n");
  CHECK(outcomes[0].code == 1);
  CHECK(outcomes[1].printed == "");
  CHECK(outcomes[1].code == 1);
}

TEST_CASE("one error on all ranks is one line") {
  const int port = free_port();
  Processes ranks(4, [&](int rank) { start(rank, 4, port)->fail("--heads 3: no divisor", 2); });
  check_one_line(ranks, -1, 2, 2, "train_gpt: --heads 3: no divisor\n");
}

TEST_CASE("a death explains the errors that follow from it") {
  const int port = free_port();
  Processes ranks(3, [&](int rank) {
    const auto control = start(rank, 3, port);
    control->barrier();
    if (rank == 1) raise(SIGKILL);
    control->fail("connection reset by peer");
  });
  check_one_line(ranks, 1, 1, 2, named(ranks, 1) + " died");
}

TEST_CASE("before an error ends the job rank 0 finishes its work, as long as nobody else has gone") {
  const int port = free_port();
  Processes ranks(3, [&](int rank) {
    const auto control = start(rank, 3, port);
    control->before_end([rank](const std::function<bool()>& all_are_there) {
      for (int tenths = 0; rank == 0 && tenths < 50 && all_are_there(); ++tenths) sleep_for(0.1);
      return rank == 1;  // which waits for rank 0; rank 2 goes at once
    });
    control->barrier();
    if (rank == 1) control->fail("no data", 3);
    sleep_for(10);
  });
  check_one_line(ranks, -1, 3, 3, named(ranks, 1) + ": no data");
}

TEST_CASE("one rank alone fails without a rank's name") {
  Processes ranks(1, [&](int) { Control().fail("no data", 2); });
  check_one_line(ranks, -1, 2, 1, "train_gpt: no data\n");
}

TEST_CASE("a collective that hangs: where the ranks differ, then what each did last") {
  struct Job {
    std::string collectives;  // a letter a rank: g gathers, b broadcasts, h enters the host's barrier
    std::string odd_one, difference;
    std::unique_ptr<Processes> ranks;
  };
  std::vector<Job> jobs;
  jobs.push_back({"gg-g", "rank 2 (host ",
                  ") not yet in #4, ranks 0, 1, 3 in #4 all_gather of 100 bytes\n", {}});
  jobs.push_back({"gbgg", "rank 1 (host ",
                  ") in #4 broadcast of 100 bytes, ranks 0, 2, 3 in #4 all_gather of 100 bytes\n", {}});
  jobs.push_back({"gggg", "ranks 0-3 ", "in #4 all_gather of 100 bytes\n", {}});
  jobs.push_back({"h-hh", "rank 1 (host ", ") not yet in #4, ranks 0, 2, 3 in #4 host barrier\n", {}});
  for (Job& job : jobs)
    job.ranks = std::make_unique<Processes>(4, [&, port = free_port()](int rank) {
      const auto control = start(rank, 4, port);
      control->watch(silence_s, 0.5);
      for (int i = 0; i < 3; ++i) control->calls().leave(control->calls().enter("all_reduce", 4096));
      if (job.collectives[size_t(rank)] == 'g') control->calls().enter("all_gather", 100);
      if (job.collectives[size_t(rank)] == 'b') control->calls().enter("broadcast", 100);
      if (job.collectives[size_t(rank)] == 'h') control->barrier();
      sleep_for(10);
    });
  for (Job& job : jobs) {
    const std::vector<Outcome> outcomes = job.ranks->wait();
    INFO(describe(outcomes));
    const std::string& text = outcomes[0].printed;
    CHECK(text.starts_with("train_gpt: a collective takes longer than 0.5 s (--collective-timeout): " + job.odd_one));
    CHECK(contains(text, job.difference));
    CHECK(contains(text, "#2 all_reduce 4096 bytes 0.000 s | #3 all_reduce 4096 bytes 0.000 s"));
    CHECK(contains(text, " s, not left\n"));
    for (int rank = 0; rank < 4; ++rank) {
      CHECK(outcomes[size_t(rank)].code == 1);
      CHECK(outcomes[size_t(rank)].seconds < 6);
      CHECK(contains(text, "\n  " + named(*job.ranks, rank) + ": #"));
      if (rank > 0) CHECK(outcomes[size_t(rank)].printed == "");
    }
  }
}

TEST_CASE("a pipeline that hangs: stages, ranks, and what each waits for; the rank that waits for nothing comes first") {
  Processes ranks(6, [port = free_port()](int rank) {
    const auto control = start(rank, 6, port);
    control->watch(silence_s, 0.5);
    control->name_stages(2, 8);
    control->barrier();
    const int stage = rank / 2;
    for (int i = 0; i < 7; ++i)
      control->calls().leave(control->calls().enter(stage ? "receive" : "send", 4096, 1, stage ? "from_previous" : "to_next"));
    if (stage == 0) control->calls().enter("receive", 4096, 1, "from_next");
    if (stage == 1 && rank == 2) control->calls().enter("all_gather", 64, 1, "tp");
    if (stage == 2) control->calls().enter("receive", 4096, 1, "from_previous");
    sleep_for(10);
  });
  const std::vector<Outcome> outcomes = ranks.wait();
  INFO(describe(outcomes));
  const std::string& text = outcomes[0].printed;
  CHECK(text.starts_with("train_gpt: a collective takes longer than 0.5 s (--collective-timeout): rank 3 (stage 1, host "));
  CHECK(contains(text, ") after from_previous #7 receive, rank 2 (stage 1, host "));
  CHECK(contains(text, ") in tp #1 all_gather of 64 bytes, "));
  CHECK(contains(text, "ranks 0, 1 (stage 0) in from_next #1 receive of 4096 bytes"));
  CHECK(contains(text, "ranks 4, 5 (stage 2) in from_previous #8 receive of 4096 bytes"));
  for (const Outcome& outcome : outcomes) CHECK(outcome.code == 1);
}

TEST_CASE("a stage that dies: the line says what the others wait for, too") {
  const int port = free_port();
  Processes ranks(4, [&](int rank) {
    const auto control = start(rank, 4, port);
    control->watch(silence_s, 10);
    control->name_stages(1, 8);
    control->barrier();
    if (rank != 2) control->calls().enter("receive", 4096, 1, rank == 3 ? "from_previous" : "from_next");
    sleep_for(0.9);  // several heartbeats
    if (rank == 2) raise(SIGKILL);
    sleep_for(10);
  });
  check_one_line(ranks, 2, 1, 4, "train_gpt: rank 2 (stage 2, host ", ") died; rank 3 (stage 3, host ",
                 ") in from_previous #1 receive of 4096 bytes, ranks 0, 1 in from_next #1 receive of 4096 bytes");
}

TEST_CASE("an error of a rank in a pipeline names its stage") {
  const int port = free_port();
  Processes ranks(4, [&](int rank) {
    const auto control = start(rank, 4, port);
    control->name_stages(2, 8);
    control->barrier();
    if (rank == 3) control->fail("out of memory");
    sleep_for(10);
  });
  check_one_line(ranks, -1, 1, 3, "train_gpt: rank 3 (stage 1, host ", "): out of memory");
}

TEST_CASE("what waits for files may take longer") {
  Processes ranks(2, [port = free_port()](int rank) {
    const auto control = start(rank, 2, port);
    control->watch(silence_s, 0.2);
    if (rank == 1) sleep_for(1);
    control->barrier(10);
    control->finish();
  });
  check_silent_success(ranks);
}

TEST_CASE("a job that is stopped and continued goes on") {
  const int port = free_port();
  Processes ranks(3, [&](int rank) {
    const auto control = start(rank, 3, port);
    control->watch(silence_s, 1.5);
    control->calls().enter("all_reduce", 8);
    for (int i = 0; i < 13; ++i) sleep_for(0.1);  // of its own time
    control->calls().leave(1);
    control->finish();
  });
  sleep_for(0.6);
  ranks.signal(SIGSTOP);
  sleep_for(2);
  for (int rank : {2, 1, 0}) {
    kill(ranks.pid(rank), SIGCONT);
    sleep_for(0.2);
  }
  check_silent_success(ranks);
}

TEST_CASE("SIGTERM waits until the dead rank has been named") {
  const int port = free_port();
  Processes ranks(3, [&](int rank) {
    const auto control = start(rank, 3, port);
    control->barrier();
    if (rank == 1) raise(SIGKILL);
    raise(SIGTERM);  // what mpirun does next
    control->barrier();
  });
  check_one_line(ranks, 1, 1, 2, named(ranks, 1) + " died");
}

TEST_CASE("SIGTERM hurries the judgement of silence: the launcher has noticed something") {
  const int port = free_port();
  Processes ranks(3, [&](int rank) {
    const auto control = start(rank, 3, port);
    control->watch(2, never);
    control->barrier();
    if (rank == 1) raise(SIGSTOP);
    sleep_for(1.4);
    raise(SIGTERM);
    control->barrier();
  });
  check_one_line(ranks, 1, 1, 4, named(ranks, 1) + " has not answered for ");
}

TEST_CASE("SIGTERM for no known reason ends a rank as it would any program") {
  const int port = free_port();
  Processes ranks(2, [&](int rank) {
    const auto control = start(rank, 2, port);
    raise(SIGTERM);
    control->barrier();
    sleep_for(10);
  });
  const std::vector<Outcome> outcomes = ranks.wait(5);
  INFO(describe(outcomes));
  CHECK(outcomes[0].code == -SIGTERM);
  CHECK(outcomes[0].seconds > 0.5);
}

TEST_CASE("finish waits for all; what ranks do afterwards is nobody's business") {
  const int port = free_port();
  Processes ranks(4, [&](int rank) {
    const auto control = start(rank, 4, port);
    if (rank == 3) sleep_for(0.3);
    const double begin = steady_seconds();
    control->finish();
    if (rank != 3) require(steady_seconds() - begin > 0.2, "came back early");
    control->finish();
    if (rank > 0) sleep_for(0.2 * rank);
  });
  check_silent_success(ranks);
}

TEST_CASE("the flight recorder keeps the last collectives") {
  FlightRecorder recorder;
  CHECK(recorder.entries().empty());
  const uint64_t kept = FlightRecorder::capacity, last = kept + 136;
  for (uint64_t i = 1; i <= last; ++i) recorder.enter(i % 2 ? "odd" : "even", i);
  recorder.leave(3);  // long overwritten
  recorder.leave(150);
  const auto entries = recorder.entries();
  REQUIRE(entries.size() == kept);
  CHECK(entries.front().sequence == 137);
  CHECK(entries.back().sequence == last);
  CHECK(entries.back().bytes == last);
  CHECK(entries.back().name == std::string("even"));
  CHECK(std::ranges::all_of(entries, [](const auto& entry) { return entry.left.has_value() == (entry.sequence == 150); }));

  const double entered = entries.back().entered;
  recorder.forgive(5);
  CHECK(recorder.entries().back().entered == about(entered + 5));
}

TEST_CASE("the flight recorder shows what hangs in a rehearsal, and forgets what has left") {
  FlightRecorder recorder;
  recorder.leave(recorder.enter("broadcast", 4, 1, "tp"));
  recorder.rehearse(true);
  const uint64_t first = recorder.enter("all_gather", 64, 1, "tp"), second = recorder.enter("all_reduce", 64, 1, "tp");
  CHECK(brief(recorder.entries(), 0).place == "in tp #1 all_gather of 64 bytes");
  recorder.leave(first);
  CHECK(brief(recorder.entries(), 0).place == "in tp #2 all_reduce of 64 bytes");
  recorder.rehearse(false);
  recorder.leave(second);
  CHECK(recorder.entries().size() == 1);
  CHECK(brief(recorder.entries(), 0).place == "not yet in tp #2");
  recorder.enter("all_reduce", 32, 1, "tp");
  CHECK(brief(recorder.entries(), 0).place == "in tp #2 all_reduce of 32 bytes");
}

TEST_CASE("a flight record in brief") {
  FlightRecorder recorder;
  CHECK(brief(recorder.entries(), 0).place == "not yet in #1");
  CHECK(brief(recorder.entries(), 0).waiting == 0);
  for (int i = 1; i <= 9; ++i) recorder.enter("all_reduce", size_t(i));
  const double now = recorder.entries().front().entered + 7;
  CHECK(brief(recorder.entries(), now).place == "in #1 all_reduce of 1 bytes");
  CHECK(brief(recorder.entries(), now).waiting == 7);
  for (uint64_t i = 1; i <= 5; ++i) recorder.leave(i);
  const FlightBrief record = brief(recorder.entries(), now);
  CHECK(record.place == "in #6 all_reduce of 6 bytes");
  CHECK(contains(record.history, "#4 all_reduce 4 bytes 0.000 s | #5"));
  CHECK(contains(record.history, "| #7 all_reduce 7 bytes 7.000 s, not left"));
  CHECK(!contains(record.history, "#8"));
  for (uint64_t i = 6; i <= 9; ++i) recorder.leave(i);
  CHECK(brief(recorder.entries(), now).place == "not yet in #10");

  const uint64_t first = recorder.enter("all_gather", 64, 1, "tp");  // numbered in its group
  recorder.enter("reduce_scatter", 32, 1, "data");
  CHECK(brief(recorder.entries(), now).place == "in tp #1 all_gather of 64 bytes");
  recorder.leave(first);
  CHECK(brief(recorder.entries(), now).place == "in data #1 reduce_scatter of 32 bytes");
  CHECK(contains(brief(recorder.entries(), now).history, "tp #1 all_gather 64 bytes"));
}

TEST_CASE("lists of ranks") {
  CHECK(rank_list({3}) == "rank 3");
  CHECK(rank_list({3, 5}) == "ranks 3, 5");
  CHECK(rank_list({0, 1, 3}) == "ranks 0, 1, 3");
  CHECK(rank_list({0, 1, 2, 3, 7, 9, 10, 11}) == "ranks 0-3, 7, 9-11");
}
