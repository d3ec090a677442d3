// The calls of this rank and of ranks on other hosts: what each call expects to arrive, whose turn
// it is to receive, and what ranks learn of each other's calls.
//
// R1  Rows are received only for a call that has begun here, at places that it has named before,
//     and after all ranks of this host that they concern have begun it, too: such a rank may still
//     count signals of the sender for the call before.
// R2  The driver is the thread that holds `driving_`: a caller that waits, as long as it polls or
//     sleeps for arrivals, or else the thread of this network. Rows that arrive while a caller
//     polls pass no other thread.
// R3  A thread that stops to drive while rows or puts are outstanding nudges the thread of this
//     network. Without a nudge it takes over after kTick.
// R4  After `abort` nothing is received any more, and no rows are sent: the memory may be the
//     caller's again. What was announced is still sent, until `close` returns.
// R5  Peers are connected on demand: `need` reports that there are messages between a peer and this
//     rank, Python makes the connection, and `connect` takes it; what is sent waits for it
//     meanwhile. A connection begins with this rank's latest calls.
// R6  Rows that have been too early (R1) for kPatience are kept in memory, until they are not; more
//     than kKept bytes of a peer after kLongPatience. So a call that this rank has yet to make
//     keeps nothing else for ever that follows in the connection, such as a message that it
//     receives before. Rows of a peer are placed in their order.
// R7  A rank that leaves says first that it sends nothing more but control messages, and waits
//     until its peers have said the same. Then its farewell can overtake no rows. It hangs up last.
//     A peer that hangs up without having said so, or having left, has died.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "hosts/transport.hpp"
#include "kernels/reduce.hpp"
#include "memory/calls.hpp"
#include "memory/mesh.hpp"
#include "memory/signals.hpp"

namespace weft {

// Something that is wrong with a peer, for errors, or that a call needs a connection to it.
struct Trouble {
  enum Kind : int { broken, garbled, mismatch, unconnected } kind;
  int peer;
  uint64_t call;     // of a mismatch
  std::string text;  // else
};

// The receiver of messages of other kinds than rows and calls; called by the driver.
struct Service {
  virtual ~Service() = default;
  // Where the next message of a peer goes, `bytes` of it; never `later`. For what is invalid `why`
  // is a phrase.
  virtual Transport::Place place(int peer, const Label& label, size_t bytes, std::string& why) = 0;
  // These bytes of the latest `place` of this peer are there.
  virtual void raise(int peer, size_t bytes) = 0;
  // This rank may send a peer so many bytes more.
  virtual void credit(int, uint64_t) {}
  // A peer sends nothing more.
  virtual void silent(int) {}
};

// The receiver of control messages; called by the driver.
struct ControlReceiver {
  virtual ~ControlReceiver() = default;
  // An event of a rank, which a peer has sent; false if it is not valid.
  virtual bool receive(int peer, int rank, const std::string& event) = 0;
};

class Network : public Driver, private Transport::Receiver {
 public:
  // The messages of a peer's lane in one call of a plan.
  struct Channel {
    int sender;
    uint8_t lane;
    std::vector<int> gate;                      // the ranks of R1
    std::vector<std::vector<Counter*>> raised;  // by message
    // by message: the dtype of rows that travel packed (`kernels/block_int8.hpp`)
    std::vector<std::optional<Dtype>> packed;
  };
  // A channel in one call.
  struct Expected {
    std::shared_ptr<const Channel> channel;
    uint64_t call, digest;
    uint64_t mark;                // of counters (S5)
    std::vector<Strided> places;  // by message
    size_t next = 0;
  };
  using Connect = std::function<std::unique_ptr<Transport>(Transport::Receiver&)>;

  Network(int rank, size_t ranks, Calls calls, std::shared_ptr<Mesh> mesh, const Connect& connect);
  ~Network() override;

  // Report that a call needs a connection to a peer, unless that was done before (R5).
  void need(int peer);
  // Reach a peer by a connected socket, which is this network's from now on.
  void connect(int peer, int fd);
  // Records for `begin`, with memory of earlier ones.
  std::list<Expected> blank(size_t count);
  // Begin a call: receive what it expects from now on, and soon announce it to peers.
  void begin(uint64_t call, const CallText& text, std::list<Expected> expected);
  // Soon inform peers that this rank has refused a call so many times, and why.
  void announce_refusal(uint64_t call, uint64_t times, std::string why);
  // As `Transport::put`.
  bool put(int peer, const Label& label, const std::vector<Strided>& rows, size_t at_once,
           std::function<void()> done) {
    if (ended(peer)) return true;
    return transport_->put(peer, label, rows, at_once, std::move(done));
  }

  // Send a peer, or all that are connected, an event of a rank (`control.hpp`).
  void send_control(int peer, int rank, const std::string& event);
  void send_control_to_connected(int rank, const std::string& event);
  // Pass control messages on, null to nobody any more.
  void serve_control(ControlReceiver* receiver);
  // Pass messages of a kind on to a service, null for nobody any more.
  void serve(Kind kind, Service* service);
  // Let a peer send so many bytes more from rank to rank.
  void credit(int peer, uint64_t bytes);
  // A peer has sent a service what is not valid.
  void garbled(int peer, const std::string& why) override;
  // Whether a connection to a peer is made, or being made.
  bool needed(int peer) const { return peers_[peer].needed.load(std::memory_order_acquire); }
  // Receive and send what can be at once, unless another thread does; whether anything was.
  bool poll() override {
    const Inside inside(*this);
    const std::unique_lock driving(driving_, std::try_to_lock);
    return driving && receive(transport_->unsent() ? 0 : -1);
  }
  // The same, after waiting for something up to so long; false at once if another thread does.
  bool poll_for(int64_t nanoseconds) {
    const Inside inside(*this);
    const std::unique_lock driving(driving_, std::try_to_lock);
    if (driving) receive(static_cast<int>(nanoseconds / 1'000'000) + 1);
    return driving.owns_lock();
  }

  // How long a thread polls before it sleeps, in nanoseconds: `alone` without leaving its core to
  // others, and in all.
  struct Patience {
    int64_t alone, whole;
  };
  // As the function `wait_until`, for a counter to reach a value, while this thread drives.
  // `arrives`: only the driver raises the counter.
  template <class Interrupted, class Gone>
  bool wait_until(Counter& counter, uint64_t expected, bool arrives, Patience patience,
                  Yields yields, Deadline& deadline, Interrupted&& interrupted, Gone&& gone);
  // Let the thread of this network take over at once, if anything is outstanding, or waits.
  void hand_over() {
    if (outstanding() || early()) nudge();
  }
  // The same, for messages that arrive unannounced.
  void nudge() override;

  // Return when this rank has received all rows that its calls expect, or after `seconds`; then say
  // that it sends nothing more, and wait up to `linger` seconds for all peers to do so (R7).
  void finish(double seconds, double linger);
  // Whether a peer sends nothing more.
  bool ended(int peer) const { return peers_[peer].over.load(std::memory_order_acquire); }
  // Whether nothing more arrives from a peer: it has ended what it sends, or has left without a
  // connection to this rank, by which what it sent before might still arrive.
  bool silent(int peer) const {
    return ended(peer) || (mesh_->left(peer) && !peers_[peer].connected.load());
  }
  void abort();
  // Hang up, once peers have what was sent to them and have hung up, or after so many seconds in
  // which nothing is sent, at most ten times as many.
  void close(double seconds);
  // End the thread; after `abort`.
  void stop();
  // In a forked child: close its copies of what is open. There is no other use there.
  void disown();

  // What was wrong since the last time, and a descriptor that is readable if anything is.
  std::vector<Trouble> troubles();
  int trouble_descriptor() const { return trouble_; }

 private:
  static constexpr int kTick = 1;  // milliseconds (R3), and between two announcements
  // milliseconds after which the thread looks again whether a caller drives
  static constexpr int kLook = 20;
  static constexpr int64_t kPatience = 2'000'000, kLongPatience = 200'000'000;  // nanoseconds (R6)
  static constexpr size_t kKept = size_t{64} << 20;                             // bytes (R6)
  // tests of a counter between two polls, each a system call
  static constexpr int kTests = 10;
  // texts of calls that ranks remember of each other
  static constexpr size_t kTexts = 256;
  // latest calls with which a connection begins: as many as peers have headers of
  static constexpr size_t kHistory = Calls::kHeaders;
  // the lane of an announcement before which its receiver forgets all texts
  static constexpr uint8_t kForget = 1;

  struct Kept {
    Label label;
    std::vector<char> bytes;
    bool whole = false;
  };
  struct Peer {
    std::atomic<bool> needed{false}, over{false}, ended_here{false};
    std::atomic<bool> connected{false};  // set by a thread that holds `announcing_`
    bool troubled = false;               // of `mutex_`
    std::list<Expected> expected;
    std::list<Expected>::iterator current;  // of the latest `place`
    std::vector<char> packed;               // its rows, if they travel packed
    // of its calls, by their identities, and by their digests: the latest
    std::unordered_map<uint64_t, std::string> texts, by_digest;
    uint64_t noted = 0;  // the latest call that its rows have shown
    enum Latest { rows, kept_rows, message } latest = rows;  // what the latest `place` was of
    Service* service = nullptr;                              // of a message
    size_t bytes = 0;                                        // of it
    std::deque<Kept> kept;                                   // R6; of the driver, like the rest
    size_t kept_bytes = 0;
    int64_t early_since = 0;  // when rows were too early first, 0 if they are not
  };
  struct Announcement {
    Label label;
    uint64_t identity;
    std::shared_ptr<const std::string> text;
    bool known;  // whether peers know the text
  };
  struct Gate {
    int rank;
    uint64_t call;
  };
  // A caller that drives, or tries to.
  struct Inside {
    explicit Inside(Network& network) : inside(network.inside_) {
      network.turns_.fetch_add(1, std::memory_order_relaxed);
      inside.fetch_add(1, std::memory_order_acq_rel);
    }
    ~Inside() { inside.fetch_sub(1, std::memory_order_acq_rel); }
    std::atomic<int>& inside;
  };

  Transport::Place place(int peer, const Label& label, size_t bytes) override;
  Transport::Place place_message(int peer, const Label& label, size_t bytes);
  Transport::Place place_rows(int peer, const Label& label, size_t bytes);
  Transport::Place keep(int peer, const Label& label, size_t bytes);
  void raise_rows(int peer);
  bool place_kept(int peer);
  void raise(int peer) override;
  void announced(int peer, const Label& label, std::string_view text) override;
  void note_call(int peer, const Label& label, std::string_view text);
  void end(int peer);
  std::string end_message() const;
  template <class Over>
  void drive_until(double seconds, Over over);
  void ended(int peer, const std::string& broken) override;

  // As `Transport::poll` or, with a time, `progress`, and place rows that were kept.
  bool receive(int milliseconds = -1) {
    bool any = milliseconds < 0 ? transport_->poll() : transport_->progress(milliseconds);
    if (kept_.load(std::memory_order_acquire) && !aborted_.load(std::memory_order_acquire))
      for (size_t peer = 0; peer < peers_.size(); ++peer) any |= place_kept(static_cast<int>(peer));
    return any;
  }
  // Whether rows wait that are too early.
  bool early() const { return transport_->waiting() || kept_.load(std::memory_order_acquire); }
  bool outstanding() const {
    return incomplete_.load(std::memory_order_acquire) > 0 || transport_->unsent();
  }
  void report(Trouble trouble);
  bool announce();
  std::vector<Announcement> unannounced();
  void send(std::vector<Announcement> made);
  std::string message(const Announcement& one, bool known) const;
  void ring();
  void work();
  bool drive(Gate& closed);
  bool gone(size_t peer) const;
  bool expects_more();

  const int rank_;
  Calls calls_;
  const std::shared_ptr<Mesh> mesh_;
  std::deque<Peer> peers_;
  int bell_ = -1, trouble_ = -1;
  std::unique_ptr<Transport> transport_;

  Service *tagged_ = nullptr, *regions_ = nullptr;  // of `driving_`
  ControlReceiver* control_ = nullptr;              // the same

  std::mutex mutex_;  // of calls and troubles
  uint64_t begun_ = 0;
  std::list<Expected> spare_;
  std::vector<Trouble> troubles_;
  std::atomic<int> incomplete_{0};  // channels of calls that expect messages
  std::atomic<int> kept_{0};        // messages of rows (R6)

  std::mutex announcing_;  // of the order of announcements, and of connections
  std::deque<Announcement> history_;
  std::mutex announcements_mutex_;  // of the following
  std::vector<Announcement> announcements_;
  std::atomic<bool> announces_{false};
  // the texts that peers know, by identity, and whether they are to forget others
  std::unordered_map<uint64_t, std::shared_ptr<const std::string>> sent_texts_;
  bool forget_ = false;

  std::mutex driving_;  // R2
  Gate gate_{-1, 0};    // of the driver: one that is closed
  std::atomic<int> inside_{0};
  std::atomic<uint64_t> turns_{0};  // of callers that have driven
  std::atomic<bool> nudged_{false}, finishing_{false}, aborted_{false}, stopping_{false};
  enum State : int { awake, parked, watching };
  std::atomic<int> state_{awake};    // of the thread
  std::atomic<bool> dozing_{false};  // whether it sleeps for longer than kTick
  std::thread thread_;
};

template <class Interrupted, class Gone>
bool Network::wait_until(Counter& counter, uint64_t expected, bool arrives, Patience patience,
                         Yields yields, Deadline& deadline, Interrupted&& interrupted,
                         Gone&& gone) {
  const auto arrived = [&] { return counter.value.load(std::memory_order_acquire) >= expected; };
  const int64_t start = now();
  {
    const Inside inside(*this);
    while (true) {
      if (const std::unique_lock driving(driving_, std::try_to_lock); driving) receive();
      for (int i = 0; i < kTests; ++i) {
        if (arrived()) return true;
        pause();
      }
      const int64_t waited = now() - start;
      if (waited >= patience.whole || (waited >= patience.alone && !yield(yields))) break;
    }
  }
  while (true) {
    if (arrived()) return true;
    if (interrupted()) return false;
    if (kept_.load(std::memory_order_acquire)) poll();  // they may be of a peer that has left
    if (gone()) return arrived();                       // S3
    const int64_t left = deadline.left(), slice = left < kSlice ? left : kSlice;
    if (left <= 0) return false;
    if (arrives && !early()) {
      const Inside inside(*this);
      const std::unique_lock driving(driving_, std::try_to_lock);
      if (driving && !arrived()) receive(static_cast<int>(slice / 1'000'000) + 1);
      if (driving) continue;
    }
    hand_over();
    Sleeper sleeper(counter);
    const uint64_t seen = counter.value.load(std::memory_order_seq_cst);  // S2: after `sleepers`
    if (seen < expected) sleep_on(counter, seen, slice);
  }
}

}  // namespace weft
