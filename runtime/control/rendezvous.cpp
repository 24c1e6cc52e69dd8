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

constexpr double answer_patience_s = 10;  // how long a client waits for the server's answer

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

RendezvousServer::RendezvousServer(Listener listener, int size, const std::string& token)
    : listener_(std::move(listener)), token_(token), peers_(size_t(size)) {
  peers_[0] = this_process();
  rlimit files;
  getrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_max < rlim_t(size) + 64)  // one connection for each rank is needed; prepare_process() allows them all
    fail("rank 0 may open ", files.rlim_max, " files, and ", size, " ranks need ", size + 64, ": raise ulimit -n there");
}

Peers RendezvousServer::wait_for_all(double timeout_s) {
  const double deadline = steady_seconds() + timeout_s;
  for (std::vector<int> missing = missing_ranks(); !missing.empty(); missing = missing_ranks()) {
    if (steady_seconds() > deadline) give_up(missing, timeout_s);
    serve();
  }
  nlohmann::json table;
  for (const Peer& peer : peers_) table.push_back({peer.host, peer.pid});
  send_to_all(peers_, FrameType::start, table.dump());
  return std::move(peers_);
}

void RendezvousServer::serve() {
  constexpr double patience_s = 5;
  std::vector<Connection*> connections = open_connections(peers_);
  for (NewConnection& newcomer : new_connections_) connections.push_back(&newcomer.connection);
  exchange(connections, listener_.descriptor(), 100);
  std::erase_if(new_connections_, [&](NewConnection& newcomer) {
    return is_settled(newcomer.connection) || !newcomer.connection.is_open() || steady_seconds() > newcomer.deadline;
  });
  while (Descriptor socket = listener_.accept())
    new_connections_.push_back({Connection(std::move(socket), longest_hello), steady_seconds() + patience_s});
}

// Is this connection's case decided? It has become a rank, was refused, or is no rank of this job.
bool RendezvousServer::is_settled(Connection& connection) {
  const std::optional<Frame> frame = connection.next();
  if (!frame) return false;
  try {
    const nlohmann::json hello = nlohmann::json::parse(frame->payload);
    if (frame->type != FrameType::hello || hello.at("token") != token_) return true;
    const int64_t rank = hello.at("rank"), size = hello.at("size");
    const std::string problem = hello.at("protocol") == control_protocol
                                    ? objection(rank, size)
                                    : "it is another version of this program: start one everywhere";
    connection.send(problem.empty() ? FrameType::accepted : FrameType::refused, problem);
    if (!problem.empty()) return true;
    connection.longest_payload = longest_frame;
    peers_[size_t(rank)] = {hello.at("host"), hello.at("pid"),
                                              std::make_unique<Connection>(std::move(connection))};
  } catch (const nlohmann::json::exception&) {  // not a rank of this job
  }
  return true;
}

std::string RendezvousServer::objection(int64_t rank, int64_t size) const {
  const int64_t expected = int64_t(peers_.size());
  if (size != expected)
    return "it says there are " + std::to_string(size) + " ranks, rank 0 says " + std::to_string(expected) + ": start all alike";
  if (rank < 1 || rank >= size) return "that rank cannot join " + std::to_string(size) + " ranks: they count from 0";
  if (peers_[size_t(rank)].is_connected())
    return who(peers_, int(rank)) + " is there already: give each process its own RANK";
  return "";
}

// The ranks that are not connected. A rank that was connected and left is missing again, and may come back.
std::vector<int> RendezvousServer::missing_ranks() const {
  std::vector<int> missing;
  for (size_t rank = 1; rank < peers_.size(); ++rank)
    if (!peers_[rank].is_connected()) missing.push_back(int(rank));
  return missing;
}

[[noreturn]] void RendezvousServer::give_up(const std::vector<int>& missing, double timeout_s) {
  send_to_all(peers_, FrameType::verdict, "1");
  linger(peers_, 1);
  fail(rank_list(missing), " of ", peers_.size(), " did not arrive within ", timeout_s,
       " s: start them all, or give them longer with GPT_JOIN_TIMEOUT (seconds)");
}

// ---- the other ranks

RendezvousClient::RendezvousClient(const Endpoint& rank_0, int rank, int size)
    : rank_0_(rank_0), rank_(rank), peers_(size_t(size)) {
  peers_[size_t(rank)] = this_process();
}

Peers RendezvousClient::join(double timeout_s) {
  const double deadline = steady_seconds() + timeout_s;
  for (double pause = 0.02; steady_seconds() < deadline; pause = std::min(2 * pause, 0.5)) {
    for (const std::string& host : rank_0_.hosts)
      if (try_to_join(host, deadline)) return wait_for_start(timeout_s);
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
  }
  fail(who(peers_, rank_), ": no rank 0 at ", rank_0_.hosts[0], " port ", rank_0_.port, " within ", timeout_s, " s (",
       problem_, "): start it too, and check the address and firewalls");
}

bool RendezvousClient::try_to_join(const std::string& host, double deadline) {
  const double seconds_left = std::max(0.1, deadline - steady_seconds());
  Descriptor socket = connect_to(host, rank_0_.port, std::min(seconds_left, 3.0), problem_);
  if (!socket) return false;
  peers_[0].connection = std::make_unique<Connection>(std::move(socket), longest_frame);
  const Peer& self = peers_[size_t(rank_)];
  const nlohmann::json hello = {{"protocol", control_protocol}, {"token", rank_0_.token}, {"rank", rank_},
                                {"size", peers_.size()},        {"host", self.host},      {"pid", self.pid}};
  peers_[0].connection->send(FrameType::hello, hello.dump());
  const std::optional<Frame> answer = next_frame(std::min(seconds_left, answer_patience_s));
  if (answer && answer->type == FrameType::accepted) return true;
  if (answer && answer->type == FrameType::refused)
    fail(who(peers_, rank_), ": refused by rank 0 at ", host, " port ", rank_0_.port, ": ", answer->payload);
  problem_ = "what listens there does not know this job: another program's port, or another GPT_JOB_TOKEN";
  return false;
}

Peers RendezvousClient::wait_for_start(double timeout_s) {
  const std::optional<Frame> frame = next_frame(timeout_s + answer_patience_s);  // longer than rank 0 waits
  if (frame && frame->type == FrameType::verdict) _exit(std::stoi(frame->payload));  // rank 0 prints the reason
  if (!frame || frame->type != FrameType::start) fail(who(peers_, rank_), ": rank 0 left before all ranks had come: see its own message");
  const nlohmann::json table = nlohmann::json::parse(frame->payload);
  for (size_t rank = 0; rank < peers_.size(); ++rank) {
    peers_[rank].host = table.at(rank).at(0);
    peers_[rank].pid = table.at(rank).at(1);
  }
  return std::move(peers_);
}

// Waits for the next frame. Returns none if rank 0 closed the connection, or time ran out.
std::optional<Frame> RendezvousClient::next_frame(double seconds) {
  Connection& connection = *peers_[0].connection;
  for (const double end = steady_seconds() + seconds; steady_seconds() < end;) {
    if (std::optional<Frame> frame = connection.next()) return frame;
    if (!connection.is_open()) return {};
    exchange({&connection}, -1, 100);
  }
  return {};
}
