#include "memory/mesh.hpp"

#include <fcntl.h>
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

enum Type : char {
  kNote = 'n',
  kAcknowledged = 'k',
  kElsewhereEvent = 'e',  // an event of a rank on another host: its number follows
  // events
  kPublicNote = 'p',  // for all ranks on other hosts
  kAbort = 'a',
  kFarewell = 'f',  // for good if a byte follows
  kDropped = 'd'    // the number of memory follows
};
const std::string kFarewellForNow = "f", kFarewellForGood = "fg";
constexpr size_t kLongestEvent = 15 << 10, kLongest = 16 << 10;

std::string abort_event(const Failure& failure) {
  const std::string event = std::string(1, kAbort) + failure.kind + "\n" +
                            std::to_string(failure.culprit) + "\n" + failure.text;
  return event.substr(0, kLongestEvent);
}

template <class Number>
std::string bytes_of(Number number) {
  return {reinterpret_cast<const char*>(&number), sizeof number};
}

bool transmit(int socket, const std::string& message, int fd, int flags) {
  iovec data{const_cast<char*>(message.data()), message.size()};
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
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      peers_(fds.begin(), fds.end()) {
  posts_ = std::find(fds.begin(), fds.end(), kElsewhere) != fds.end();
  try {
    if (wake_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    for (auto& peer : peers_) peer.process = open_process(peer.fd);
    thread_ = std::thread(&Mesh::watch, this);
  } catch (...) {
    close_if_open(wake_);
    for (auto& peer : peers_) close_if_open(peer.process);
    throw;
  }
}

Mesh::~Mesh() { close(); }

void Mesh::close() {
  if (!thread_.joinable()) return;
  fail({"WeftError", rank_, "rank " + std::to_string(rank_) + " closed this world"});
  stopping_.store(true, std::memory_order_release);
  wake();
  thread_.join();
  const std::lock_guard lock(pushing_);
  disown();
}

void Mesh::disown() {
  for (auto& peer : peers_) {
    close_if_open(peer.fd);
    close_if_open(peer.process);
  }
  close_if_open(wake_);
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
  polled.push_back({wake_, POLLIN, 0});
  while (true) {
    {
      const std::lock_guard lock(pushing_);
      for (size_t i = 0; i < peers_.size(); ++i)
        polled[2 * i].events = peers_[i].unsent.empty() ? POLLIN : POLLIN | POLLOUT;
    }
    if (poll(polled.data(), polled.size(), -1) < 0) {
      if (errno == EINTR) continue;
      throw std::system_error(errno, std::generic_category(), "watching peers");
    }
    if (stopping_.load(std::memory_order_acquire)) return;
    if (polled.back().revents) {
      uint64_t times;
      [[maybe_unused]] const ssize_t n = ::read(wake_, &times, sizeof times);
    }
    for (size_t i = 0; i < peers_.size(); ++i) {
      pollfd& connection = polled[2 * i];
      pollfd& process = polled[2 * i + 1];
      const int peer = static_cast<int>(i);
      if (connection.revents & POLLOUT) push_rest(peer);
      const bool closed = (connection.revents & ~POLLOUT) && !read(peer);
      const bool dead = !closed && process.revents;
      if (dead) ended(peer);
      if (closed || dead) {
        acknowledge(peer);
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
  char text[2 * kLongest];
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

// Note that a peer of this host has acknowledged this rank's farewell, or has ended.
void Mesh::acknowledge(int peer) {
  const std::lock_guard lock(mutex_);
  peers_[peer].acknowledged = true;
  changed_.notify_all();
}

// Handle a message of a peer of this host, and the file that came with it; false if it is not
// valid.
bool Mesh::handle(int peer, const std::string& message, std::shared_ptr<File> file) {
  if (message.empty()) return false;
  if (message[0] == kNote) return add_note(peer, {message.substr(1), std::move(file)}), true;
  if (message[0] == kAcknowledged) return acknowledge(peer), true;
  if (message[0] != kElsewhereEvent) return handle_event(peer, message);
  int rank;
  if (message.size() < 1 + sizeof rank) return false;
  std::memcpy(&rank, message.data() + 1, sizeof rank);
  const bool valid = rank >= 0 && rank < static_cast<int>(peers_.size()) && !here(rank);
  return valid && handle_event(rank, message.substr(1 + sizeof rank));
}

void Mesh::add_note(int rank, Note note) {
  const std::lock_guard lock(mutex_);
  peers_[rank].notes.push_back(std::move(note));
  changed_.notify_all();
}

// Handle an event of a rank; false if it is not valid.
bool Mesh::handle_event(int rank, const std::string& event) {
  if (event.empty()) return false;
  if (event[0] == kPublicNote) {
    post(rank, event);
    if (!here(rank)) add_note(rank, {event.substr(1), nullptr});
  } else if (event[0] == kAbort) {
    const size_t first = event.find('\n'), second = event.find('\n', first + 1);
    int culprit = -1;
    if (second == std::string::npos) return false;
    const char* const end = event.data() + second;
    const auto [rest, error] = std::from_chars(event.data() + first + 1, end, culprit);
    if (error != std::errc() || rest != end || culprit < 0 ||
        culprit >= static_cast<int>(peers_.size()))
      return false;
    if (!failed()) post(rank, event);  // later ones are consequences, which other hosts have (M1)
    fail({event.substr(1, first - 1), culprit, event.substr(second + 1)});
  } else if (event == kFarewellForNow || event == kFarewellForGood) {
    post(rank, event);
    leaves(rank, event == kFarewellForGood);
  } else if (uint64_t memory; event[0] == kDropped && event.size() == 1 + sizeof memory) {
    std::memcpy(&memory, event.data() + 1, sizeof memory);
    post(rank, event);
    const std::lock_guard lock(posting_);
    if (outside_ && !here(rank)) outside_->dropped(rank, memory);
  } else {
    return false;
  }
  return true;
}

// Note that a rank has left.
void Mesh::leaves(int rank, bool for_good) {
  if (for_good) peers_[rank].gone.store(true, std::memory_order_release);
  {
    const std::lock_guard lock(mutex_);
    peers_[rank].left.store(true, std::memory_order_release);  // M4
    changed_.notify_all();
    Sleeper::wake_all();
  }
  if (here(rank)) push(rank, std::string(1, kAcknowledged));
  const std::lock_guard lock(posting_);
  if (outside_) outside_->left(rank);
}

bool Mesh::deliver(int rank, const std::string& event) {
  if (here(rank)) return false;
  const bool farewell = event == kFarewellForNow || event == kFarewellForGood;
  if (farewell && left(rank)) return true;  // sent again
  if (!handle_event(rank, event)) return false;
  send_to_all(std::string(1, kElsewhereEvent) + bytes_of(rank) + event);
  return true;
}

void Mesh::disconnected(int peer) {
  if (left(peer)) return;  // M3
  if (failed()) return;
  const std::string event = abort_event({"PeerLost", peer, ""});
  here(peer) ? handle_event(peer, event) : deliver(peer, event);
}

void Mesh::attach(Outside* outside) {
  const std::lock_guard lock(posting_);
  outside_ = outside;
  posts_ = outside != nullptr;
  for (const auto& [rank, event] : std::exchange(unposted_, {}))
    if (outside) outside->post(rank, event);
}

// Pass an event of a rank of this host on to others.
void Mesh::post(int rank, const std::string& event) {
  if (!here(rank)) return;
  const std::lock_guard lock(posting_);
  if (outside_)
    outside_->post(rank, event);
  else if (posts_)
    unposted_.emplace_back(rank, event);
}

void Mesh::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof one);
}

bool Mesh::acknowledged(double seconds) {
  std::unique_lock lock(mutex_);
  const auto all = [&] {
    return failed() || std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
             return peer.fd < 0 || peer.acknowledged;
           });
  };
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), all) && !failed();
}

// Note a failure; false if it is not the first (M1).
bool Mesh::fail(const Failure& failure) {
  std::lock_guard lock(mutex_);
  if (failed()) return false;
  failure_ = failure;
  failed_.store(true, std::memory_order_release);  // M4
  changed_.notify_all();
  Sleeper::wake_all();
  return true;
}

Failure Mesh::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::string Mesh::failure_event() const { return abort_event(failure()); }

void Mesh::abort(const Failure& failure) {
  closing();
  fail(failure);
  inform(abort_event(failure));
}

void Mesh::abort(const std::exception& error) { abort(Failure{"WeftError", rank_, error.what()}); }

void Mesh::leave(bool for_good) { inform(for_good ? kFarewellForGood : kFarewellForNow); }

void Mesh::drop(uint64_t memory) { inform(std::string(1, kDropped) + bytes_of(memory)); }

void Mesh::publish(const std::string& text) {
  inform((std::string(1, kPublicNote) + text).substr(0, kLongestEvent));
}

// Inform all ranks of an event of this one.
void Mesh::inform(const std::string& event) {
  send_to_all(event);
  post(rank_, event);
}

void Mesh::send_to_all(const std::string& message) {
  for (size_t peer = 0; peer < peers_.size(); ++peer)
    if (peers_[peer].fd >= 0) push(static_cast<int>(peer), message);
}

// Send a message to a peer of this host; the watch sends what its socket does not take now.
void Mesh::push(int peer, std::string message, std::shared_ptr<File> file) {
  {
    const std::lock_guard lock(pushing_);
    peers_[peer].unsent.emplace_back(std::move(message), std::move(file));
  }
  if (!push_rest(peer)) wake();
}

// Send what is unsent as far as that does not wait; whether that is all.
bool Mesh::push_rest(int peer) {
  const std::lock_guard lock(pushing_);
  auto& unsent = peers_[peer].unsent;
  while (!unsent.empty()) {
    const auto& [message, file] = unsent.front();
    if (!transmit(peers_[peer].fd, message, file ? file->fd : -1, MSG_DONTWAIT) &&
        (errno == EAGAIN || errno == EWOULDBLOCK))
      return false;
    unsent.pop_front();  // sent, or the peer is gone
  }
  return true;
}

void Mesh::send(int peer, const std::string& text, const File* file) {
  const std::string message = (std::string(1, kNote) + text).substr(0, kLongest);
  if (peers_[peer].fd < 0) return;  // the mesh is closed
  if (transmit(peers_[peer].fd, message, file ? file->fd : -1, 0) || errno == EPIPE ||
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
