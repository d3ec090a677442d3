// A Unix socket to every peer of this host, and one thread that watches the sockets: it detects the
// death, the exception or the farewell of a peer at once. Messages to and from peers on other hosts
// are carried by somebody else.
//
// M1  The first failure is the cause and is kept; later failures are its consequences.
// M2  Messages of a peer are handled in the order in which it sent them, and all of them before its
//     end. So the cause of a failure, or a farewell, is not lost to the end of its process.
// M3  After a farewell the end of a connection is no failure.
// M4  `failed` and `left` are set before waits are woken, and never reset.
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
#include "memory/signals.hpp"

namespace weft {

struct Failure {
  std::string kind;  // an error class of weft.errors
  int culprit;       // the rank that caused it
  std::string text;
};

// A message of a peer: a text, and the file that was sent with it, if any.
using Note = std::pair<std::string, std::shared_ptr<File>>;

class Mesh {
 public:
  static constexpr int kElsewhere = -2, kAll = -1;

  // `fds[peer]` is a connected SOCK_SEQPACKET socket, -1 for this rank itself, or kElsewhere for a
  // peer on another host; the mesh owns them, unless this throws std::system_error.
  explicit Mesh(std::vector<int> fds);
  ~Mesh();

  // Send a note. A closed connection is no error here: `receive` reports it. Throws
  // std::system_error if this rank lacks a resource.
  void send(int peer, const std::string& text, const File* file);
  // The next note of `peer`; with a status other than `none` there is no note: the world has
  // failed, the peer has left, or the time limit has passed.
  std::pair<WaitStatus, Note> receive(int peer, double seconds);

  // Close the world after a failure: all peers are informed, and all waits of all ranks end.
  void abort(const Failure& failure);
  void abort(const std::exception& error);  // caused by this rank
  // Send a farewell (M3).
  void leave();
  // In a forked child: close its copies of the sockets, so that peers detect the parent's death.
  // The mesh has no other use there.
  void disown();

  // Messages for peers on other hosts, in their order, each for one of them or kAll; and a
  // descriptor that is readable if there are any, -1 without such peers.
  std::vector<std::pair<int, std::string>> outgoing();
  int outgoing_descriptor() const { return outgoing_ready_; }
  // Handle a message that has arrived from a peer on another host; false if it is not valid.
  bool deliver(int peer, const std::string& message);
  // A peer on another host sends nothing more.
  void disconnected(int peer);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Failure failure() const;
  bool left(int peer) const { return peers_[peer].left.load(std::memory_order_acquire); }

  // Called at the beginning of `abort`, to inform peers of this host before their threads have read
  // the message.
  std::function<void()> closing = [] {};

 private:
  struct Peer {
    explicit Peer(int socket) : fd(socket) {}
    int fd;
    int process = -1;  // a pidfd of the process at the other end, or -1 if there is none
    std::atomic<bool> left{false};
    std::deque<Note> notes;
  };
  void watch();
  void watch_peers();
  bool read(int peer);
  bool handle(int peer, const std::string& message, std::shared_ptr<File> file);
  void ended(int peer);
  void fail(const Failure& failure);
  void send_to_all(const std::string& message);
  void post(int peer, std::string message);

  int rank_;  // this rank
  int stop_;  // an eventfd that ends the watch
  std::deque<Peer> peers_;
  std::mutex posting_;  // of what is outgoing
  std::vector<std::pair<int, std::string>> outgoing_;
  int outgoing_ready_ = -1;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> failed_{false};
  Failure failure_;
  std::thread thread_;
};

}  // namespace weft
