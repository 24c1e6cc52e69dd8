// How the ranks of a job find each other: rank 0 is the server, which listens until all ranks have connected. The other
// ranks are clients, which try to connect until the server accepts them.
//
// A client introduces itself with a `hello` frame (runtime/control/socket.h), JSON {"protocol", "token", "rank",
// "size", "host", "pid"}. The server answers `accepted`, or `refused` and the reason. It closes a connection without an
// answer if the token is wrong, or if no valid hello comes within some seconds. When all ranks are connected, the
// server sends `start`: [[host, pid], ...] by rank. If they are not connected within the time-out, it sends `verdict`
// instead, which ends the job.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "runtime/control/socket.h"

// The address at which rank 0 listens. Clients try the host names and addresses in turn.
struct Endpoint {
  std::vector<std::string> hosts;
  int port = 0;
  std::string token;
};

struct Peer {
  std::string host;
  long pid = 0;
  std::unique_ptr<Connection> connection;  // rank 0 has one to every other rank; these have only one, to rank 0

  bool is_connected() const { return connection && connection->is_open(); }
};
using Peers = std::vector<Peer>;  // by rank

constexpr const char* control_protocol = "gpt.cu control 7";
constexpr size_t longest_hello = size_t(1) << 16, longest_frame = size_t(1) << 30;  // bytes

Peer this_process();

// "rank 3 (host node1, pid 1234)"
std::string who(const Peers& peers, int rank);

std::vector<Connection*> open_connections(const Peers& peers);

void send_to_all(const Peers& peers, FrameType type, const std::string& payload);

// Waits, at most `seconds` seconds, until all others have read the data and have closed their ends. To be called before
// this side closes, because closing may discard data that was not yet read.
void linger(const Peers& peers, double seconds);

// On rank 0 of `size` ranks: returns when all ranks have connected.
Peers wait_for_ranks(Listener listener, int size, const std::string& token, double timeout_s);

// On the other ranks: returns when all ranks have connected.
Peers join(const Endpoint& rank_0, int rank, int size, double timeout_s);
