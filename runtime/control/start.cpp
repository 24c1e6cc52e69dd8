#include "runtime/control/start.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
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
#endif

#include "gpt/base/error.h"
#include "gpt/base/text.h"

namespace {

// The port on which rank 0 must listen, if the environment gives one.
std::optional<long> master_port() {
  std::optional<long> port = environment_number("MASTER_PORT", 1, 65534);
  if (port && environment("TORCHELASTIC_USE_AGENT_STORE") == "True") ++*port;
  return port;
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

Peers meet_over_mpi(const Launch& launch, double timeout_s) {
  start_mpi(launch, false);
  std::optional<Listener> listener;
  if (launch.rank == 0) listener.emplace(int(master_port().value_or(0)));
  std::string text;
  if (listener) text = concat(listener->port(), ' ', random_digits(), ' ', joined(own_addresses(), {}, " "));
  text.resize(4096);
  MPI_Bcast(text.data(), int(text.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
  std::istringstream words(text.c_str());
  Endpoint rank_0;
  words >> rank_0.port >> rank_0.token;
  for (std::string address; words >> address;) rank_0.hosts.push_back(address);
  if (listener) return wait_for_ranks(std::move(*listener), launch.size, rank_0.token, timeout_s);
  return join(rank_0, launch.rank, launch.size, timeout_s);
}
#endif

// Waits until the name can be resolved. The name service may not know a new host yet.
void check_resolves(const std::string& host, double patience_s) {
  const double deadline = steady_seconds() + patience_s;
  for (std::string problem; !resolve(host, 0, problem); std::this_thread::sleep_for(std::chrono::milliseconds(200)))
    if (steady_seconds() > deadline) fail("MASTER_ADDR: ", problem, ": give rank 0's host, by name or address");
}

}  // namespace

std::string first_host(const std::string& list) {
  std::string host = list;
  for (size_t open; (open = host.find('[')) < host.find(',');) {  // "[01-04,7]" becomes "01"; without "]" it ends with the text
    const size_t end = host.find_first_of("-,]", open), close = std::min(host.find(']', open), host.size() - 1);
    host.replace(open, close + 1 - open, host.substr(open + 1, end - open - 1));
  }
  return host.substr(0, host.find(','));
}

Endpoint find_endpoint(const Launch& launch) {
  std::string host = environment("MASTER_ADDR"), token = environment("GPT_JOB_TOKEN");
  std::optional<long> port = master_port();
  const bool srun = launch.how == "srun";
  if (srun) {
    const long job = environment_number("SLURM_JOB_ID", 0, UINT32_MAX).value_or(0);
    const long step = environment_number("SLURM_STEP_ID", 0, UINT32_MAX).value_or(0);
    if (!port) port = 20000 + (31 * job + step) % 10000;
    if (host.empty()) host = first_host(environment("SLURM_STEP_NODELIST"));
  }
  if (host.empty() || !port)
    fail(launch.how, " started rank ", launch.rank, " of ", launch.size, " without ",
         host.empty() ? "MASTER_ADDR: set it to the host of rank 0" : "MASTER_PORT: set it to a free port there");
  if (token.empty())  // the address is not part of it, because ranks may know rank 0's host by different names
    token = environment(srun ? "SLURM_JOB_ID" : "TORCHELASTIC_RUN_ID") + " " +
            environment(srun ? "SLURM_STEP_ID" : "TORCHELASTIC_RESTART_COUNT") + " " + std::to_string(*port);
  return {{host}, int(*port), token};
}

std::unique_ptr<Control> start_control(const Launch& launch) {
  if (launch.size == 1) return std::make_unique<Control>();
  const double timeout_s = double(environment_number("GPT_JOIN_TIMEOUT", 1, 1'000'000).value_or(300));
#ifdef GPT_MPI
  if (launch.over_mpi) return std::make_unique<Control>(launch.rank, meet_over_mpi(launch, timeout_s));
#endif
  const Endpoint rank_0 = find_endpoint(launch);
  check_resolves(rank_0.hosts[0], std::min(timeout_s, 10.0));
  Peers peers = launch.rank == 0 ? wait_for_ranks(Listener(rank_0.port), launch.size, rank_0.token, timeout_s)
                                 : join(rank_0, launch.rank, launch.size, timeout_s);
  return std::make_unique<Control>(launch.rank, std::move(peers));
}
