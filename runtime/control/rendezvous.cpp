#include "runtime/control/rendezvous.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <sys/resource.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "gpt/base/error.h"
#include "gpt/base/text.h"

Peer this_process() { return {host_name(), getpid(), nullptr}; }

std::string who(const Peers& peers, int rank) {
  const Peer& peer = peers[size_t(rank)];
  return "rank " + std::to_string(rank) + " (host " + peer.host + ", pid " + std::to_string(peer.pid) + ")";
}

std::vector<Connection*> open_connections(const Peers& peers) {
  std::vector<Connection*> result;
  for (const Peer& peer : peers)
    if (peer.is_connected()) result.push_back(peer.connection.get());
  return result;
}

void send_to_all(const Peers& peers, FrameType type, const std::string& payload) {
  const Packet packet = pack(type, payload);
  for (Connection* connection : open_connections(peers)) connection->send(packet);
}

void linger(const Peers& peers, double seconds) {
  for (const double end = steady_seconds() + seconds; !open_connections(peers).empty() && steady_seconds() < end;)
    exchange(open_connections(peers), -1, 10);
}

// ---- rank 0

namespace {

std::string objection(const Peers& peers, int64_t rank, int64_t size) {
  const int64_t expected = int64_t(peers.size());
  if (size != expected)
    return "it says there are " + std::to_string(size) + " ranks, rank 0 says " + std::to_string(expected) + ": start all alike";
  if (rank < 1 || rank >= size) return "that rank cannot join " + std::to_string(size) + " ranks: they count from 0";
  if (peers[size_t(rank)].is_connected())
    return who(peers, int(rank)) + " is there already: give each process its own RANK";
  return "";
}

// Is this connection's case decided? It has become a rank, was refused, or is no rank of this job.
bool is_settled(Connection& connection, const std::string& token, Peers& peers) {
  const std::optional<Frame> frame = connection.next();
  if (!frame) return false;
  try {
    const nlohmann::json hello = nlohmann::json::parse(frame->payload);
    if (frame->type != FrameType::hello || hello.at("token") != token) return true;
    if (hello.at("protocol") != control_protocol) {
      connection.send(FrameType::refused, "it is another version of this program: start one everywhere");
      return true;
    }
    const int64_t rank = hello.at("rank"), size = hello.at("size");
    Peer peer = {hello.at("host"), hello.at("pid"), nullptr};
    const std::string problem = objection(peers, rank, size);
    connection.send(problem.empty() ? FrameType::accepted : FrameType::refused, problem);
    if (!problem.empty()) return true;
    connection.longest_payload = longest_frame;
    peer.connection = std::make_unique<Connection>(std::move(connection));
    peers[size_t(rank)] = std::move(peer);
  } catch (const nlohmann::json::exception&) {  // not a rank of this job
  }
  return true;
}

// The ranks that are not connected. A rank that was connected and left is missing again, and may come back.
std::vector<int> missing_ranks(const Peers& peers) {
  std::vector<int> missing;
  for (size_t rank = 1; rank < peers.size(); ++rank)
    if (!peers[rank].is_connected()) missing.push_back(int(rank));
  return missing;
}

[[noreturn]] void give_up(const Peers& peers, double timeout_s) {
  const std::vector<int> missing = missing_ranks(peers);
  send_to_all(peers, FrameType::verdict, "1");
  linger(peers, 1);
  fail(rank_list(missing), " of ", peers.size(), " did not arrive within ", timeout_s,
       " s: start them all, or give them longer with GPT_JOIN_TIMEOUT (seconds)");
}

// A connection whose hello has not come yet.
struct NewConnection {
  Connection connection;
  double deadline;
};

}  // namespace

Peers wait_for_ranks(Listener listener, int size, const std::string& token, double timeout_s) {
  constexpr double patience_s = 5;
  rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_max < rlim_t(size) + 64)  // one connection for each rank is needed; prepare_process() allows them all
    fail("rank 0 may open ", files.rlim_max, " files, and ", size, " ranks need ", size + 64, ": raise ulimit -n there");
  Peers peers((size_t(size)));
  peers[0] = this_process();
  std::vector<NewConnection> newcomers;
  const double deadline = steady_seconds() + timeout_s;
  while (!missing_ranks(peers).empty()) {
    if (steady_seconds() > deadline) give_up(peers, timeout_s);
    std::vector<Connection*> connections = open_connections(peers);
    for (NewConnection& newcomer : newcomers) connections.push_back(&newcomer.connection);
    exchange(connections, listener.descriptor(), 100);
    std::erase_if(newcomers, [&](NewConnection& newcomer) {
      return is_settled(newcomer.connection, token, peers) || !newcomer.connection.is_open() ||
             steady_seconds() > newcomer.deadline;
    });
    while (Descriptor socket = listener.accept())
      newcomers.push_back({Connection(std::move(socket), longest_hello), steady_seconds() + patience_s});
  }
  nlohmann::json table;
  for (const Peer& peer : peers) table.push_back({peer.host, peer.pid});
  send_to_all(peers, FrameType::start, table.dump());
  return peers;
}

// ---- the other ranks

namespace {

constexpr double answer_patience_s = 10;  // how long a client waits for the server's answer

// Waits for the next frame. Returns none if rank 0 closed the connection, or time ran out.
std::optional<Frame> next_frame(Connection& connection, double seconds) {
  for (const double end = steady_seconds() + seconds; steady_seconds() < end;) {
    if (std::optional<Frame> frame = connection.next()) return frame;
    if (!connection.is_open()) return {};
    exchange({&connection}, -1, 100);
  }
  return {};
}

// Connects this rank to rank 0, if that is at `host`. Else `problem` becomes the reason, and it returns null.
std::unique_ptr<Connection> connect_as(int rank, const Peers& peers, const Endpoint& rank_0, const std::string& host,
                                       double seconds_left, std::string& problem) {
  Descriptor socket = connect_to(host, rank_0.port, std::min(seconds_left, 3.0), problem);
  if (!socket) return nullptr;
  auto connection = std::make_unique<Connection>(std::move(socket), longest_frame);
  const Peer& self = peers[size_t(rank)];
  const nlohmann::json hello = {{"protocol", control_protocol}, {"token", rank_0.token}, {"rank", rank},
                                {"size", peers.size()},         {"host", self.host},     {"pid", self.pid}};
  connection->send(FrameType::hello, hello.dump());
  const std::optional<Frame> answer = next_frame(*connection, std::min(seconds_left, answer_patience_s));
  if (answer && answer->type == FrameType::accepted) return connection;
  if (answer && answer->type == FrameType::refused)
    fail(who(peers, rank), ": refused by rank 0 at ", host, " port ", rank_0.port, ": ", answer->payload);
  problem = "what listens there does not know this job: another program's port, or another GPT_JOB_TOKEN";
  return nullptr;
}

// Waits until all ranks have come, and fills in who they are.
void wait_for_start(Peers& peers, int rank, double timeout_s) {
  const double longer = timeout_s + answer_patience_s;  // than rank 0 waits
  const std::optional<Frame> frame = next_frame(*peers[0].connection, longer);
  if (frame && frame->type == FrameType::verdict) _exit(std::stoi(frame->payload));  // rank 0 prints the reason
  if (!frame || frame->type != FrameType::start)
    fail(who(peers, rank), ": rank 0 left before all ranks had come: see its own message");
  const nlohmann::json table = nlohmann::json::parse(frame->payload);
  for (size_t other = 0; other < peers.size(); ++other) {
    peers[other].host = table.at(other).at(0);
    peers[other].pid = table.at(other).at(1);
  }
}

}  // namespace

Peers join(const Endpoint& rank_0, int rank, int size, double timeout_s) {
  Peers peers((size_t(size)));
  peers[size_t(rank)] = this_process();
  const double deadline = steady_seconds() + timeout_s;
  std::string problem;  // why the last attempt to connect failed
  for (double pause = 0.02; steady_seconds() < deadline; pause = std::min(2 * pause, 0.5)) {
    for (const std::string& host : rank_0.hosts) {
      const double seconds_left = std::max(0.1, deadline - steady_seconds());
      peers[0].connection = connect_as(rank, peers, rank_0, host, seconds_left, problem);
      if (!peers[0].connection) continue;
      wait_for_start(peers, rank, timeout_s);
      return peers;
    }
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
  }
  fail(who(peers, rank), ": no rank 0 at ", rank_0.hosts[0], " port ", rank_0.port, " within ", timeout_s, " s (",
       problem, "): start it too, and check the address and firewalls");
}
