// A Unix socket to every peer, and one thread that watches them: how a death, an exception or a farewell is seen at once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace weft {

struct Failure {
  std::string kind;  // an error class of weft.errors
  int culprit;       // the rank whose fault it is
  std::string text;
};

using Note = std::pair<std::string, int>;  // from a peer: a text, and the file that came with it, which is the receiver's, or -1

class Mesh {
 public:
  // `fds[peer]` is a connected SOCK_SEQPACKET socket, -1 for this rank itself; the mesh owns them.
  explicit Mesh(std::vector<int> fds);
  ~Mesh();

  // A peer that has hung up takes no notes: `receive` says why. Throws std::system_error for what this rank lacks.
  void send(int peer, const std::string& text, int fd);
  // The next note of `peer`; throws std::runtime_error if the world fails, the peer leaves or the time is over.
  Note receive(int peer, double seconds);

  // Tell all peers that this rank cannot go on; their waits end, and so do this rank's own.
  void abort(const Failure& failure);
  // Say farewell: from now on this rank's silence is no failure.
  void leave();

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Failure failure() const;
  bool left(int peer) const { return peers_[peer].left.load(std::memory_order_acquire); }

 private:
  struct Peer {
    explicit Peer(int socket) : fd(socket) {}
    int fd;
    std::atomic<bool> left{false};
    std::deque<Note> notes;
  };
  void watch();
  bool read(int peer);
  void fail(const Failure& failure);
  void tell_all(const std::string& message);

  int stop_;  // an eventfd that ends the watch
  std::deque<Peer> peers_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> failed_{false};
  Failure failure_;
  std::thread thread_;
};

}  // namespace weft
