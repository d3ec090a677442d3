#include "mesh.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "signals.hpp"

namespace weft {

namespace {

enum Type : char { kNote = 'n', kAbort = 'a', kFarewell = 'f' };
constexpr size_t kLongest = 16384;

bool transmit(int socket, const std::string& message, int fd, int flags) {
  iovec data{const_cast<char*>(message.data()), std::min(message.size(), kLongest)};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(c), &fd, sizeof(int));
  }
  return sendmsg(socket, &header, flags | MSG_NOSIGNAL) >= 0;
}

}  // namespace

Mesh::Mesh(std::vector<int> fds) : stop_(eventfd(0, EFD_CLOEXEC)), peers_(fds.begin(), fds.end()) {
  thread_ = std::thread(&Mesh::watch, this);
}

Mesh::~Mesh() {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t written = write(stop_, &one, sizeof one);
  thread_.join();
  for (auto& peer : peers_) {
    if (peer.fd >= 0) close(peer.fd);
    for (auto& [text, fd] : peer.notes)
      if (fd >= 0) close(fd);
  }
  close(stop_);
}

void Mesh::watch() {
  std::vector<pollfd> polled;
  for (auto& peer : peers_) polled.push_back({peer.fd, POLLIN, 0});  // poll ignores the -1 of this rank itself
  polled.push_back({stop_, POLLIN, 0});
  while (true) {
    if (poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR) return;
    if (polled.back().revents) return;
    for (size_t i = 0; i + 1 < polled.size(); ++i)
      if (polled[i].revents && !read(static_cast<int>(i))) polled[i].fd = -1;
  }
}

// Take one message from a peer; false when there will be no more.
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
  if (n < 0 && (errno == EINTR || errno == ECONNRESET)) return true;  // what was sent before a reset comes after it
  if (n <= 0) {
    if (!left(peer)) fail({"PeerLost", peer, ""});
    return false;
  }
  std::string body(text + 1, static_cast<size_t>(n) - 1);
  if (text[0] == kNote) {
    int fd = -1;
    if (cmsghdr* c = CMSG_FIRSTHDR(&header)) std::memcpy(&fd, CMSG_DATA(c), sizeof fd);
    std::lock_guard lock(mutex_);
    peers_[peer].notes.push_back({std::move(body), fd});
    changed_.notify_all();
  } else if (text[0] == kAbort) {
    size_t first = body.find('\n'), second = body.find('\n', first + 1);
    fail({body.substr(0, first), std::stoi(body.substr(first + 1)), body.substr(second + 1)});
  } else {
    peers_[peer].left.store(true, std::memory_order_release);
    std::lock_guard lock(mutex_);
    changed_.notify_all();
    Sleeper::wake_all();
  }
  return true;
}

void Mesh::fail(const Failure& failure) {
  std::lock_guard lock(mutex_);
  if (failed()) return;  // the first failure is the cause, later ones its consequences
  failure_ = failure;
  failed_.store(true, std::memory_order_release);
  changed_.notify_all();
  Sleeper::wake_all();
}

Failure Mesh::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

void Mesh::abort(const Failure& failure) {
  fail(failure);
  tell_all(std::string(1, kAbort) + failure.kind + "\n" + std::to_string(failure.culprit) + "\n" + failure.text);
}

void Mesh::leave() { tell_all(std::string(1, kFarewell)); }

void Mesh::tell_all(const std::string& message) {
  for (auto& peer : peers_)
    if (peer.fd >= 0) transmit(peer.fd, message, -1, MSG_DONTWAIT);
}

void Mesh::send(int peer, const std::string& text, int fd) {
  if (transmit(peers_[peer].fd, std::string(1, kNote) + text, fd, 0) || errno == EPIPE || errno == ECONNRESET) return;
  throw std::system_error(errno, std::generic_category(), "sending to rank " + std::to_string(peer));
}

Note Mesh::receive(int peer, double seconds) {
  std::unique_lock lock(mutex_);
  auto& notes = peers_[peer].notes;
  auto ready = [&] { return !notes.empty() || failed() || left(peer); };
  if (!changed_.wait_for(lock, std::chrono::duration<double>(seconds), ready)) throw std::runtime_error("timeout");
  if (notes.empty()) throw std::runtime_error(failed() ? "failed" : "left");
  Note note = std::move(notes.front());
  notes.pop_front();
  return note;
}

}  // namespace weft
