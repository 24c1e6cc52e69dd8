// TCP for the control plane: a listener, a way to connect, and connections that carry frames and never block.
//
// A frame is 8 bytes, the payload's length and the frame's type (uint32 each, little-endian like all our hosts), then
// the payload. A connection accepts no length beyond `longest_payload`, and allocates only for bytes that have come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include "processes/flight_recorder.h"

// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_;
};

class Listener {
 public:
  // On all of this host's addresses; port 0: any free one.
  explicit Listener(int port);

  int descriptor() const { return socket_.get(); }
  int port() const;
  Descriptor accept() { return Descriptor(accept4(descriptor(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)); }

 private:
  bool listen_on(int family, int port);

  Descriptor socket_;
};

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// All addresses that a name stands for; none: `problem` says why.
Addresses resolve(const std::string& host, int port, std::string& problem);

// An empty descriptor: `problem` says why.
Descriptor connect_to(const std::string& host, int port, double seconds, std::string& problem);

enum class FrameType : uint32_t { hello, accepted, refused, start, for_all, for_rank_0, gathered, heartbeat, report, verdict };

struct Frame {
  FrameType type;
  std::string payload;
};

// A frame as it travels; shared by the connections that it goes to.
using Packet = std::shared_ptr<const std::string>;

Packet pack(FrameType type, const std::string& payload);

class Connection {
 public:
  size_t longest_payload;  // bytes
  double last_heard = steady_seconds();

  Connection(Descriptor socket, size_t longest);

  int descriptor() const { return socket_.get(); }
  bool is_open() const { return bool(socket_); }
  int error() const { return error_; }  // why it is closed; 0: the other side closed it
  bool has_unsent() const { return !unsent_.empty(); }

  void send(Packet packet);
  void send(FrameType type, const std::string& payload) { send(pack(type, payload)); }

  // Sends what the socket takes now. What is broken is found out by receive(), after the bytes that still came.
  void flush();

  // Takes what has come: a megabyte at most, so that nobody else waits long.
  void receive();

  // The next whole frame.
  std::optional<Frame> next();

 private:
  void close(int error);

  Descriptor socket_;
  std::deque<Packet> unsent_;
  size_t sent_ = 0;  // bytes of the first
  std::string input_;
  int error_ = 0;
};

// Waits until there is something to do on a connection or on `extra` (a descriptor, or -1: none), and moves the bytes.
void exchange(const std::vector<Connection*>& connections, int extra, int milliseconds);
