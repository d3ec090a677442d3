// A transport of one TCP connection to each peer that is connected.
//
// A message is a header of 32 bytes, and then its text, or its rows and a byte that is 1, or 0 if
// the rows are not valid: after an abort the rest of a message that was sent in part is. What has
// arrived is read into a small buffer, from where short messages are copied to their places; the
// rest of a long one is read there directly.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <utility>

#include "hosts/transport.hpp"

namespace weft {

class TcpTransport : public Transport {
 public:
  // For so many peers, of which none is connected. Throws std::system_error.
  TcpTransport(size_t peers, Receiver& receiver);
  ~TcpTransport() override;

  void connect(int peer, int fd, std::shared_ptr<const std::string> first) override;
  bool put(int peer, const Label& label, const std::vector<Strided>& rows, size_t at_once,
           std::function<void()> done) override;
  void announce(int peer, std::shared_ptr<const std::string> messages) override;
  std::string message(const Label& label, std::string_view text) const override;
  bool poll() override;
  bool progress(int milliseconds) override;
  int descriptor() const override { return epoll_; }
  bool waiting() const override { return waiting_.load(std::memory_order_acquire); }
  bool resumes() const override { return resumes_.load(std::memory_order_acquire); }
  bool unsent() const override { return unsent_.load(std::memory_order_acquire); }
  uint64_t bytes_sent() const override { return bytes_sent_.load(std::memory_order_relaxed); }
  void wake() override;
  void end(int peer) override;
  void abort() override;
  bool open(int peer) const override { return peers_[peer].fd >= 0 && !peers_[peer].over; }
  void disown() override;

 private:
  struct Header {
    Kind kind;
    uint8_t lane;
    uint8_t reserved[6];
    uint64_t call, digest, bytes;
  };
  static_assert(sizeof(Header) == 32);
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers are in the order of the host");

  // A part of what is sent: a header, if any, and rows or the byte behind rows.
  struct Part {
    Header header;
    bool headed;
    Strided rows;

    size_t bytes() const { return headed * sizeof(Header) + rows.bytes(); }
  };
  struct Outgoing {
    std::vector<Part> parts;
    size_t at = 0, position = 0;  // the next byte: that of a part
    std::function<void()> done = {};
    std::shared_ptr<const std::string> text = {};
  };
  enum class Sent { all, some, full, broken };

  struct Peer {
    int number = -1;
    int fd = -1;  // of `sending`; the driver, which alone sets it, reads it without
    // of the driver
    std::unique_ptr<char[]> ahead;  // bytes that were read, and belong to what follows
    size_t begin = 0, end = 0;      // of these
    bool in_message = false, later = false, over = false;
    bool hung_up =
        false;  // there was an event of the end, which is behind what is still to be read
    Header header{};
    Place place;
    size_t position = 0;  // bytes of the message that have arrived
    // of senders
    std::mutex sending;
    std::deque<Outgoing> queue;
    bool ending = false, broken = false;
    std::atomic<int> error{0};  // for which it cannot be reached any more
  };

  Outgoing outgoing(std::shared_ptr<const std::string> messages) const;
  void take_connections();
  void receive(Peer& peer);
  bool consume(Peer& peer);
  void discard(Peer& peer);
  void stop(Peer& peer, int error);
  void flush(Peer& peer);
  void send_queue(Peer& peer);
  void keep_announcements(Peer& peer);
  Sent send(Peer& peer, Outgoing& out, size_t most);
  void drop(Peer& peer, int error);
  void again(Peer& peer);
  void look_for_waiting();

  Receiver& receiver_;
  std::deque<Peer> peers_;
  std::vector<Peer*> connected_;
  int epoll_ = -1, wake_ = -1;
  unsigned polls_ = 0;
  bool any_ = false;  // whether anything was received or sent
  std::atomic<bool> waiting_{false};
  std::atomic<int> unsent_{0};
  std::atomic<uint64_t> bytes_sent_{0};
  std::atomic<bool> aborted_{false};
  std::mutex resuming_;                     // of the following
  std::vector<std::pair<Peer*, int>> new_;  // connections, by their sockets
  // peers of which more can be received or sent, without an event that says so
  std::vector<Peer*> resumed_;
  std::atomic<bool> resumes_{false};
};

}  // namespace weft
