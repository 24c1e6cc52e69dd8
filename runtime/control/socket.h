// TCP for the control plane: a listener, a function to connect, and connections that carry frames and never block.
//
// A frame is the payload's length and the frame's type (uint32 each, little-endian like all our hosts), followed by the
// payload. A connection accepts no length beyond `longest_payload`, and allocates memory only for received bytes.
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

#include "runtime/control/flight_recorder.h"

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
  // Listens on all addresses of this host; port 0: any free port.
  explicit Listener(int port);

  int descriptor() const { return socket_.get(); }
  int port() const;
  Descriptor accept() { return Descriptor(accept4(descriptor(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)); }

 private:
  Descriptor socket_;
};

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// All addresses of a host name. If there is none, `problem` becomes the reason.
Addresses resolve(const std::string& host, int port, std::string& problem);

// Connects, or gives up after `seconds` seconds. If that fails, the descriptor is empty and `problem` becomes the
// reason.
Descriptor connect_to(const std::string& host, int port, double seconds, std::string& problem);

enum class FrameType : uint32_t {
  hello, accepted, refused, start, for_all, for_rank_0, gathered, heartbeat, report, verdict, note
};

struct Frame {
  FrameType type;
  std::string payload;
};

// The bytes of a frame, shared by all connections that send it.
using Packet = std::shared_ptr<const std::string>;

Packet pack(FrameType type, const std::string& payload);

class Connection {
 public:
  size_t longest_payload;  // bytes
  double last_heard = steady_seconds();

  Connection(Descriptor socket, size_t longest);

  int descriptor() const { return socket_.get(); }
  bool is_open() const { return bool(socket_); }
  int error() const { return error_; }  // the errno that closed it; 0: the other side closed it
  bool has_unsent() const { return !unsent_.empty(); }

  void send(Packet packet);
  void send(FrameType type, const std::string& payload) { send(pack(type, payload)); }

  // Sends the bytes that the socket takes now. It ignores errors: receive() finds them, after the last received
  // bytes.
  void flush();

  // Reads the bytes that have arrived, at most a megabyte, so that other connections need not wait long.
  void receive();

  // Returns the next complete frame, if there is one.
  std::optional<Frame> next();

 private:
  void close(int error);

  Descriptor socket_;
  std::deque<Packet> unsent_;
  size_t sent_ = 0;  // bytes of unsent_[0] that have been sent
  std::string input_;
  int error_ = 0;
};

// Waits, at most `milliseconds` milliseconds, until a connection or the descriptor `extra` (-1: none) has something to
// do, and sends and receives on all connections.
void exchange(const std::vector<Connection*>& connections, int extra, int milliseconds);
