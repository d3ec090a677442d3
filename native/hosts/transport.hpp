// The interface of a wire between this rank and ranks on other hosts.
//
// A put has two parts that the receiver's `Receiver` keeps apart: the place of its rows, and the
// counters that are raised once the rows are there. The sender names neither: its label, and the
// number of puts of that label before, tell which of the receiver's own call they are. So a wire
// that places rows itself may ask for places in advance, and only raise counters on arrival.
//
// T1  Puts of one lane to one peer arrive complete, and their counters are raised in their order.
// T2  One thread at a time calls `poll` and `progress`: the driver. Any may put and announce.
// T3  A put that has not been received leaves its rows in the wire: the receiver may be a call
//     behind. No later put, announcement or end of that peer overtakes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

// Rows in memory, `stride` bytes apart; without rows it is a token.
struct Strided {
  char* base = nullptr;
  size_t rows = 0, row_bytes = 0, stride = 0;

  size_t bytes() const { return rows * row_bytes; }
  bool contiguous() const { return rows <= 1 || stride == row_bytes; }
};

// Copy adjacent bytes to rows.
inline void scatter(const char* from, const Strided& rows) {
  if (rows.contiguous()) {
    if (rows.bytes()) std::memcpy(rows.base, from, rows.bytes());
    return;
  }
  for (size_t row = 0; row < rows.rows; ++row, from += rows.row_bytes)
    std::memcpy(rows.base + row * rows.stride, from, rows.row_bytes);
}

// What a message is: rows of a lane in a call, a call that a rank makes, or one that it refuses; a
// part of a message from rank to rank, or leave to send more of them (`messages.hpp`); a part of a
// one-sided call (`regions.hpp`); an event of a rank (`control.hpp`); the last of all but events.
enum class Kind : uint8_t {
  rows = 1,
  call = 2,
  refusal = 3,
  tagged = 4,
  credit = 5,
  region = 6,
  control = 7,
  end = 8
};

// Whether a message of this kind has a place, or a text.
inline bool has_place(Kind kind) {
  return kind == Kind::rows || kind == Kind::tagged || kind == Kind::region;
}
inline bool has_text(Kind kind) {
  return kind >= Kind::rows && kind <= Kind::end && !has_place(kind);
}
// Bytes of a text, at most.
inline size_t longest_text(Kind kind) { return kind == Kind::control ? 15 << 10 : 512; }

// Of a refusal the digest is how often it was refused. Of a tagged message `lane` is 1 in its first
// part, `call` its tag and `digest` its bytes in all; of a credit `call` is the bytes. Of a
// one-sided call `lane` is what it does, `call` its number and `digest` that of the memory. Of a
// control message `call` is the rank.
struct Label {
  Kind kind;
  uint8_t lane;
  uint64_t call, digest;
};

class Transport {
 public:
  struct Place {
    enum State {
      here,     // in `rows`
      later,    // not yet: the rows stay in the wire
      nowhere,  // they are dropped
      invalid   // nothing more is received of that peer
    } state = later;
    Strided rows = {};
  };

  // The receiving rank; called by the driver.
  struct Receiver {
    virtual ~Receiver() = default;
    // Where the next rows of a peer go, `bytes` of them.
    virtual Place place(int peer, const Label& label, size_t bytes) = 0;
    // The rows of the latest `place` of this peer are there.
    virtual void raise(int peer) = 0;
    // A message of a peer with this text.
    virtual void announced(int peer, const Label& label, std::string_view text) = 0;
    // A peer has hung up, or has ended; `broken`: it cannot be reached any more, for this reason.
    virtual void ended(int peer, const std::string& broken) = 0;
    // A peer has sent a message that is not valid.
    virtual void garbled(int peer, const std::string& why) = 0;
  };

  virtual ~Transport() = default;

  // Reach a peer by a connected socket, which the transport owns; what was put for it before
  // follows the messages `first`, which are as those of `announce`.
  virtual void connect(int peer, int fd, std::shared_ptr<const std::string> first) = 0;
  // Put rows to a peer, `at_once` bytes of them on this thread as far as that does not block; the
  // driver puts the rest, and calls `done` when the rows may be overwritten. True if they may be
  // already; then `done` is not called. Rows for a peer that has ended are dropped, those for one
  // that is not connected yet wait for it.
  virtual bool put(int peer, const Label& label, const std::vector<Strided>& rows, size_t at_once,
                   std::function<void()> done) = 0;
  // Send a connected peer messages without rows: those that `message` has made, one after the
  // other.
  virtual void announce(int peer, std::shared_ptr<const std::string> messages) = 0;
  // A message for `announce`.
  virtual std::string message(const Label& label, std::string_view text) const = 0;

  // Receive and send what can be at once; whether anything was. `poll` may overlook some of it.
  virtual bool poll() = 0;
  // The same, after waiting up to `milliseconds` for something to do.
  virtual bool progress(int milliseconds) = 0;
  // A descriptor that is readable when `progress` has something to do.
  virtual int descriptor() const = 0;
  // Whether rows wait because their `place` was `later`.
  virtual bool waiting() const = 0;
  // Whether `progress` has something to do that the descriptor does not show.
  virtual bool resumes() const = 0;
  // Whether some puts are not done.
  virtual bool unsent() const = 0;
  // The number of bytes that have been sent; 0 where that is not known.
  virtual uint64_t bytes_sent() const { return 0; }
  // End a wait in `progress`, of any thread.
  virtual void wake() = 0;

  // Send a peer nothing more, after what is under way.
  virtual void end(int peer) = 0;
  // Receive nothing more, and send peers nothing more but what was announced: puts that are not
  // done never are, and their rows are not read any more.
  virtual void abort() = 0;
  // Whether a connection to a peer is open that this rank, or the peer, has not ended. For the
  // driver.
  virtual bool open(int peer) const = 0;
  // In a forked child: close its copies of what is open.
  virtual void disown() = 0;
};

}  // namespace weft
