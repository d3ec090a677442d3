// A Unix socket to every peer, and one thread that watches them: how a death, an exception or a
// farewell is seen at once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "memory/segment.hpp"

namespace weft {

struct Failure {
  std::string kind;  // an error class of weft.errors
  int culprit;       // the rank whose fault it is
  std::string text;
};

// from a peer: a text, and the file that came with it, if one did
using Note = std::pair<std::string, std::shared_ptr<File>>;

class Mesh {
 public:
  // `fds[peer]` is a connected SOCK_SEQPACKET socket, -1 for this rank itself; the mesh owns them,
  // unless this throws std::system_error.
  explicit Mesh(std::vector<int> fds);
  ~Mesh();

  // A peer that has hung up takes no notes: `receive` says why. Throws std::system_error for what
  // this rank lacks.
  void send(int peer, const std::string& text, const File* file);
  // The next note of `peer`; throws std::runtime_error if the world fails, the peer leaves or the
  // time is over.
  Note receive(int peer, double seconds);

  // Tell all peers that this rank cannot go on; their waits end, and so do this rank's own.
  void abort(const Failure& failure);
  void abort(const std::exception& error);  // of this rank's own
  // Say farewell: from now on this rank's silence is no failure.
  void leave();
  // In a forked child: close its copies of the sockets, so that peers see when the parent dies. The
  // mesh is of no other use there.
  void disown();

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Failure failure() const;
  bool left(int peer) const { return peers_[peer].left.load(std::memory_order_acquire); }

  // Called first when this rank cannot go on: peers of this host are to see that before their
  // threads have read its message.
  std::function<void()> closing = [] {};

 private:
  struct Peer {
    explicit Peer(int socket) : fd(socket) {}
    int fd;
    // a file that can be read once the process at the other end has ended, if that can be had
    int process = -1;
    std::atomic<bool> left{false};
    std::deque<Note> notes;
  };
  void watch();
  void watch_peers();
  bool read(int peer);
  void ended(int peer);
  void fail(const Failure& failure);
  void tell_all(const std::string& message);

  int rank_;  // this rank
  int stop_;  // an eventfd that ends the watch
  std::deque<Peer> peers_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> failed_{false};
  Failure failure_;
  std::thread thread_;
};

}  // namespace weft
