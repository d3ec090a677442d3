#include "memory/mesh.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "memory/signals.hpp"

namespace weft {

namespace {

#ifndef SYS_pidfd_open  // older C libraries do not define it
#define SYS_pidfd_open 434
#endif

enum Type : char { kNote = 'n', kAbort = 'a', kFarewell = 'f' };
constexpr size_t kLongest = 16384;

bool transmit(int socket, const std::string& message, const File* file, int flags) {
  iovec data{const_cast<char*>(message.data()), std::min(message.size(), kLongest)};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (file) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(c), &file->fd, sizeof(int));
  }
  return sendmsg(socket, &header, flags | MSG_NOSIGNAL) >= 0;
}

// A pidfd of the process at the other end of a socket, readable once that process has ended; -1 if
// it is this process, or is not visible here. It is needed because the socket stays open as long as
// a forked child of the process has a copy of it.
int open_process(int socket) {
  ucred other{};
  socklen_t size = sizeof other;
  if (socket < 0 || getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &other, &size) || other.pid <= 0 ||
      other.pid == getpid())
    return -1;
  return static_cast<int>(syscall(SYS_pidfd_open, other.pid, 0));  // Linux 5.3; it closes on exec
}

void close_if_open(int& fd) {
  if (fd >= 0) close(std::exchange(fd, -1));
}

}  // namespace

Mesh::Mesh(std::vector<int> fds)
    : rank_(static_cast<int>(std::find(fds.begin(), fds.end(), -1) - fds.begin())),
      stop_(eventfd(0, EFD_CLOEXEC)),
      peers_(fds.begin(), fds.end()) {
  const bool elsewhere = std::find(fds.begin(), fds.end(), kElsewhere) != fds.end();
  if (stop_ >= 0 && elsewhere) outgoing_ready_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  try {
    if (stop_ < 0 || (elsewhere && outgoing_ready_ < 0))
      throw std::system_error(errno, std::generic_category(), "eventfd");
    for (auto& peer : peers_) peer.process = open_process(peer.fd);
    thread_ = std::thread(&Mesh::watch, this);
  } catch (...) {
    close_if_open(stop_);
    close_if_open(outgoing_ready_);
    for (auto& peer : peers_) close_if_open(peer.process);
    throw;
  }
}

Mesh::~Mesh() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(stop_, &one, sizeof one);
  thread_.join();
  disown();
}

void Mesh::disown() {
  for (auto& peer : peers_) {
    close_if_open(peer.fd);
    close_if_open(peer.process);
  }
  close_if_open(stop_);
  close_if_open(outgoing_ready_);
}

void Mesh::watch() {
  try {
    watch_peers();
  } catch (const std::exception& error) {  // no message can be received any more
    abort(error);
  }
}

void Mesh::watch_peers() {
  // Two of each peer: its connection and its process. Of this rank itself, and of a peer that is
  // not watched any more, they are -1, which poll ignores.
  std::vector<pollfd> polled;
  for (const Peer& peer : peers_) {
    polled.push_back({peer.fd, POLLIN, 0});
    polled.push_back({peer.process, POLLIN, 0});
  }
  polled.push_back({stop_, POLLIN, 0});
  while (true) {
    if (poll(polled.data(), polled.size(), -1) < 0) {
      if (errno == EINTR) continue;
      throw std::system_error(errno, std::generic_category(), "watching peers");
    }
    if (polled.back().revents) return;
    for (size_t i = 0; i < peers_.size(); ++i) {
      pollfd& connection = polled[2 * i];
      pollfd& process = polled[2 * i + 1];
      const int peer = static_cast<int>(i);
      const bool closed = connection.revents && !read(peer);
      const bool dead = !closed && process.revents;
      if (dead) ended(peer);
      if (closed || dead) {
        connection.fd = -1;
        process.fd = -1;
      }
    }
  }
}

// The process of a peer has ended: handle the messages that it sent before (M2).
void Mesh::ended(int peer) {
  pollfd rest{peers_[peer].fd, POLLIN, 0};
  while (poll(&rest, 1, 0) > 0 && read(peer)) {
  }
  disconnected(peer);
}

// Read one message of a peer; false if the connection has ended.
bool Mesh::read(int peer) {
  char text[kLongest];
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  iovec data{text, sizeof text};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t n = recvmsg(peers_[peer].fd, &header, MSG_CMSG_CLOEXEC);
  // messages that were sent before a reset are received after it
  if (n < 0 && (errno == EINTR || errno == ECONNRESET)) return true;
  if (n <= 0) {
    disconnected(peer);
    return false;
  }
  std::shared_ptr<File> file;
  if (cmsghdr* c = CMSG_FIRSTHDR(&header)) {
    int fd;
    std::memcpy(&fd, CMSG_DATA(c), sizeof fd);
    file = std::make_shared<File>(fd);
  }
  if (!handle(peer, {text, static_cast<size_t>(n)}, std::move(file)))
    fail({"WeftError", peer, "it sent a message that cannot be read"});
  return true;
}

// Handle a message of a peer, and the file that came with it; false if it is not valid.
bool Mesh::handle(int peer, const std::string& message, std::shared_ptr<File> file) {
  if (message.empty()) return false;
  std::string body = message.substr(1);
  if (message[0] == kNote) {
    const std::lock_guard lock(mutex_);
    peers_[peer].notes.push_back({std::move(body), std::move(file)});
    changed_.notify_all();
  } else if (message[0] == kAbort) {
    const size_t first = body.find('\n'), second = body.find('\n', first + 1);
    int culprit = -1;
    if (second == std::string::npos) return false;
    const char* const end = body.data() + second;
    const auto [rest, error] = std::from_chars(body.data() + first + 1, end, culprit);
    if (error != std::errc() || rest != end || culprit < 0 ||
        culprit >= static_cast<int>(peers_.size()))
      return false;
    fail({body.substr(0, first), culprit, body.substr(second + 1)});
  } else if (message[0] == kFarewell && body.empty()) {
    peers_[peer].left.store(true, std::memory_order_release);  // M4
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
    Sleeper::wake_all();
  } else {
    return false;
  }
  return true;
}

bool Mesh::deliver(int peer, const std::string& message) { return handle(peer, message, nullptr); }

void Mesh::disconnected(int peer) {
  if (!left(peer)) fail({"PeerLost", peer, ""});  // M3
}

void Mesh::post(int peer, std::string message) {
  if (outgoing_ready_ < 0) return;
  const std::lock_guard lock(posting_);
  outgoing_.emplace_back(peer, std::move(message));
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(outgoing_ready_, &one, sizeof one);
}

std::vector<std::pair<int, std::string>> Mesh::outgoing() {
  const std::lock_guard lock(posting_);
  uint64_t times;
  [[maybe_unused]] const ssize_t n = ::read(outgoing_ready_, &times, sizeof times);
  return std::exchange(outgoing_, {});
}

void Mesh::fail(const Failure& failure) {
  std::lock_guard lock(mutex_);
  if (failed()) return;  // M1
  failure_ = failure;
  failed_.store(true, std::memory_order_release);  // M4
  changed_.notify_all();
  Sleeper::wake_all();
}

Failure Mesh::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Mesh::abort(const Failure& failure) {
  closing();
  fail(failure);
  send_to_all(std::string(1, kAbort) + failure.kind + "\n" + std::to_string(failure.culprit) +
              "\n" + failure.text);
}

void Mesh::abort(const std::exception& error) { abort(Failure{"WeftError", rank_, error.what()}); }

void Mesh::leave() { send_to_all(std::string(1, kFarewell)); }

void Mesh::send_to_all(const std::string& message) {
  for (auto& peer : peers_)
    if (peer.fd >= 0) transmit(peer.fd, message, nullptr, MSG_DONTWAIT);
  post(kAll, message);
}

void Mesh::send(int peer, const std::string& text, const File* file) {
  if (peers_[peer].fd == kElsewhere)
    return post(peer, (std::string(1, kNote) + text).substr(0, kLongest));
  if (transmit(peers_[peer].fd, std::string(1, kNote) + text, file, 0) || errno == EPIPE ||
      errno == ECONNRESET)
    return;
  throw std::system_error(errno, std::generic_category(),
                          "sending to rank " + std::to_string(peer));
}

std::pair<WaitStatus, Note> Mesh::receive(int peer, double seconds) {
  std::unique_lock lock(mutex_);
  auto& notes = peers_[peer].notes;
  auto ready = [&] { return !notes.empty() || failed() || left(peer); };
  if (!changed_.wait_for(lock, std::chrono::duration<double>(seconds), ready))
    return {WaitStatus::timeout, {}};
  if (notes.empty()) return {failed() ? WaitStatus::failed : WaitStatus::left, {}};
  Note note = std::move(notes.front());
  notes.pop_front();
  return {WaitStatus::none, std::move(note)};
}

}  // namespace weft
