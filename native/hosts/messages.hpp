// Messages from rank to rank, with tags and from any source: in shared memory on one host, by the
// network between hosts.
//
// P1  The messages of one sender to one receiver are matched in the order of sending: each with the
//     first receive of its tag that names the sender or any source. Matching is the receiver's.
// P2  On one host a sender has a ring of bytes in the memory of each receiver. It writes records
//     there, each behind a word that tells of it, which is written last; the word of the record to
//     come is cleared before. `taken`, in the sender's memory, counts what the receiver has read.
// P3  A long message, but not a large one, is left where it is, if the receiver may read the
//     sender's memory through the kernel: its record has its address. The receiver reads it once it
//     has a receive for it, and then writes the number of the message into a word of the sender. It
//     reads nothing after a failure, from which on the memory may be in other use.
// P4  Nobody's messages stop anybody else's: a receiver takes a message that it has no receive for
//     out of its ring only while it waits for another one of that sender, and then keeps a copy. A
//     sender to another host has at most kWindow bytes under way that the receiver has not
//     delivered, or released because it waits for what follows them.
// P5  A thread that waits moves all messages of this rank. One that sleeps is woken by the counter
//     `bell`, which others raise only if somebody sleeps (S2).
// P6  Nothing is written to the memory of a receive, nor read from that of a send, once it is done;
//     after `fail_all` at the latest when the network has been aborted (R4).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "hosts/network.hpp"
#include "memory/deferred_work.hpp"
#include "memory/mesh.hpp"
#include "memory/segment.hpp"
#include "memory/signals.hpp"

namespace weft {

// A send or a receive. What is not atomic belongs to whoever holds the lock of its `Messages`,
// until it is done.
struct Message {
  enum State : int { open, done, failed };
  static constexpr int kAny = -1;

  std::atomic<int> state{open};
  bool sending;
  int peer;  // or kAny
  int tag;
  char* data;
  size_t bytes;
  int source = -1;                // of a received message
  size_t size = 0;                // of a received message, which may be too long
  size_t moved = 0;               // bytes of a send that have been put
  std::atomic<int> under_way{0};  // puts to another host that are not done
  bool watched = false;           // somebody is to learn of its end
  std::shared_ptr<void> error;    // of Python, if it has failed

  Message(bool sends, int of, int tagged, char* at, size_t length)
      : sending(sends), peer(of), tag(tagged), data(at), bytes(length) {}
};
using MessagePtr = std::shared_ptr<Message>;

class Messages : public Service {
 public:
  static constexpr size_t kLong = 16;  // long messages to a peer under way

  // Bytes of each rank's part of the segment, with rings of so many bytes. It has the rings of all
  // ranks, and counters: the bell, and for each peer what it has taken, and which long messages it
  // has read.
  static size_t bytes(size_t ranks, size_t ring) {
    return ranks * ring + (1 + ranks * (1 + kLong)) * sizeof(Counter);
  }

  // `segment` is zeroed. `pids` are of the peers whose memory this rank may read and that may read
  // its own, 0 of others. `network` is null if all ranks are on this host.
  Messages(std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> segment, size_t ring,
           std::vector<int> pids, int spins, std::shared_ptr<Network> network,
           std::shared_ptr<DeferredWork> progress);
  ~Messages() override;

  // Begin to send, or to receive: from `kAny` peer, if so. Null if it cannot be, since this process
  // is a fork, messages are closed, or this thread is in `wait`; or the world has failed, after
  // which only what had been sent before can be received.
  MessagePtr send(const char* data, size_t bytes, int peer, int tag);
  MessagePtr receive(char* data, size_t bytes, int peer, int tag);

  // Move all messages until this one is done, and return `none`; or another reason to end:
  // `left` if its peer has left, or all have. `interrupted` is called from time to time.
  WaitStatus wait(Message& message, int64_t timeout, const std::function<bool()>& interrupted);
  // Move messages for nobody, until none is outstanding, a message that is watched has ended, or
  // threads wait for some.
  WaitStatus advance(int64_t timeout, const std::function<bool()>& interrupted);

  // Report the end of a message by `ended`; false if it has ended.
  bool watch(const MessagePtr& message);
  // The watched messages that have ended since the last time.
  std::vector<MessagePtr> ended();

  // End a message with an error, unless a part of it has been moved: then false.
  bool fail(Message& message, std::shared_ptr<void> error);
  // End all messages with an error.
  void fail_all(const std::shared_ptr<void>& error);
  // Refuse new messages and end waits.
  void close();
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  bool failed() const { return mesh_->failed(); }
  // Why messages cannot be moved any more, if a wait has ended with `unreadable`.
  const char* trouble() const { return trouble_.load(std::memory_order_acquire); }

  // Whether this thread is in `wait`: in a signal handler.
  bool inside() const { return inside_ == this; }
  size_t ranks() const { return peers_.size(); }
  int rank() const { return rank_; }

  // A message that is outstanding: of those that threads wait for the first, if there is one.
  MessagePtr outstanding();

 private:
  static constexpr size_t kLine = 64;
  // Bytes of messages that pass a ring although the receiver may read them at once: up to kShort,
  // which take less time so, and from kLarge on, where both ranks copy at the same time.
  // Measured on a 2-core Xeon: there and back 2 MiB take 0.54 ms read, 0.50 by the ring, both ways
  // at once 0.28 and 0.38; 16 MiB 6.0 and 3.1, and 3.8 and 2.9.
  static constexpr size_t kShort = 16 << 10, kLarge = 4 << 20;
  static constexpr size_t kPart = 64 << 10;  // bytes that pass a ring at a time, at most
  // bytes of a long message that are read, or put to another host, before others have a turn
  static constexpr size_t kTurn = 1 << 20;
  static constexpr size_t kWindow = 16 << 20;  // P4
  // nanoseconds for which a thread with a core of its own polls the network before it sleeps
  static constexpr int64_t kPolls = 200'000;

  struct Record {  // P2
    enum Kind : uint32_t { bytes, address, skip };
    std::atomic<uint64_t> word;  // 0, or one more than the bytes that follow
    uint64_t size;               // of the whole message
    uint32_t kind, tag;
    uint64_t number;  // of the word that tells that a long message has been read
    char payload[];
  };
  static_assert(sizeof(Record) == 32);

  // A message that arrives, or has arrived and waits for its receive.
  struct Incoming {
    Incoming(int tagged, size_t bytes) : tag(tagged), size(bytes) {}

    int tag;
    size_t size, arrived = 0;
    MessagePtr receive;
    std::unique_ptr<char[]> kept;  // without a receive that has room
    uint64_t address = 0, number = 0;
    size_t held = 0;  // bytes that the sender counts as under way (P4)
    char* place() const { return kept ? kept.get() : receive->data; }
  };
  struct Peer {
    bool here = false;
    std::deque<MessagePtr> sending;
    std::optional<Incoming> incoming;
    std::list<Incoming> unexpected;
    size_t receives = 0;  // that name this peer
    // on this host
    char *outbox = nullptr, *inbox = nullptr;
    Counter *bell = nullptr, *taken = nullptr, *taken_there = nullptr;
    Counter *read = nullptr, *read_there = nullptr;  // kLong words each (P3)
    int pid = 0;
    uint64_t put = 0, got = 0, reported = 0, space = 0;  // bytes of the rings; `space`: taken
    MessagePtr unread[kLong];
    size_t unread_count = 0;
    // on another host
    size_t under_way = 0;  // bytes (P4)
    size_t delivered = 0;  // bytes that the peer does not know of
  };
  struct Reading {  // a long message, in parts
    int peer;
    Incoming message;
  };

  // of the network's driver
  Transport::Place place(int peer, const Label& label, size_t bytes, std::string& why) override;
  void raise(int peer, size_t bytes) override;
  void credit(int peer, uint64_t bytes) override;

  MessagePtr begin(MessagePtr message);
  bool receive_kept(int number, const MessagePtr& receive);
  bool move();
  bool put(int number, Peer& peer);
  bool put_here(Peer& peer, Message& message);
  bool put_there(int number, Peer& peer, const MessagePtr& message);
  Record* room(Peer& peer, size_t payload);
  void publish(Peer& peer, Record* record, size_t payload);
  bool take(int number);
  void report(Peer& peer);
  bool read_part(Reading& reading);
  void has_been_read(Peer& peer, uint64_t number);
  std::list<MessagePtr>::iterator meant(int peer, int tag);
  MessagePtr match(int peer, int tag);
  size_t& receives_like(const Message& receive);
  bool expect(int number, int tag, size_t size, bool with_place);
  void arrive(int number, Incoming message);
  void deliver(int number, Incoming& message);
  void deliver_unless_read(int number, Incoming message);
  void release(int number, size_t bytes);
  void end(const MessagePtr& message, Message::State state);
  bool settle();
  void update();
  void ring(Counter& bell);
  void favour_others(int peer);
  bool all_left() const;
  bool step(bool after_others);
  template <class Over>
  WaitStatus move_until(Over over, const Message* message, int64_t timeout,
                        const std::function<bool()>& interrupted);

  static inline thread_local const Messages* inside_ = nullptr;

  const std::shared_ptr<Mesh> mesh_;
  const std::shared_ptr<Segment> segment_;
  const size_t ring_;
  const int rank_, spins_;
  const std::shared_ptr<Network> network_;
  const std::shared_ptr<DeferredWork> progress_;
  const int forks_;
  Counter* bell_ = nullptr;
  std::atomic<bool> closed_{false};
  std::atomic<int> waiting_{0};  // threads
  std::atomic<const char*> trouble_{nullptr};

  std::mutex mutex_;  // of the following
  std::vector<Peer> peers_;
  std::vector<int> order_;  // of receives from any source
  std::list<MessagePtr> receives_;
  size_t any_source_ = 0;
  std::vector<MessagePtr> flying_;  // sends to other hosts, all of which has been put
  std::list<Reading> reading_;
  std::list<const Message*> awaited_;
  std::vector<MessagePtr> ended_;
  bool pending_ = false;
};

}  // namespace weft
