// TCP for the control plane: a listener, a way to connect, and connections that carry frames and never block.
//
// A frame is 8 bytes, the payload's length and the frame's type (uint32 each, little-endian like all our hosts), then
// the payload. A connection accepts no length beyond `longest_payload`, and allocates only for bytes that have come.
#pragma once

#include <cerrno>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "parallel/flight_recorder.h"
#include "runtime/error.h"

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

// Not for children of this process: they would keep its connections open when it dies.
inline Descriptor open_socket(int family) {
  return Descriptor(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

inline void set_option(const Descriptor& socket, int level, int name, int value) {
  setsockopt(socket.get(), level, name, &value, sizeof value);
}

class Listener {
 public:
  // On all of this host's addresses; port 0: any free one.
  explicit Listener(int port) {
    if (listen_on(AF_INET6, port) || listen_on(AF_INET, port)) return;  // IPv6 takes IPv4 too, where there is IPv6
    fail("port ", port, errno == EADDRINUSE ? " is in use" : std::string(" cannot be used: ") + std::strerror(errno),
         " on this host: choose another MASTER_PORT");
  }

  int descriptor() const { return socket_.get(); }
  int port() const {
    sockaddr_in6 address{};
    socklen_t length = sizeof address;
    getsockname(descriptor(), reinterpret_cast<sockaddr*>(&address), &length);
    return ntohs(address.sin6_port);
  }
  Descriptor accept() { return Descriptor(accept4(descriptor(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)); }

 private:
  bool listen_on(int family, int port) {
    socket_ = open_socket(family);
    set_option(socket_, SOL_SOCKET, SO_REUSEADDR, 1);
    if (family == AF_INET6) set_option(socket_, IPPROTO_IPV6, IPV6_V6ONLY, 0);
    sockaddr_in6 any{};  // an IPv4 address starts alike: family, port, zeros
    any.sin6_family = sa_family_t(family);
    any.sin6_port = htons(uint16_t(port));
    return bind(descriptor(), reinterpret_cast<sockaddr*>(&any), sizeof any) == 0 && listen(descriptor(), 4096) == 0;
  }

  Descriptor socket_;
};

// 0, or the error.
inline int connect_within(const Descriptor& socket, const addrinfo& to, double seconds) {
  if (connect(socket.get(), to.ai_addr, to.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd polled = {socket.get(), POLLOUT, 0};
  int error = ETIMEDOUT;
  socklen_t length = sizeof error;
  if (poll(&polled, 1, int(1000 * seconds)) > 0) getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// All addresses that a name stands for; none: `problem` says why.
inline Addresses resolve(const std::string& host, int port, std::string& problem) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error) problem = excerpt(host) + " does not resolve (" + gai_strerror(error) + ")";
  return Addresses(found, freeaddrinfo);
}

// An empty descriptor: `problem` says why.
inline Descriptor connect_to(const std::string& host, int port, double seconds, std::string& problem) {
  const Addresses addresses = resolve(host, port, problem);
  for (const addrinfo* address = addresses.get(); address; address = address->ai_next) {
    Descriptor socket = open_socket(address->ai_family);
    const int error = connect_within(socket, *address, seconds);
    if (!error) return socket;
    problem = std::strerror(error);
  }
  return Descriptor();
}

enum class FrameType : uint32_t { hello, accepted, refused, start, for_all, for_rank_0, gathered, heartbeat, report, verdict };

struct Frame {
  FrameType type;
  std::string payload;
};

// A frame as it travels; shared by the connections that it goes to.
using Packet = std::shared_ptr<const std::string>;

inline Packet pack(FrameType type, const std::string& payload) {
  const uint32_t header[] = {uint32_t(payload.size()), uint32_t(type)};
  return std::make_shared<std::string>(std::string(reinterpret_cast<const char*>(header), sizeof header) + payload);
}

class Connection {
 public:
  size_t longest_payload;  // bytes
  double last_heard = steady_seconds();

  Connection(Descriptor socket, size_t longest) : longest_payload(longest), socket_(std::move(socket)) {
    set_option(socket_, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(socket_, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(socket_, IPPROTO_TCP, TCP_KEEPIDLE, 10);  // seconds
    set_option(socket_, IPPROTO_TCP, TCP_KEEPINTVL, 5);
    set_option(socket_, IPPROTO_TCP, TCP_KEEPCNT, 3);
  }

  int descriptor() const { return socket_.get(); }
  bool is_open() const { return bool(socket_); }
  int error() const { return error_; }  // why it is closed; 0: the other side closed it
  bool has_unsent() const { return !unsent_.empty(); }

  void send(Packet packet) {
    unsent_.push_back(std::move(packet));
    flush();
  }
  void send(FrameType type, const std::string& payload) { send(pack(type, payload)); }

  // Sends what the socket takes now. What is broken is found out by receive(), after the bytes that still came.
  void flush() {
    while (is_open() && has_unsent()) {
      const std::string& packet = *unsent_.front();
      const ssize_t sent = ::send(descriptor(), packet.data() + sent_, packet.size() - sent_, MSG_NOSIGNAL);
      if (sent < 0) return;
      sent_ += size_t(sent);
      if (sent_ < packet.size()) continue;
      unsent_.pop_front();
      sent_ = 0;
    }
  }

  // Takes what has come: a megabyte at most, so that nobody else waits long.
  void receive() {
    char block[1 << 16];
    for (int i = 0; i < 16; ++i) {
      const ssize_t received = recv(descriptor(), block, sizeof block, 0);
      if (received < 0 && (errno == EAGAIN || errno == EINTR)) return;
      if (received <= 0) return close(received < 0 ? errno : 0);
      input_.append(block, size_t(received));
      last_heard = steady_seconds();
    }
  }

  // The next whole frame.
  std::optional<Frame> next() {
    uint32_t header[2];
    if (input_.size() < sizeof header) return {};
    std::memcpy(header, input_.data(), sizeof header);
    if (header[0] > longest_payload) {
      input_.clear();
      close(EPROTO);
      return {};
    }
    if (input_.size() - sizeof header < header[0]) return {};
    Frame frame = {FrameType(header[1]), input_.substr(sizeof header, header[0])};
    input_.erase(0, sizeof header + header[0]);
    return frame;
  }

 private:
  void close(int error) {
    error_ = error;
    socket_ = Descriptor();
  }

  Descriptor socket_;
  std::deque<Packet> unsent_;
  size_t sent_ = 0;  // bytes of the first
  std::string input_;
  int error_ = 0;
};

// Waits until there is something to do on a connection or on `extra` (a descriptor, or -1: none), and moves the bytes.
inline void exchange(const std::vector<Connection*>& connections, int extra, int milliseconds) {
  std::vector<pollfd> polled = {{extra, POLLIN, 0}};
  for (const Connection* connection : connections)
    polled.push_back({connection->descriptor(), short(connection->has_unsent() ? POLLIN | POLLOUT : POLLIN), 0});
  poll(polled.data(), polled.size(), milliseconds);
  for (size_t i = 0; i < connections.size(); ++i) {
    if (polled[i + 1].revents & POLLOUT) connections[i]->flush();
    if (polled[i + 1].revents & ~POLLOUT) connections[i]->receive();
  }
}
