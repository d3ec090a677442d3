// A Unix socket to every peer of this host, and one thread that watches the sockets: it detects the
// death, the exception or the farewell of a peer at once. Such an event is for ranks on other hosts
// as well, of which `Outside` informs their hosts; an event there reaches some rank of this host,
// which informs the others.
//
// M1  The first failure is the cause and is kept; later failures are its consequences.
// M2  Messages of a peer are handled in the order in which it sent them, and all of them before its
//     end. So the cause of a failure, or a farewell, is not lost to the end of its process.
// M3  After a farewell the end of a connection is no failure.
// M4  `failed` and `left` are set before waits are woken, and never reset.
// M5  Every rank of a host passes each event of the host's ranks on to its `Outside`, in the order
// in
//     which the rank sent them.
// M6  A peer of this host acknowledges a farewell after all that it has sent before.
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

// What informs other hosts of events of this one, and this rank of events elsewhere.
struct Outside {
  virtual ~Outside() = default;
  // An event of a rank of this host.
  virtual void post(int rank, const std::string& event) = 0;
  // A rank of any host has left.
  virtual void left(int rank) = 0;
  // A rank on another host has no tensor in memory any more.
  virtual void dropped(int rank, uint64_t memory) = 0;
};

// A message of a peer: a text, and the file that was sent with it, if any.
using Note = std::pair<std::string, std::shared_ptr<File>>;

class Mesh {
 public:
  static constexpr int kElsewhere = -2;

  // `fds[peer]` is a connected SOCK_SEQPACKET socket, -1 for this rank itself, or kElsewhere for a
  // peer on another host; the mesh owns them, unless this throws std::system_error.
  explicit Mesh(std::vector<int> fds);
  ~Mesh();

  // Send a peer of this host a note. A closed connection is no error here: `receive` reports it.
  // Throws std::system_error if this rank lacks a resource.
  void send(int peer, const std::string& text, const File* file);
  // Send a note to all ranks on other hosts.
  void publish(const std::string& text);
  // The next note of `peer`; with a status other than `none` there is no note: the world has
  // failed, the peer has left, or the time limit has passed.
  std::pair<WaitStatus, Note> receive(int peer, double seconds);

  // Close the world after a failure: all peers are informed, and all waits of all ranks end.
  void abort(const Failure& failure);
  void abort(const std::exception& error);  // caused by this rank
  // Send a farewell (M3), which tells whether this rank leaves for good, or may go on in a world
  // that follows this one.
  void leave(bool for_good);
  // End the watch and close all sockets, after a failure or a farewell: what a peer sends
  // afterwards is lost, `left` stays as it is, and messages go nowhere. For waits of this rank, of
  // which a signal handler may interrupt one to call this, the world has failed.
  void close();
  // In a forked child: close its copies of the sockets, so that peers detect the parent's death.
  // The mesh has no other use there.
  void disown();

  // Pass on events, those until now, too; with null no more.
  void attach(Outside* outside);
  // This rank has no tensor in memory any more.
  void drop(uint64_t memory);
  // Handle an event that has arrived of a rank on another host, and inform this host's ranks; false
  // if it is not valid.
  bool deliver(int rank, const std::string& event);
  // A peer on another host has died: this host's ranks are informed.
  void disconnected(int peer);
  // After `leave`: whether all peers of this host have acknowledged it (M6), or have ended, before
  // the world fails and in so many seconds.
  bool acknowledged(double seconds);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Failure failure() const;
  // The failure as an event.
  std::string failure_event() const;
  bool left(int peer) const { return peers_[peer].left.load(std::memory_order_acquire); }
  // Whether a peer has said that it leaves for good.
  bool gone(int peer) const { return peers_[peer].gone.load(std::memory_order_acquire); }

  // Called at the beginning of `abort`, to inform peers of this host before their threads have read
  // the message.
  std::function<void()> closing = [] {};

 private:
  struct Peer {
    explicit Peer(int socket) : fd(socket) {}
    int fd;
    int process = -1;  // a pidfd of the process at the other end, or -1 if there is none
    std::atomic<bool> left{false}, gone{false};
    bool acknowledged = false;  // this and the next of `mutex_`
    std::deque<Note> notes;
    std::deque<Note> unsent;  // of `pushing_`: what the socket did not take at once
  };
  void watch();
  void watch_peers();
  bool read(int peer);
  bool handle(int peer, const std::string& message, std::shared_ptr<File> file);
  void add_note(int rank, Note note);
  bool handle_event(int rank, const std::string& event);
  void leaves(int rank, bool for_good);
  void ended(int peer);
  void acknowledge(int peer);
  bool fail(const Failure& failure);
  void inform(const std::string& event);
  void send_to_all(const std::string& message);
  void push(int peer, std::string message, std::shared_ptr<File> file = nullptr);
  bool push_rest(int peer);
  void post(int rank, const std::string& event);
  bool here(int rank) const { return peers_[rank].fd != kElsewhere; }
  void wake();

  int rank_;  // this rank
  int wake_;  // an eventfd: there is more to send, or the watch is over
  std::atomic<bool> stopping_{false};
  std::deque<Peer> peers_;
  std::mutex pushing_;
  std::mutex posting_;
  Outside* outside_ = nullptr;                         // this and the next of `posting_`
  std::vector<std::pair<int, std::string>> unposted_;  // events before `attach`
  bool posts_ = false;                                 // whether there are other hosts
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> failed_{false};
  Failure failure_;
  std::thread thread_;
};

}  // namespace weft
