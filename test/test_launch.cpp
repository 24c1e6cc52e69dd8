// Which rank a process is, by its launcher's variables; and ranks that meet by these variables.
#include "gpt/device_choice.h"
#include "gpt/launch.h"

#include "test/ranks.h"

namespace {

using Variables = std::vector<std::pair<std::string, std::string>>;

void set_environment(const Variables& variables) {
  clearenv();
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
}

std::string describe(const Launch& launch) {
  std::string text = launch.how + " " + std::to_string(launch.rank) + "/" + std::to_string(launch.size);
  if (launch.over_mpi) return text + " over MPI";
  if (launch.size > 1) text += " at " + launch.rank_0.hosts[0] + ":" + std::to_string(launch.rank_0.port);
  return text;
}

// What a process with these variables alone finds, or its error.
std::string found(const Variables& variables) {
  Ranks process(1, [&](int) {
    set_environment(variables);
    std::printf("%s", describe(find_launch()).c_str());
    std::fflush(stdout);
  });
  return process.wait()[0].printed;
}

std::string token(const Variables& variables) {
  Ranks process(1, [&](int) {
    set_environment(variables);
    std::printf("%s", find_launch().rank_0.token.c_str());
    std::fflush(stdout);
  });
  return process.wait()[0].printed;
}

Variables operator+(Variables a, const Variables& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const Variables mpirun = {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}, {"PMIX_RANK", "1"}};
const Variables torchrun = {
    {"RANK", "1"}, {"LOCAL_RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "n1"}, {"MASTER_PORT", "29500"}};
const Variables batch = {{"SLURM_JOB_ID", "1234"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}};
const Variables srun = {{"SLURM_JOB_ID", "1234"},      {"SLURM_STEP_ID", "2"},
                        {"SLURM_NTASKS", "4"},         {"SLURM_PROCID", "3"},
                        {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_STEP_NODELIST", "gpu[07-09,12]"}};
const Variables agent_listens = {{"TORCHELASTIC_USE_AGENT_STORE", "True"}};

}  // namespace

TEST_CASE("launchers") {
  const std::pair<Variables, std::string> cases[] = {
      {{}, "alone 0/1"},
      {{{"RANK", ""}, {"WORLD_SIZE", ""}}, "alone 0/1"},
      {torchrun, "torchrun 1/2 at n1:29500"},
      {torchrun + agent_listens, "torchrun 1/2 at n1:29501"},
      {torchrun + Variables{{"TORCHELASTIC_USE_AGENT_STORE", "False"}}, "torchrun 1/2 at n1:29500"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}}, "alone 0/1"},
      {batch, "alone 0/1"},
      {srun, "srun 3/4 at gpu07:28256"},
      {srun + Variables{{"MASTER_PORT", "3000"}}, "srun 3/4 at gpu07:3000"},
      {srun + Variables{{"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "3000"}}, "srun 3/4 at 10.0.0.1:3000"},
      {srun + Variables{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}, "alone 0/1"},
      {srun + Variables{{"PMIX_RANK", "3"}}, has_mpi ? "srun 3/4 over MPI" : "srun 3/4 at gpu07:28256"},
      {srun + torchrun, "torchrun 1/2 at n1:29500"},
      {srun + torchrun + Variables{{"PMIX_RANK", "3"}}, "torchrun 1/2 at n1:29500"},
      {{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}, "alone 0/1"}};
  for (const auto& [variables, expected] : cases) CHECK(found(variables) == expected);
  const Variables other_mpi = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}};
  for (const Variables& variables : {mpirun, mpirun + torchrun, mpirun + srun, other_mpi}) {
    const std::string text = found(variables);
    CAPTURE(text);
    if (has_mpi) CHECK(text == "mpirun 1/2 over MPI");
    else CHECK(text.starts_with("train_gpt: mpirun started rank 1 of 2, and this program was built without MPI: "));
  }
}

TEST_CASE("missing, broken and contradictory variables") {
  const auto refuses = [](const Variables& variables, const auto&... parts) {
    const std::string error = found(variables);
    INFO(error);
    CHECK(error.starts_with("train_gpt: "));
    CHECK(lines(error) == 1);
    for (const std::string& part : {std::string(parts)...}) CHECK_MESSAGE(contains(error, part), part);
  };
  const auto with = [](const std::string& name, const std::string& value) {
    return torchrun + Variables{{name, value}};
  };
  refuses({{"RANK", "1"}}, "RANK is set", "WORLD_SIZE is not");
  refuses({{"WORLD_SIZE", "2"}}, "WORLD_SIZE is set", "RANK is not");
  for (std::string number : {"x", "1x", "-1", " 1", "1.5", "99999999999999999999", "100000"})
    refuses(with("RANK", number), "RANK: '" + number + "' is no number from 0 to 99999");
  for (std::string number : {"two", "0", "-4"})
    refuses(with("WORLD_SIZE", number), "WORLD_SIZE: '" + number + "' is no number from 1");
  refuses(with("RANK", "2"), "RANK 2", "WORLD_SIZE 2", "the last is 1");
  refuses(with("LOCAL_RANK", "2"), "LOCAL_RANK: '2'", "from 0 to 1");
  refuses(with("MASTER_ADDR", ""), "torchrun started rank 1 of 2 without MASTER_ADDR", "host of rank 0");
  refuses(with("MASTER_PORT", ""), "without MASTER_PORT", "free port");
  for (std::string number : {"http", "0", "65535", "-1"})
    refuses(with("MASTER_PORT", number), "MASTER_PORT: '" + number + "' is no number from 1 to 65534");
  refuses(mpirun + with("WORLD_SIZE", "4"), "RANK 1 of WORLD_SIZE 4", "mpirun says rank 1 of 2", "unset");
  refuses(mpirun + with("RANK", "0"), "RANK 0 of WORLD_SIZE 2", "mpirun says rank 1 of 2");
  refuses({{"OMPI_COMM_WORLD_SIZE", "2"}}, "OMPI_COMM_WORLD_RANK is not");
  refuses(srun + Variables{{"SLURM_PROCID", "four"}}, "SLURM_PROCID: 'four'");
  refuses(srun + Variables{{"SLURM_PROCID", "4"}}, "SLURM_PROCID 4", "SLURM_STEP_NUM_TASKS 4");
  refuses(srun + Variables{{"SLURM_STEP_NODELIST", ""}}, "srun started rank 3 of 4 without MASTER_ADDR");
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
}

TEST_CASE("tokens: given, or of the job") {
  CHECK(token(torchrun + Variables{{"GPT_JOB_TOKEN", "abc"}}) == "abc");
  CHECK(token(torchrun) == token(torchrun + Variables{{"RANK", "0"}, {"MASTER_ADDR", "localhost"}}));
  CHECK(token(torchrun) != token(torchrun + Variables{{"MASTER_PORT", "29501"}}));
  CHECK(token(torchrun) != token(torchrun + Variables{{"TORCHELASTIC_RUN_ID", "7"}}));
  CHECK(token(torchrun) != token(torchrun + Variables{{"TORCHELASTIC_RESTART_COUNT", "1"}}));
  CHECK(token(srun) != token(srun + Variables{{"SLURM_STEP_ID", "3"}, {"MASTER_PORT", "28256"}}));
}

TEST_CASE("ranks meet by torchrun's variables") {
  const std::string port = std::to_string(Listener(0).port());
  const auto job = [&](const Variables& more, std::function<void(int)> before = [](int) {}) {
    return std::make_unique<Ranks>(2, [=](int rank) {
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

TEST_CASE("which device a rank takes") {
  const auto choose = [](const std::vector<SeenDevices>& all, bool may_share = false) {
    std::string devices;
    for (int rank = 0; rank < int(all.size()); ++rank) {
      const DeviceChoice choice = choose_device(all, rank, may_share);
      devices += std::to_string(choice.device) + (choice.shared ? "s" : "");
    }
    return devices;
  };
  const auto refusal = [&](const std::vector<SeenDevices>& all) {
    try {
      return choose(all);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
  };
  const SeenDevices two{"a", "1", 2, "x"}, other{"b", "2", 2, "y"}, same_name{"a", "3", 2, "z"};
  CHECK(choose({two, two}) == "01");
  CHECK(choose({two, other, two, other}) == "0011");  // round-robin over hosts
  CHECK(choose({two, two, same_name, same_name}) == "0101");
  CHECK(choose({{"a", "1", 1, "x"}, {"a", "1", 1, "y"}}) == "00");  // the launcher shows each its own
  CHECK(choose({{"a", "1", 3, "x"}, {"a", "1", 3, "y"}, {"a", "1", 3, "z"}}) == "000");  // its own first
  CHECK(choose({{"a", "1", 2, "x"}, {"b", "2", 2, "x"}, {"a", "1", 2, "y"}, {"b", "2", 2, "x"}}) == "0001");
  CHECK(contains(refusal({{"a", "1", 2, "x"}, {"a", "1", 2, "y"}, {"a", "1", 2, "x"}}), "3 ranks and 2"));
  CHECK(choose({two, two, two}, true) == "0s1s0s");
  CHECK(choose({{"a", "1", 1, "x"}, {"a", "1", 1, "x"}}, true) == "0s0s");
  CHECK_THROWS_WITH(choose({two, two, two}), "a has 3 ranks and 2 GPUs: start fewer ranks there, or let them share with "
                                             "--share-gpu (slow; for tests)");
  CHECK(contains(refusal({{"a", "1", 1, "x"}, {"a", "1", 1, "x"}}), "a has 2 ranks and 1 GPU: "));
}

// GPT_PROGRAM is told how many ranks there are to be, and refuses all of them, each for a reason of its own.
TEST_CASE("elastic.sh says why all places can't train, not why one rank can't") {
  TemporaryFolder folder;
  const auto agent = put(folder / "agent", "#!/bin/sh\nshift\nexec sh -c \"$*\"\n");
  const auto program = put(folder / "program", "#!/bin/sh\nbase=${0%/*}\necho \"$@\" >> $base/asked\necho \"train_gpt: $3 ranks are refused\" >&2\nexit 2\n");
  for (const auto& file : {agent, program}) std::filesystem::permissions(file, std::filesystem::perms::owner_all);
  const std::string path = folder.path().string();
  const auto said = [&](const std::string& options) {
    std::filesystem::remove(folder / "asked");
    const int status = std::system(("GPT_LOOK=1 OMPI_MCA_plm_rsh_agent='" + agent.string() + "' GPT_PROGRAM='" + program.string() +
                                    "' dev/cluster/elastic.sh a:2,b:2 -- " + options + " > '" + path + "/out' 2>&1").c_str());
    CHECK(WEXITSTATUS(status) == 2);
    return content_of(folder / "out");
  };
  CHECK(said("--out run --tp 2") == "elastic.sh: no number of ranks up to 4 can train: train_gpt: 4 ranks are refused\n");
  CHECK(content_of(folder / "asked").starts_with("--plan --ranks 4 --out run --tp 2\n"));
  said("--islands 2 --local-steps 3 --out run");
  CHECK(content_of(folder / "asked") == "--plan --ranks 4 --islands 2 --local-steps 3 --out run --islands 2\n"
                                        "--plan --ranks 2 --islands 2 --local-steps 3 --out run --islands 1\n");
  // A job is resumed anyway, and a plan is of a start.
  for (const std::string resume : {"--resume --out run", "--out run --resume", "--resume there --out run", "--resume=there --out run"}) {
    said(resume);
    CHECK(content_of(folder / "asked").starts_with("--plan --ranks 4 --out run\n"));
  }
}

TEST_CASE("mpirun.sh hands on what NCCL and MPI need to find fast networks") {
  TemporaryFolder folder;
  const auto mpirun = put(folder / "mpirun", "#!/bin/sh\necho \"$@\"\n");
  std::filesystem::permissions(mpirun, std::filesystem::perms::owner_all);
  const std::string path = folder.path().string();
  std::system(("env -i PATH=\"" + path + ":$PATH\" HOSTS=node1:1,node2:1 GPT_PROGRAM=/bin/true FI_PROVIDER=efa UCX_TLS=rc "
               "LD_LIBRARY_PATH=/opt/plugin NCCL_DEBUG=WARN OMP_NUM_THREADS=1 MY_LD_LIBRARY_PATH=x EDITOR=vi "
               "dev/cluster/mpirun.sh 2 --steps 1 > '" + path + "/out' 2>&1").c_str());
  const std::string out = content_of(folder / "out");
  for (const char* name : {"FI_PROVIDER", "UCX_TLS", "LD_LIBRARY_PATH", "NCCL_DEBUG", "OMP_NUM_THREADS", "GPT_PROGRAM"})
    CHECK_MESSAGE(contains(out, " -x " + std::string(name) + " "), out);
  for (const char* name : {"MY_LD_LIBRARY_PATH", "EDITOR"}) CHECK_MESSAGE(!contains(out, " -x " + std::string(name)), out);
  CHECK(contains(out, "/bin/true --steps 1\n"));
}
