// Which rank a process is, by its launcher's variables, and which device it takes.
#include "gpt/device_choice.h"
#include "gpt/launch.h"

#include "test/launchers.h"

namespace {

// What a process finds in its variables.
std::string described() {
  const Launch launch = find_launch();
  return launch.how + " " + std::to_string(launch.rank) + "/" + std::to_string(launch.size) + (launch.over_mpi ? " over MPI" : "");
}

}  // namespace

TEST_CASE("launchers") {
  const std::pair<Variables, std::string> cases[] = {
      {{}, "alone 0/1"},
      {{{"RANK", ""}, {"WORLD_SIZE", ""}}, "alone 0/1"},
      {torchrun, "torchrun 1/2"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}}, "alone 0/1"},
      {batch, "alone 0/1"},
      {srun, "srun 3/4"},
      {srun + Variables{{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}, "alone 0/1"},
      {srun + Variables{{"PMIX_RANK", "3"}}, has_mpi ? "srun 3/4 over MPI" : "srun 3/4"},
      {srun + torchrun, "torchrun 1/2"},
      {srun + torchrun + Variables{{"PMIX_RANK", "3"}}, "torchrun 1/2"},
      {{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}, "alone 0/1"}};
  for (const auto& [variables, expected] : cases) CHECK(printed_with(variables, described) == expected);
  const Variables other_mpi = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}};
  for (const Variables& variables : {mpirun, mpirun + torchrun, mpirun + srun, other_mpi}) {
    const std::string text = printed_with(variables, described);
    CAPTURE(text);
    if (has_mpi) CHECK(text == "mpirun 1/2 over MPI");
    else CHECK(text.starts_with("train_gpt: mpirun started rank 1 of 2, and this program was built without MPI: "));
  }
}

TEST_CASE("missing, broken and contradictory variables") {
  const auto refuses = [](const Variables& variables, const auto&... parts) { check_refused(variables, described, parts...); };
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
  refuses(mpirun + with("WORLD_SIZE", "4"), "RANK 1 of WORLD_SIZE 4", "mpirun says rank 1 of 2", "unset");
  refuses(mpirun + with("RANK", "0"), "RANK 0 of WORLD_SIZE 2", "mpirun says rank 1 of 2");
  refuses({{"OMPI_COMM_WORLD_SIZE", "2"}}, "OMPI_COMM_WORLD_RANK is not");
  refuses(srun + Variables{{"SLURM_PROCID", "four"}}, "SLURM_PROCID: 'four'");
  refuses(srun + Variables{{"SLURM_PROCID", "4"}}, "SLURM_PROCID 4", "SLURM_STEP_NUM_TASKS 4");
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
