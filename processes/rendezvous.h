// How the ranks of a job meet: rank 0 listens until all have come, the others knock until they are let in.
//
// A rank introduces itself with a `hello` frame (processes/socket.h), JSON {"protocol", "token", "rank", "size", "host",
// "pid"}. Rank 0 answers `accepted`, or `refused` and the reason; who has no token, sends something else or nothing
// within some seconds is cut off without an answer. When all are there, rank 0 sends `start`: [[host, pid], ...] by
// rank. When they are not within the time-out, it sends `verdict` instead: the job is over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "processes/socket.h"

// Where rank 0 is to be found; names and addresses are tried in turn.
struct Endpoint {
  std::vector<std::string> hosts;
  int port = 0;
  std::string token;
};

struct Peer {
  std::string host;
  long pid = 0;
  std::unique_ptr<Connection> connection;  // rank 0 has one to each other rank, these have one to rank 0

  bool is_connected() const { return connection && connection->is_open(); }
};
using Peers = std::vector<Peer>;  // by rank

constexpr const char* control_protocol = "gpt.cu control 3";
constexpr size_t longest_hello = size_t(1) << 16, longest_frame = size_t(1) << 30;  // bytes

Peer this_process();

std::string who(const Peers& peers, int rank);

// "rank 3", "ranks 0-2, 5"
std::string rank_list(const std::vector<int>& ranks);

std::vector<Connection*> open_connections(const Peers& peers);

void send_to_all(const Peers& peers, FrameType type, const std::string& payload);

// Before this side closes, the others must have read what was sent, and closed theirs: closing may discard it.
void linger(const Peers& peers, double seconds);

// ---- rank 0

class Reception {
 public:
  Reception(Listener listener, int size, const std::string& token);

  Peers wait_for_all(double timeout_s);

 private:
  struct Stranger {
    Connection connection;
    double deadline;
  };

  void serve();
  bool is_settled(Connection& stranger);
  std::string objection(int64_t rank, int64_t size) const;
  std::vector<int> missing_ranks() const;
  [[noreturn]] void give_up(const std::vector<int>& missing, double timeout_s);

  Listener listener_;
  std::string token_;
  Peers peers_;
  std::vector<Stranger> strangers_;  // who have not said yet who they are
};

// ---- the other ranks

class Visitor {
 public:
  Visitor(const Endpoint& rank_0, int rank, int size);

  Peers join(double timeout_s);

 private:
  bool knock(const std::string& host, double deadline);
  Peers wait_for_start(double timeout_s);
  std::optional<Frame> next_frame(double seconds);

  Endpoint rank_0_;
  int rank_;
  Peers peers_;
  std::string problem_;  // of the last attempt
};
