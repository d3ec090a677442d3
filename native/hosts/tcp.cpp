#include "hosts/tcp.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

namespace weft {

namespace {

constexpr size_t kAhead = 16 << 10;  // bytes that are read ahead, and copied
constexpr size_t kTurn = 1 << 20;    // bytes of one peer after which others have their turn
constexpr size_t kParts = 64;        // pieces of memory of one system call
// rows shorter than this are gathered and scattered by the processor, not by the kernel
constexpr size_t kShort = 512;
constexpr int kFew = 2;  // connections that are polled one by one, without asking which is ready
constexpr unsigned kSweep = 16;  // polls of which one looks for all events

// Append the pieces of memory of rows from byte `position` on, up to `most` bytes; false if there
// was no room for all.
bool add_pieces(const Strided& rows, size_t position, size_t most, iovec* pieces, size_t& count,
                size_t& bytes) {
  const size_t row = rows.contiguous() ? rows.bytes() : rows.row_bytes,
               stride = rows.contiguous() ? row : rows.stride;
  while (position < rows.bytes() && bytes < most) {
    if (count == kParts) return false;
    const size_t at = position % row, size = std::min(row - at, most - bytes);
    pieces[count++] = {rows.base + position / row * stride + at, size};
    position += size;
    bytes += size;
  }
  return position == rows.bytes();
}

// Copy between rows, from byte `position` on, and `size` adjacent bytes.
template <class Copy>
void each_row(const Strided& rows, size_t position, size_t size, Copy copy) {
  const size_t row = rows.contiguous() ? rows.bytes() : rows.row_bytes,
               stride = rows.contiguous() ? row : rows.stride;
  for (size_t done = 0; done < size;) {
    const size_t at = position % row, part = std::min(row - at, size - done);
    copy(rows.base + position / row * stride + at, done, part);
    position += part;
    done += part;
  }
}

char zeros[4 << 10], one_byte[] = {1};  // nobody writes them

// Whether an error tells no more than that the peer has hung up.
bool hung_up(int error) { return error == EPIPE || error == ECONNRESET; }

bool by_kernel(const Strided& rows) { return rows.contiguous() || rows.row_bytes >= kShort; }

}  // namespace

TcpTransport::TcpTransport(size_t peers, Receiver& receiver) : receiver_(receiver), peers_(peers) {
  for (size_t number = 0; number < peers; ++number)
    peers_[number].number = static_cast<int>(number);
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  if (epoll_ >= 0 && wake_ >= 0 && !epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event)) return;
  const int error = errno;
  if (epoll_ >= 0) close(epoll_);
  if (wake_ >= 0) close(wake_);
  throw std::system_error(error, std::generic_category(), "connections to other hosts");
}

TcpTransport::~TcpTransport() { disown(); }

void TcpTransport::disown() {
  for (Peer& peer : peers_)
    if (peer.fd >= 0) close(std::exchange(peer.fd, -1));
  for (auto& [peer, fd] : new_) close(fd);
  new_.clear();
  if (epoll_ >= 0) close(std::exchange(epoll_, -1));
  if (wake_ >= 0) close(std::exchange(wake_, -1));
}

void TcpTransport::connect(int number, int fd, std::shared_ptr<const std::string> first) {
  Peer& peer = peers_[number];
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  {
    const std::lock_guard lock(peer.sending);
    peer.queue.push_front(outgoing(std::move(first)));
    unsent_.fetch_add(1, std::memory_order_acq_rel);
  }
  {
    const std::lock_guard lock(resuming_);
    new_.emplace_back(&peer, fd);
    resumes_.store(true, std::memory_order_release);
  }
  wake();
}

// Begin to send and receive by new connections.
void TcpTransport::take_connections() {
  std::vector<std::pair<Peer*, int>> taken;
  {
    const std::lock_guard lock(resuming_);
    taken.swap(new_);
  }
  for (const auto& [peer, fd] : taken) {
    peer->ahead.reset(new char[kAhead]);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    event.data.ptr = peer;
    {
      const std::lock_guard lock(peer->sending);
      peer->fd = fd;
      if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event)) drop(*peer, errno);
    }
    connected_.push_back(peer);
    flush(*peer);
    receive(*peer);
  }
}

bool TcpTransport::put(int number, const Label& label, const std::vector<Strided>& rows,
                       size_t at_once, std::function<void()> done) {
  thread_local Outgoing out;  // reused, so that a put that is sent at once allocates nothing
  Peer& peer = peers_[number];
  out.parts.clear();
  out.at = out.position = 0;
  for (const Strided& each : rows) {
    out.parts.push_back(
        {{label.kind, label.lane, {}, label.call, label.digest, each.bytes()}, true, each});
    out.parts.push_back({{}, false, {one_byte, 1, 1, 1}});
  }
  const std::lock_guard lock(peer.sending);
  if (peer.broken || peer.ending || aborted_.load(std::memory_order_relaxed)) return true;
  Sent sent = Sent::full;
  if (peer.fd >= 0 && peer.queue.empty()) sent = send(peer, out, at_once);
  if (sent == Sent::all || sent == Sent::broken) return true;
  out.done = std::move(done);
  peer.queue.push_back(std::move(out));
  out = {};
  unsent_.fetch_add(1, std::memory_order_acq_rel);
  if (sent == Sent::some) again(peer);
  return false;
}

void TcpTransport::announce(int number, std::shared_ptr<const std::string> messages) {
  Peer& peer = peers_[number];
  Outgoing out = outgoing(std::move(messages));
  const std::lock_guard lock(peer.sending);
  if (peer.broken || peer.ending || aborted_.load(std::memory_order_relaxed)) return;
  Sent sent = Sent::full;
  if (peer.fd >= 0 && peer.queue.empty()) sent = send(peer, out, kTurn);
  if (sent == Sent::all || sent == Sent::broken) return;
  peer.queue.push_back(std::move(out));
  unsent_.fetch_add(1, std::memory_order_acq_rel);
  if (sent == Sent::some) again(peer);
}

TcpTransport::Outgoing TcpTransport::outgoing(std::shared_ptr<const std::string> messages) const {
  Outgoing out;
  const size_t size = messages->size();
  out.parts.push_back({{}, false, {const_cast<char*>(messages->data()), 1, size, size}});
  out.text = std::move(messages);
  return out;
}

std::string TcpTransport::message(const Label& label, std::string_view text) const {
  size_t length = std::min(text.size(), longest_text(label.kind));
  // no part of a UTF-8 character
  while (length < text.size() && length && (text[length] & 0xc0) == 0x80) --length;
  const Header header{label.kind, label.lane, {}, label.call, label.digest, length};
  std::string made(reinterpret_cast<const char*>(&header), sizeof header);
  return made.append(text.substr(0, length));
}

// Send what the connection takes of a message, up to about `most` bytes of it.
TcpTransport::Sent TcpTransport::send(Peer& peer, Outgoing& out, size_t most) {
  thread_local std::vector<char> gathered;
  size_t total = 0;
  while (out.at < out.parts.size()) {
    if (total >= most) return Sent::some;
    iovec pieces[kParts];
    size_t count = 0, bytes = 0, position = out.position;
    for (size_t at = out.at; at < out.parts.size() && count < kParts && bytes < most; ++at) {
      Part& part = out.parts[at];
      const size_t head = part.headed * sizeof(Header);
      if (position < head) {
        pieces[count++] = {reinterpret_cast<char*>(&part.header) + position, head - position};
        bytes += head - position;
        position = head;
      }
      if (by_kernel(part.rows)) {
        if (!add_pieces(part.rows, position - head, most, pieces, count, bytes)) break;
      } else if (count < kParts) {
        gathered.resize(64 << 10);
        const size_t size = std::min(part.rows.bytes() - (position - head), gathered.size());
        each_row(part.rows, position - head, size, [&](char* row, size_t done, size_t n) {
          std::memcpy(gathered.data() + done, row, n);
        });
        pieces[count++] = {gathered.data(), size};
        bytes += size;
        break;  // the buffer is used once
      }
      position = 0;
    }
    msghdr header{};
    header.msg_iov = pieces;
    header.msg_iovlen = count;
    const ssize_t n = sendmsg(peer.fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Sent::full;
    if (n < 0) {
      drop(peer, errno);
      return Sent::broken;
    }
    total += static_cast<size_t>(n);
    bytes_sent_.fetch_add(static_cast<uint64_t>(n), std::memory_order_relaxed);
    for (size_t left = static_cast<size_t>(n); out.at < out.parts.size();) {
      const size_t rest = out.parts[out.at].bytes() - out.position;
      if (left < rest) {
        out.position += left;
        break;
      }
      left -= rest;
      out.position = 0;
      ++out.at;
    }
  }
  return Sent::all;
}

// Drop what was to be sent to a peer whose connection is broken, of which the driver reports the
// end after what has arrived before.
void TcpTransport::drop(Peer& peer, int error) {
  peer.broken = true;
  if (!hung_up(error)) peer.error.store(error, std::memory_order_release);
  for (Outgoing& out : peer.queue) {
    if (out.done) out.done();
    unsent_.fetch_sub(1, std::memory_order_acq_rel);
  }
  peer.queue.clear();
}

void TcpTransport::flush(Peer& peer) {
  const std::lock_guard lock(peer.sending);
  if (peer.fd >= 0) send_queue(peer);
}

// Send what is queued for a peer as far as that does not block; for a thread that holds `sending`.
void TcpTransport::send_queue(Peer& peer) {
  while (!peer.queue.empty()) {
    const Sent sent = send(peer, peer.queue.front(), kTurn);
    if (sent == Sent::broken) return;  // and all of it is dropped
    any_ |= sent != Sent::full;
    if (sent == Sent::full) return;
    if (sent == Sent::some) return again(peer);
    const Outgoing out = std::move(peer.queue.front());
    peer.queue.pop_front();
    unsent_.fetch_sub(1, std::memory_order_acq_rel);
    if (out.done) out.done();
  }
  if (peer.ending && !peer.broken) shutdown(peer.fd, SHUT_WR);
}

void TcpTransport::end(int number) {
  Peer& peer = peers_[number];
  const std::lock_guard lock(peer.sending);
  if (std::exchange(peer.ending, true)) return;
  if (peer.fd >= 0 && peer.queue.empty() && !peer.broken) shutdown(peer.fd, SHUT_WR);
}

void TcpTransport::abort() {
  aborted_.store(true, std::memory_order_release);
  for (Peer& peer : peers_) {
    const std::lock_guard lock(peer.sending);
    keep_announcements(peer);
    peer.ending = true;
    if (peer.fd >= 0) send_queue(peer);
  }
  wake();
}

// Drop the rows that are queued for a peer. Of a message of which a part is sent the peer expects
// the rest, to which something may follow: zeros, the last of which says that they are not valid.
void TcpTransport::keep_announcements(Peer& peer) {
  std::deque<Outgoing> kept;
  for (Outgoing& out : peer.queue) {
    if (out.text) {
      kept.push_back(std::move(out));
    } else if (const Part& part = out.parts[out.at]; out.position || !part.headed) {
      const size_t head = part.headed * sizeof(Header);
      const auto* const header = reinterpret_cast<const char*>(&part.header);
      const std::string of_header(header + std::min(out.position, head), header + head);
      Outgoing rest = outgoing(std::make_shared<const std::string>(of_header));
      const size_t row = sizeof zeros,
                   bytes = part.bytes() - std::max(out.position, head) + part.headed;
      if (bytes >= row) rest.parts.push_back({{}, false, {zeros, bytes / row, row, 0}});
      if (bytes % row) rest.parts.push_back({{}, false, {zeros, 1, bytes % row, row}});
      kept.push_back(std::move(rest));
    }
  }
  unsent_.fetch_sub(static_cast<int>(peer.queue.size() - kept.size()), std::memory_order_acq_rel);
  peer.queue = std::move(kept);
}

void TcpTransport::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof one);
}

void TcpTransport::again(Peer& peer) {
  const std::lock_guard lock(resuming_);
  resumed_.push_back(&peer);
  resumes_.store(true, std::memory_order_release);
}

bool TcpTransport::poll() {
  if (connected_.size() > kFew || ++polls_ % kSweep == 0) return progress(0);
  any_ = false;
  for (Peer* peer : connected_) receive(*peer);
  look_for_waiting();
  return any_;
}

void TcpTransport::look_for_waiting() {
  waiting_.store(std::any_of(connected_.begin(), connected_.end(),
                             [](const Peer* peer) { return peer->later; }),
                 std::memory_order_release);
}

bool TcpTransport::progress(int milliseconds) {
  any_ = false;
  if (resumes_.load(std::memory_order_acquire)) {
    std::vector<Peer*> resumed;
    {
      const std::lock_guard lock(resuming_);
      resumed_.swap(resumed);
      resumes_.store(false, std::memory_order_release);
    }
    take_connections();
    for (Peer* peer : resumed) {
      flush(*peer);
      receive(*peer);
    }
    milliseconds = 0;
  }
  if (waiting())
    for (Peer* peer : connected_)
      if (peer->later) receive(*peer);
  epoll_event events[64];
  const int count = epoll_wait(epoll_, events, 64, any_ ? 0 : milliseconds);
  for (int i = 0; i < count; ++i) {
    Peer* const peer = static_cast<Peer*>(events[i].data.ptr);
    if (!peer) {
      uint64_t times;
      [[maybe_unused]] const ssize_t n = read(wake_, &times, sizeof times);
      continue;
    }
    if (events[i].events & EPOLLOUT) flush(*peer);
    if (events[i].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) peer->hung_up = true;
    if (events[i].events & ~EPOLLOUT) receive(*peer);
  }
  look_for_waiting();
  return any_;
}

// Receive what has arrived from a peer, as far as its messages have places.
void TcpTransport::receive(Peer& peer) {
  if (aborted_.load(std::memory_order_acquire)) return discard(peer);
  if (peer.later && !consume(peer)) return;
  for (size_t taken = 0; !peer.over && !peer.later && !aborted_.load(std::memory_order_relaxed);) {
    iovec pieces[kParts + 1];
    size_t count = 0, direct = 0;
    if (peer.in_message && peer.place.state == Place::here && by_kernel(peer.place.rows))
      add_pieces(peer.place.rows, peer.position, SIZE_MAX, pieces, count, direct);
    if (peer.begin == peer.end)
      peer.begin = peer.end = 0;
    else if (peer.begin) {  // the beginning of a header or a text
      std::memmove(peer.ahead.get(), peer.ahead.get() + peer.begin, peer.end - peer.begin);
      peer.end -= std::exchange(peer.begin, 0);
    }
    const bool whole = !direct || direct == peer.header.bytes - peer.position;
    const size_t room = whole ? kAhead - peer.end : 0;
    if (room) pieces[count++] = {peer.ahead.get() + peer.end, room};
    msghdr header{};
    header.msg_iov = pieces;
    header.msg_iovlen = count;
    const ssize_t n = recvmsg(peer.fd, &header, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    any_ = true;
    if (n <= 0) return stop(peer, n ? errno : 0);
    const size_t got = static_cast<size_t>(n), placed = std::min(got, direct);
    peer.position += placed;
    peer.end += got - placed;
    consume(peer);
    // that is all: an event will follow for more
    if (got < direct + room && !peer.hung_up) return;
    if ((taken += got) >= kTurn) return again(peer);
  }
}

// After an abort: read what has arrived, so that what this rank sends is not lost with it.
void TcpTransport::discard(Peer& peer) {
  thread_local char nowhere[64 << 10];
  while (!peer.over) {
    const ssize_t n = recv(peer.fd, nowhere, sizeof nowhere, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    any_ = true;
    peer.over = n <= 0;
  }
}

void TcpTransport::stop(Peer& peer, int error) {
  peer.over = true;
  if (const int sending = peer.error.load(std::memory_order_acquire)) error = sending;
  if (!aborted_.load(std::memory_order_relaxed))
    receiver_.ended(peer.number, !error || hung_up(error) ? "" : std::strerror(error));
}

// Pass on what was read of a peer; false if its next message has no place yet.
bool TcpTransport::consume(Peer& peer) {
  peer.later = false;
  while (!peer.over) {
    if (!peer.in_message) {
      Header& header = peer.header;
      if (peer.end - peer.begin < sizeof header) return true;
      std::memcpy(&header, peer.ahead.get() + peer.begin, sizeof header);
      const Label label{header.kind, header.lane, header.call, header.digest};
      if (!has_place(header.kind)) {
        const bool known = has_text(header.kind);
        if (!known || header.bytes > longest_text(header.kind)) {
          peer.over = true;
          receiver_.garbled(
              peer.number,
              known ? "a text of " + std::to_string(header.bytes) + " bytes"
                    : "a message of unknown kind " + std::to_string(static_cast<int>(header.kind)));
          return true;
        }
        const size_t size = sizeof header + header.bytes;
        if (peer.end - peer.begin < size) return true;
        receiver_.announced(peer.number, label,
                            {peer.ahead.get() + peer.begin + sizeof header, header.bytes});
        peer.begin += size;
        any_ = true;
        continue;
      }
      peer.place = receiver_.place(peer.number, label, header.bytes);
      if (peer.place.state == Place::later) {
        peer.later = true;
        return false;
      }
      if (peer.place.state == Place::invalid) {
        peer.over = true;
        return true;
      }
      peer.begin += sizeof header;
      peer.in_message = true;
      peer.position = 0;
      any_ = true;
    }
    const size_t size = std::min(peer.header.bytes - peer.position, peer.end - peer.begin);
    if (peer.place.state == Place::here)
      each_row(peer.place.rows, peer.position, size, [&](char* row, size_t done, size_t part) {
        std::memcpy(row, peer.ahead.get() + peer.begin + done, part);
      });
    peer.position += size;
    peer.begin += size;
    if (peer.position < peer.header.bytes || peer.begin == peer.end) return true;
    peer.in_message = false;
    const bool is_valid = peer.ahead[peer.begin++];
    if (is_valid && peer.place.state == Place::here) receiver_.raise(peer.number);
  }
  return true;
}

}  // namespace weft
