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
  kAbort = 'a',
  // between ranks of one host only
  kLetter = 'l',
  kAcknowledged = 'k',
  kConnection = 'c'
};
const std::string kFarewellForNow = "f", kFarewellForGood = "fg";
constexpr size_t kLongest = 16384;
// of a letter, with the ranks, or of a connection, with what was read of its next message
constexpr size_t kLongestBetweenRanks = 3 * kLongest;

std::string abort_message(const Failure& failure) {
  return std::string(1, kAbort) + failure.kind + "\n" + std::to_string(failure.culprit) + "\n" +
         failure.text;
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
  const bool elsewhere = std::find(fds.begin(), fds.end(), kElsewhere) != fds.end();
  if (wake_ >= 0 && elsewhere) relay_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  try {
    if (wake_ < 0 || (elsewhere && relay_ < 0))
      throw std::system_error(errno, std::generic_category(), "eventfd");
    for (auto& peer : peers_) peer.process = open_process(peer.fd);
    thread_ = std::thread(&Mesh::watch, this);
  } catch (...) {
    close_if_open(wake_);
    close_if_open(relay_);
    for (auto& peer : peers_) close_if_open(peer.process);
    throw;
  }
}

Mesh::~Mesh() { close(); }

void Mesh::close() {
  if (!thread_.joinable()) return;
  fail({"WeftError", rank_, "rank " + std::to_string(rank_) + " closed this world"});
  stopping_.store(true, std::memory_order_release);
  wake(wake_);
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
  close_if_open(relay_);
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
  char text[kLongestBetweenRanks];
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
  if (!handle(peer, {text, static_cast<size_t>(n)}, std::move(file), true))
    fail({"WeftError", peer, "it sent a message that cannot be read"});
  return true;
}

// Note that a peer of this host has acknowledged this rank's farewell, or has ended.
void Mesh::acknowledge(int peer) {
  const std::lock_guard lock(mutex_);
  peers_[peer].acknowledged = true;
  changed_.notify_all();
}

// Handle a message of a peer, which came from it directly if it is `here`, on this host, and the
// file that came with it; false if it is not valid.
bool Mesh::handle(int peer, const std::string& message, std::shared_ptr<File> file, bool here) {
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
    // later ones are consequences, which their own hosts know of (M1)
    if (here && !failed()) post({peer, kAll, message});
    fail({body.substr(0, first), culprit, body.substr(second + 1)});
  } else if (message == kFarewellForNow || message == kFarewellForGood) {
    leaves(peer, message, here);
  } else if (!here) {
    const std::lock_guard lock(posting_);
    arrived_.emplace_back(peer, message);
    wake_relay();
  } else if (message[0] == kLetter) {
    return handle_letter(body);
  } else if (message[0] == kAcknowledged) {
    acknowledge(peer);
  } else if (message[0] == kConnection && file) {
    const std::lock_guard lock(posting_);
    handed_over_.emplace_back(std::move(body), std::move(file));
    wake_relay();
  } else {
    return false;
  }
  return true;
}

// Handle a letter that a peer of this host passes on: for this rank, or for another host.
bool Mesh::handle_letter(const std::string& body) {
  Letter letter;
  constexpr size_t size = sizeof letter.origin + sizeof letter.target;
  if (body.size() < size) return false;
  std::memcpy(&letter.origin, body.data(), sizeof letter.origin);
  std::memcpy(&letter.target, body.data() + sizeof letter.origin, sizeof letter.target);
  letter.text = body.substr(size);
  const int ranks = static_cast<int>(peers_.size());
  if (letter.origin < 0 || letter.origin >= ranks || letter.target < kAll || letter.target >= ranks)
    return false;
  if (letter.target == kAll || letter.target == rank_)
    return handle(letter.origin, letter.text, nullptr, false);
  post(std::move(letter));
  return true;
}

// Note that a peer has left.
void Mesh::leaves(int peer, const std::string& farewell, bool here) {
  if (here) post({peer, kAll, farewell});
  if (farewell == kFarewellForGood) peers_[peer].gone.store(true, std::memory_order_release);
  {
    const std::lock_guard lock(mutex_);
    peers_[peer].left.store(true, std::memory_order_release);  // M4
    changed_.notify_all();
    Sleeper::wake_all();
  }
  if (relay_ < 0) return;
  if (here) return push(peer, std::string(1, kAcknowledged));
  const std::lock_guard lock(posting_);
  arrived_.emplace_back(peer, kFarewellForNow);
  wake_relay();
}

bool Mesh::deliver(int peer, const std::string& message) {
  return handle(peer, message, nullptr, false);
}

void Mesh::disconnected(int peer) {
  if (left(peer)) return;  // M3
  const Failure failure{"PeerLost", peer, ""};
  const Letter letter{peer, kAll, abort_message(failure)};
  if (failed())
    return;
  else if (peers_[peer].fd == kElsewhere)
    pass_on(kAll, letter);
  else
    post(letter);
  fail(failure);
}

void Mesh::wake(int descriptor) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(descriptor, &one, sizeof one);
}

void Mesh::wake_relay() { wake(relay_); }

void Mesh::post(Letter letter) {
  if (relay_ < 0) return;
  const std::lock_guard lock(posting_);
  outgoing_.push_back(std::move(letter));
  wake_relay();
}

std::vector<Letter> Mesh::outgoing() {
  const std::lock_guard lock(posting_);
  uint64_t times;
  [[maybe_unused]] const ssize_t n = ::read(relay_, &times, sizeof times);
  return std::exchange(outgoing_, {});
}

std::vector<std::pair<int, std::string>> Mesh::arrived() {
  const std::lock_guard lock(posting_);
  return std::exchange(arrived_, {});
}

std::vector<Note> Mesh::handed_over() {
  const std::lock_guard lock(posting_);
  return std::exchange(handed_over_, {});
}

void Mesh::pass_on(int to, const Letter& letter) {
  std::string message(1, kLetter);
  message.append(reinterpret_cast<const char*>(&letter.origin), sizeof letter.origin);
  message.append(reinterpret_cast<const char*>(&letter.target), sizeof letter.target);
  message += letter.text;
  if (to != kAll) return push(to, std::move(message));
  send_to_all(message);
}

bool Mesh::hand_over(const std::vector<int>& heirs, const std::string& text, int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return false;
  const auto file = std::make_shared<File>(copy);
  // a peer that leaves has its farewell acknowledged after all connections that it is sent (M6)
  const std::lock_guard lock(mutex_);
  const auto heir = std::find_if(heirs.begin(), heirs.end(),
                                 [&](int each) { return !left(each) && peers_[each].fd >= 0; });
  if (heir == heirs.end()) return false;
  push(*heir, std::string(1, kConnection) + text, file);
  return true;
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

void Mesh::abort(const Failure& failure) {
  closing();
  fail(failure);
  const std::string message = abort_message(failure).substr(0, kLongest);
  send_to_all(message);
  post({rank_, kAll, message});
}

void Mesh::abort(const std::exception& error) { abort(Failure{"WeftError", rank_, error.what()}); }

void Mesh::leave(bool for_good) {
  const std::string message = for_good ? kFarewellForGood : kFarewellForNow;
  send_to_all(message);
  post({rank_, kAll, message});
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
  if (!push_rest(peer)) wake(wake_);
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
  if (peers_[peer].fd == kElsewhere) return post({rank_, peer, message});
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
