#include "runtime/control/socket.h"

#include <cerrno>
#include <cstring>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include "gpt/base/error.h"

namespace {

// Child processes do not inherit the socket (SOCK_CLOEXEC): they would keep the connection open after this process
// dies.
Descriptor open_socket(int family) {
  return Descriptor(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

void set_option(const Descriptor& socket, int level, int name, int value) {
  setsockopt(socket.get(), level, name, &value, sizeof value);
}

// Connects; returns 0 or the errno.
int connect_within(const Descriptor& socket, const addrinfo& to, double seconds) {
  if (connect(socket.get(), to.ai_addr, to.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd polled = {socket.get(), POLLOUT, 0};
  int error = ETIMEDOUT;
  socklen_t length = sizeof error;
  if (poll(&polled, 1, int(1000 * seconds)) > 0) getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

}  // namespace

Listener::Listener(int port) {
  for (int family : {AF_INET6, AF_INET}) {
    socket_ = open_socket(family);
    set_option(socket_, SOL_SOCKET, SO_REUSEADDR, 1);
    if (family == AF_INET6) set_option(socket_, IPPROTO_IPV6, IPV6_V6ONLY, 0);  // it accepts IPv4 connections, too
    sockaddr_in6 any{};  // an IPv4 address begins with the same fields: family, port, then zeros
    any.sin6_family = sa_family_t(family);
    any.sin6_port = htons(uint16_t(port));
    const bool is_bound = bind(descriptor(), reinterpret_cast<sockaddr*>(&any), sizeof any) == 0;
    if (is_bound && listen(descriptor(), 4096) == 0) return;
  }
  fail("port ", port, errno == EADDRINUSE ? " is in use" : std::string(" cannot be used: ") + std::strerror(errno),
       " on this host: choose another MASTER_PORT");
}

int Listener::port() const {
  sockaddr_in6 address{};
  socklen_t length = sizeof address;
  getsockname(descriptor(), reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.sin6_port);
}

Addresses resolve(const std::string& host, int port, std::string& problem) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error) problem = excerpt(host) + " does not resolve (" + gai_strerror(error) + ")";
  return Addresses(found, freeaddrinfo);
}

Descriptor connect_to(const std::string& host, int port, double seconds, std::string& problem) {
  const Addresses addresses = resolve(host, port, problem);
  for (const addrinfo* address = addresses.get(); address; address = address->ai_next) {
    Descriptor socket = open_socket(address->ai_family);
    const int error = connect_within(socket, *address, seconds);
    if (!error) return socket;
    problem = std::strerror(error);
  }
  return Descriptor();
}

Packet pack(FrameType type, const std::string& payload) {
  const uint32_t header[] = {uint32_t(payload.size()), uint32_t(type)};
  return std::make_shared<std::string>(std::string(reinterpret_cast<const char*>(header), sizeof header) + payload);
}

Connection::Connection(Descriptor socket, size_t longest) : longest_payload(longest), socket_(std::move(socket)) {
  set_option(socket_, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(socket_, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket_, IPPROTO_TCP, TCP_KEEPIDLE, 10);  // seconds
  set_option(socket_, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set_option(socket_, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

void Connection::send(Packet packet) {
  unsent_.push_back(std::move(packet));
  flush();
}

void Connection::flush() {
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

void Connection::receive() {
  char block[1 << 16];
  for (int i = 0; i < 16; ++i) {
    const ssize_t received = recv(descriptor(), block, sizeof block, 0);
    if (received < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (received <= 0) return close(received < 0 ? errno : 0);
    input_.append(block, size_t(received));
    last_heard = steady_seconds();
  }
}

std::optional<Frame> Connection::next() {
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

void Connection::close(int error) {
  error_ = error;
  socket_ = Descriptor();
}

void exchange(const std::vector<Connection*>& connections, int extra, int milliseconds) {
  std::vector<pollfd> polled = {{extra, POLLIN, 0}};
  for (const Connection* connection : connections)
    polled.push_back({connection->descriptor(), short(connection->has_unsent() ? POLLIN | POLLOUT : POLLIN), 0});
  poll(polled.data(), polled.size(), milliseconds);
  for (size_t i = 0; i < connections.size(); ++i) {
    if (polled[i + 1].revents & POLLOUT) connections[i]->flush();
    if (polled[i + 1].revents & ~POLLOUT) connections[i]->receive();
  }
}
