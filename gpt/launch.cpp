#include "gpt/launch.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#ifdef GPT_MPI
#include <mpi.h>
const bool has_mpi = true;
#else
const bool has_mpi = false;
#endif

#include "gpt/base/error.h"
#include "gpt/base/text.h"

namespace {

constexpr long most_ranks = 100'000;

std::optional<long> environment_number(const char* name, long least, long most) {
  const std::string text = environment(name);
  long number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (text.empty()) return {};
  if (error != std::errc() || *end != 0 || number < least || number > most)
    fail(name, ": ", excerpt(text), " is no number from ", least, " to ", most, ": check how the job was started");
  return number;
}

// The rank and size in a launcher's variables; none if neither is set.
std::optional<Launch> find_rank(const std::string& how, const char* rank_name, const char* size_name) {
  const auto rank = environment_number(rank_name, 0, most_ranks - 1);
  const auto size = environment_number(size_name, 1, most_ranks);
  if (!rank && !size) return {};
  if (!rank) fail(size_name, " is set and ", rank_name, " is not: set both, as ", how, " does");
  if (!size) fail(rank_name, " is set and ", size_name, " is not: set both, as ", how, " does");
  if (*rank >= *size)
    fail(rank_name, " ", *rank, " with ", size_name, " ", *size, ": ranks count from 0, so the last is ", *size - 1);
  return Launch{int(*rank), int(*size), how, false, {}};
}

// The port on which rank 0 must listen, if the environment gives one.
std::optional<long> master_port() {
  std::optional<long> port = environment_number("MASTER_PORT", 1, 65534);
  if (port && environment("TORCHELASTIC_USE_AGENT_STORE") == "True") ++*port;
  return port;
}

// Sets where rank 0 listens in a job without MPI.
void find_endpoint(Launch& launch) {
  std::string host = environment("MASTER_ADDR"), token = environment("GPT_JOB_TOKEN");
  std::optional<long> port = master_port();
  if (launch.how == "srun") {
    const long job = environment_number("SLURM_JOB_ID", 0, UINT32_MAX).value_or(0);
    const long step = environment_number("SLURM_STEP_ID", 0, UINT32_MAX).value_or(0);
    if (!port) port = 20000 + (31 * job + step) % 10000;
    if (host.empty()) host = first_host(environment("SLURM_STEP_NODELIST"));
  }
  if (host.empty() || !port)
    fail(launch.how, " started rank ", launch.rank, " of ", launch.size, " without ",
         host.empty() ? "MASTER_ADDR: set it to the host of rank 0" : "MASTER_PORT: set it to a free port there");
  if (token.empty()) {  // the address is not part of it, because ranks may know rank 0's host by different names
    const bool srun = launch.how == "srun";
    token = environment(srun ? "SLURM_JOB_ID" : "TORCHELASTIC_RUN_ID") + " " +
            environment(srun ? "SLURM_STEP_ID" : "TORCHELASTIC_RESTART_COUNT") + " " + std::to_string(*port);
  }
  launch.rank_0 = {{host}, int(*port), token};
}

#ifdef GPT_MPI
// The addresses of this host, for ranks on other hosts and on this one.
std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) fail("this host's addresses cannot be listed: ", std::strerror(errno));
  for (const ifaddrs* one = interfaces; one; one = one->ifa_next) {
    char text[NI_MAXHOST];
    if (!one->ifa_addr || one->ifa_addr->sa_family != AF_INET || (one->ifa_flags & IFF_LOOPBACK)) continue;
    if (getnameinfo(one->ifa_addr, sizeof(sockaddr_in), text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0)
      addresses.push_back(text);
  }
  freeifaddrs(interfaces);
  addresses.insert(addresses.end(), {"127.0.0.1", this_process().host});
  return addresses;
}

std::unique_ptr<Control> start_over_mpi(const Launch& launch, double timeout_s) {
  int level = 0, rank = 0, size = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank != launch.rank || size != launch.size)
    fail(launch.how, " started rank ", launch.rank, " of ", launch.size, ", and MPI says rank ", rank, " of ", size,
         ": start it with the mpirun of the MPI that it was built with");
  if (level < MPI_THREAD_SERIALIZED) fail("this MPI cannot be used from several threads: use one that can");

  std::optional<Listener> listener;
  if (rank == 0) listener.emplace(int(master_port().value_or(0)));
  std::string text;
  if (listener) text = concat(listener->port(), ' ', random_digits(), ' ', joined(own_addresses(), {}, " "));
  text.resize(4096);
  MPI_Bcast(text.data(), int(text.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
  std::istringstream words(text.c_str());
  Endpoint rank_0;
  words >> rank_0.port >> rank_0.token;
  for (std::string address; words >> address;) rank_0.hosts.push_back(address);
  if (rank == 0) return std::make_unique<Control>(std::move(*listener), size, rank_0.token, timeout_s);
  return std::make_unique<Control>(rank_0, rank, size, timeout_s);
}
#endif

// Waits until the name can be resolved. The name service may not know a new host yet.
void check_resolves(const std::string& host, double patience_s) {
  const double deadline = steady_seconds() + patience_s;
  for (std::string problem; !resolve(host, 0, problem); std::this_thread::sleep_for(std::chrono::milliseconds(200)))
    if (steady_seconds() > deadline) fail("MASTER_ADDR: ", problem, ": give rank 0's host, by name or address");
}

}  // namespace

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string first_host(const std::string& list) {
  std::string host;
  for (size_t i = 0; i < list.size() && list[i] != ','; ++i) {
    if (list[i] != '[') {
      host += list[i];
      continue;
    }
    const size_t close = std::min(list.find(']', i), list.size());
    host += list.substr(i + 1, std::min(list.find_first_of("-,]", i), close) - i - 1);
    i = close;
  }
  return host;
}

Launch find_launch() {
  const bool in_slurm_step = !environment("SLURM_STEP_NUM_TASKS").empty();
  auto mpirun = find_rank("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  if (!mpirun && !in_slurm_step) mpirun = find_rank("mpirun", "PMI_RANK", "PMI_SIZE");
  const auto torchrun = find_rank("torchrun", "RANK", "WORLD_SIZE");
  if (torchrun) environment_number("LOCAL_RANK", 0, torchrun->size - 1);  // only checked; it may be missing
  if (mpirun && torchrun && (mpirun->rank != torchrun->rank || mpirun->size != torchrun->size))
    fail("RANK ", torchrun->rank, " of WORLD_SIZE ", torchrun->size, ", but mpirun says rank ", mpirun->rank, " of ",
         mpirun->size, ": unset RANK and WORLD_SIZE, or start without mpirun");
  const bool from_srun = in_slurm_step && !mpirun && !torchrun;
  const auto srun = from_srun ? find_rank("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS") : std::nullopt;

  Launch launch = mpirun ? *mpirun : torchrun ? *torchrun : srun.value_or(Launch());
  if (launch.size == 1) return {};
  launch.over_mpi = mpirun || (srun && has_mpi && !environment("PMIX_RANK").empty());
  if (launch.over_mpi && !has_mpi)
    fail("mpirun started rank ", launch.rank, " of ", launch.size, ", and this program was built without MPI: install "
         "Open MPI (libopenmpi-dev) and build it again, or start it by srun or torchrun");
  if (!launch.over_mpi) find_endpoint(launch);
  return launch;
}

std::unique_ptr<Control> start_control(const Launch& launch) {
  if (launch.size == 1) return std::make_unique<Control>();
  const double timeout_s = double(environment_number("GPT_JOIN_TIMEOUT", 1, 1'000'000).value_or(300));
#ifdef GPT_MPI
  if (launch.over_mpi) return start_over_mpi(launch, timeout_s);
#endif
  check_resolves(launch.rank_0.hosts[0], std::min(timeout_s, 10.0));
  if (launch.rank == 0)
    return std::make_unique<Control>(Listener(launch.rank_0.port), launch.size, launch.rank_0.token, timeout_s);
  return std::make_unique<Control>(launch.rank_0, launch.rank, launch.size, timeout_s);
}

void end_mpi() {
#ifdef GPT_MPI
  int initialized = 0, finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized && !finalized) MPI_Finalize();
#endif
}
