// A Unix socket to every peer of this host, and one thread that watches the sockets: it detects the
// death, the exception or the farewell of a peer at once. Somebody else, a relay, carries messages
// from host to host: of each host one rank does so for all. So the messages of a rank to peers on
// other hosts, and theirs to it, may pass through another rank of this host.
//
// M1  The first failure is the cause and is kept; later failures are its consequences.
// M2  Messages of a peer are handled in the order in which it sent them, and all of them before its
//     end. So the cause of a failure, or a farewell, is not lost to the end of its process.
// M3  After a farewell the end of a connection is no failure.
// M4  `failed` and `left` are set before waits are woken, and never reset.
// M5  Failures and farewells of this host are for other hosts as well: each rank's relay gets them,
//     as letters for all, after the letters that their rank has sent through this one.
// M6  A peer of this host acknowledges a farewell after all that it has sent before, and sends the
//     rank that leaves nothing more that others need.
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

// A message from a rank to one on another host, or to all (`Mesh::kAll`).
struct Letter {
  int origin, target;
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

  // For the relay: letters for other hosts, in their order; messages of peers on other hosts that
  // are none of the mesh's, and their farewells; connections that peers of this host have handed
  // over; and a descriptor that is readable if there is any of these, -1 without peers on other
  // hosts.
  std::vector<Letter> outgoing();
  std::vector<std::pair<int, std::string>> arrived();
  std::vector<Note> handed_over();
  int relay_descriptor() const { return relay_; }
  // Pass a letter on to a rank of this host, or to all others (kAll). Nothing here waits.
  void pass_on(int to, const Letter& letter);
  // Handle a message that has arrived from a peer on another host; false if it is not valid.
  bool deliver(int peer, const std::string& message);
  // A peer on another host has died: this host's ranks are told.
  void disconnected(int peer);
  // Hand a connection over to the first of these ranks of this host that has not left; false if
  // there is none.
  bool hand_over(const std::vector<int>& heirs, const std::string& text, int fd);
  // After `leave`: whether all peers of this host have acknowledged it (M6), or have ended, before
  // the world fails and in so many seconds.
  bool acknowledged(double seconds);

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  Failure failure() const;
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
  bool handle(int peer, const std::string& message, std::shared_ptr<File> file, bool here);
  bool handle_letter(const std::string& body);
  void leaves(int peer, const std::string& farewell, bool here);
  void ended(int peer);
  void acknowledge(int peer);
  bool fail(const Failure& failure);
  void send_to_all(const std::string& message);
  void push(int peer, std::string message, std::shared_ptr<File> file = nullptr);
  bool push_rest(int peer);
  void post(Letter letter);
  void wake_relay();
  void wake(int descriptor);

  int rank_;  // this rank
  int wake_;  // an eventfd: there is more to send, or the watch is over
  std::atomic<bool> stopping_{false};
  std::deque<Peer> peers_;
  std::mutex pushing_;
  std::mutex posting_;  // of what is the relay's
  std::vector<Letter> outgoing_;
  std::vector<std::pair<int, std::string>> arrived_;
  std::vector<Note> handed_over_;
  int relay_ = -1;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> failed_{false};
  Failure failure_;
  std::thread thread_;
};

}  // namespace weft
