// Where ranks find rank 0, by their launcher's variables; and ranks that meet there.
#include "runtime/control/start.h"

#include "test/launchers.h"

namespace {

// Where a process with these variables looks for rank 0.
std::string place() {
  const Endpoint rank_0 = find_endpoint(find_launch());
  return rank_0.hosts[0] + ":" + std::to_string(rank_0.port);
}
std::string token(const Variables& variables) {
  return printed_with(variables, [] { return find_endpoint(find_launch()).token; });
}

}  // namespace

TEST_CASE("where rank 0 listens") {
  const std::pair<Variables, std::string> cases[] = {
      {by_torchrun, "n1:29500"},
      {by_torchrun + agent_listens, "n1:29501"},
      {by_torchrun + Variables{{"TORCHELASTIC_USE_AGENT_STORE", "False"}}, "n1:29500"},
      {by_srun, "gpu07:28256"},
      {by_srun + Variables{{"MASTER_PORT", "3000"}}, "gpu07:3000"},
      {by_srun + Variables{{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "3000"}}, "10.0.0.1:3000"},
      {by_srun + by_torchrun, "n1:29500"}};
  for (const auto& [variables, expected] : cases) CHECK(printed_with(variables, place) == expected);
}

TEST_CASE("missing and broken addresses of rank 0") {
  const auto with = [](const std::string& name, const std::string& value) { return by_torchrun + Variables{{name, value}}; };
  const auto refuses = [](const Variables& variables, const auto&... parts) { check_refused(variables, place, parts...); };
  refuses(with("MASTER_ADDR", ""), "torchrun started rank 1 of 2 without MASTER_ADDR", "host of rank 0");
  refuses(with("MASTER_PORT", ""), "without MASTER_PORT", "free port");
  for (std::string number : {"http", "0", "65535", "-1"})
    refuses(with("MASTER_PORT", number), "MASTER_PORT: '" + number + "' is no number from 1 to 65534");
  refuses(by_srun + Variables{{"SLURM_STEP_NODELIST", ""}}, "srun started rank 3 of 4 without MASTER_ADDR");
}

TEST_CASE("the first host of a Slurm list") {
  CHECK(first_host("n1") == "n1");
  CHECK(first_host("n1,n2") == "n1");
  CHECK(first_host("n[01-04,7],m1") == "n01");
  CHECK(first_host("n[7,9-12]") == "n7");
  CHECK(first_host("n[5]") == "n5");
  CHECK(first_host("gpu-[1-2]-ib0,x") == "gpu-1-ib0");
  CHECK(first_host("rack[2-3]node[08-16]") == "rack2node08");
  CHECK(first_host("") == "");
  CHECK(first_host("n[") == "n");
  CHECK(first_host("n[01") == "n01");
  for (const char* nothing : {"[", "[[", "[-", "[,"}) CHECK(first_host(nothing) == "");
  CHECK(first_host("[n1") == "n1");
}

TEST_CASE("tokens: given, or of the job") {
  CHECK(token(by_torchrun + Variables{{"GPT_JOB_TOKEN", "abc"}}) == "abc");
  CHECK(token(by_torchrun) == token(by_torchrun + Variables{{"RANK", "0"}, {"MASTER_ADDR", "localhost"}}));
  CHECK(token(by_torchrun) != token(by_torchrun + Variables{{"MASTER_PORT", "29501"}}));
  CHECK(token(by_torchrun) != token(by_torchrun + Variables{{"TORCHELASTIC_RUN_ID", "7"}}));
  CHECK(token(by_torchrun) != token(by_torchrun + Variables{{"TORCHELASTIC_RESTART_COUNT", "1"}}));
  CHECK(token(by_srun) != token(by_srun + Variables{{"SLURM_STEP_ID", "3"}, {"MASTER_PORT", "28256"}}));
}

TEST_CASE("ranks meet by torchrun's variables") {
  const std::string port = std::to_string(Listener(0).port());
  const auto job = [&](const Variables& more, std::function<void(int)> before = [](int) {}) {
    return std::make_unique<Processes>(2, [=](int rank) {
      set_environment(Variables{{"WORLD_SIZE", "2"}, {"RANK", std::to_string(rank)}, {"MASTER_ADDR", "localhost"},
                                {"MASTER_PORT", port}, {"GPT_JOIN_TIMEOUT", "1"}} + more);
      before(rank);
      const auto control = start_control(find_launch());
      control->barrier();
      end_mpi();
      control->finish();
    });
  };
  SUBCASE("and end") {
    for (const Outcome& outcome : job({})->wait()) {
      CHECK(outcome.code == 0);
      CHECK(outcome.printed == "");
    }
  }
  SUBCASE("not with different tokens") {
    const auto set_token = [](int rank) { setenv("GPT_JOB_TOKEN", std::to_string(rank).c_str(), 1); };
    const auto outcomes = job({}, set_token)->wait();
    INFO(describe(outcomes));
    CHECK(contains(outcomes[0].printed, "rank 1 of 2 did not arrive within 1 s"));
    CHECK(contains(outcomes[1].printed, "another GPT_JOB_TOKEN"));
  }
  SUBCASE("not at an address that is none: all say so") {
    const auto outcomes = job({{"MASTER_ADDR", "no-such-host.invalid"}})->wait();
    INFO(describe(outcomes));
    for (const Outcome& outcome : outcomes) {
      CHECK(outcome.code == 1);
      CHECK(outcome.seconds < 10);
      CHECK(lines(outcome.printed) == 1);
      CHECK(contains(outcome.printed, "train_gpt: MASTER_ADDR: 'no-such-host.invalid' does not resolve"));
    }
  }
  SUBCASE("not at a port that is in use") {
    const Listener other(0);
    const auto outcomes = job({{"MASTER_PORT", std::to_string(other.port())}})->wait();
    INFO(describe(outcomes));
    CHECK(outcomes[0].printed == "train_gpt: port " + std::to_string(other.port()) +
                                     " is in use on this host: choose another MASTER_PORT\n");
    CHECK(contains(outcomes[1].printed, "no rank 0 at localhost"));
  }
  SUBCASE("not without a sensible time-out") {
    CHECK(contains(job({{"GPT_JOIN_TIMEOUT", "soon"}})->wait()[1].printed, "GPT_JOIN_TIMEOUT: 'soon'"));
  }
}
