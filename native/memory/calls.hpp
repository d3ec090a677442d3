// Headers of calls in shared memory: each rank publishes its latest calls, so that its peers detect
// when they make different calls.
//
// H1  A rank publishes the header of a call before it raises the first signal of the call on its
//     host. So a peer that has got the signal finds the header, or a later one in its place.
// H2  `call` is 0 while the other fields change, and is stored last. A reader knows that the header
//     was published, from H1 or from `call`; it reads the fields and then `call` again: if that is
//     still the number, the fields belong to the call.
// H3  Header n is overwritten by call n + kHeaders. A rank is never that many calls ahead of a peer
//     that still waits for it in call n: at most 16 asynchronous calls are outstanding, and
//     executions run at most a few ahead of the last rank.
// H4  `text` is for errors only. A later call may change it while it is read, but it always ends
//     with a 0.
// H5  `closed` is set once, by a peer that closes the world, and never reset.
// H6  `began` and `ended` are for the flight recorder alone, in the cache line that `call` changes
//     anyway. A call has ended if `ended` is its number.
// H7  A rank that refuses a call, for bad arguments, publishes the number that the call would have
//     had. The refusal counts until the rank makes a call of that number, and only for peers that
//     have refused that number fewer times: what all ranks refuse is no call.
// H8  The headers of a rank on another host are written by all ranks of this host that learn of its
//     calls, and read by all. Two that write at the same time write the same, but for a rank that
//     is kHeaders calls late; what is older than the header is not written.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/clock.hpp"
#include "memory/segment.hpp"
#include "memory/signals.hpp"

namespace weft {

// 64-bit FNV-1a: the same value with every compiler and library, since ranks compare it.
inline uint64_t hash(std::string_view text, uint64_t value = 0xcbf29ce484222325) {
  for (unsigned char byte : text) value = (value ^ byte) * 0x100000001b3;
  return value;
}

// Text of a call: the call in the user's words, a line break, and all properties on which ranks
// must agree. Without a line break the words are these properties as well.
struct CallText {
  std::string text;
  uint64_t digest;    // of the properties on which ranks must agree, for peers to compare
  uint64_t identity;  // of the complete text

  explicit CallText(std::string all) : text(std::move(all)) {
    const size_t line = text.find('\n'), words = line == std::string::npos ? 0 : line + 1;
    digest = hash(std::string_view(text).substr(words));
    identity = words ? hash(std::string_view(text).substr(0, words), digest) : digest;
  }
};

// A call that a rank has made: when, in nanoseconds of `date`; of a rank on another host, when this
// host heard of it, and never whether it has ended.
struct MadeCall {
  uint64_t number;
  int64_t began;
  bool ended;
  std::string text;
};

class Calls {
 public:
  static constexpr size_t kHeaders = 32;  // H3

 private:
  struct Header {
    std::atomic<uint64_t> call;
    std::atomic<uint64_t> digest;
    std::atomic<uint64_t> address;
    std::atomic<int64_t> began;
    std::atomic<uint64_t> ended;
    char text[472];
  };
  static_assert(sizeof(Header) == 512);
  struct Refusal {  // the latest of a rank
    std::atomic<uint64_t> call, times;
    char text[496];  // H4
  };
  static_assert(sizeof(Refusal) == 512);

 public:
  // Size of the headers, the refusal, `under_way` and `closed`, with which each rank's part of the
  // segment begins.
  static constexpr size_t kBytes =
      kHeaders * sizeof(Header) + sizeof(Refusal) + 2 * sizeof(Counter);

  explicit Calls(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  // Number of calls that this rank has started, which is the number of the latest call.
  uint64_t latest() const { return latest_; }
  // Begin the next call and publish its header, with the address of the tensor that peers read
  // through the kernel. Returns the call's number.
  uint64_t begin(const CallText& text, uint64_t address) {
    const uint64_t call = ++latest_;
    Header& own = header(segment_->rank, call);
    own.call.store(0, std::memory_order_relaxed);  // H2
    std::atomic_thread_fence(std::memory_order_release);
    own.address.store(address, std::memory_order_relaxed);
    uint64_t& written = written_[call % kHeaders];
    if (written == text.identity) {
      own.began.store(date(), std::memory_order_relaxed);
      own.call.store(call, std::memory_order_release);
    } else {
      store(segment_->rank, call, text.digest, text.text);
      written = text.identity;
    }
    return call;
  }
  // Note that this rank has ended a call.
  void end(uint64_t call) {
    header(segment_->rank, call).ended.store(call, std::memory_order_relaxed);
  }

  // Note a call of a peer on another host, of which a message tells, where a local peer's header is
  // read (H8).
  void note(int peer, uint64_t call, uint64_t digest, const std::string& text) {
    if (!started(peer, call)) store(peer, call, digest, text);
  }
  // Write the header of a rank's call.
  void store(int rank, uint64_t call, uint64_t digest, const std::string& text) {
    Header& to = header(rank, call);
    to.call.store(0, std::memory_order_relaxed);  // H2
    to.began.store(date(), std::memory_order_relaxed);
    // a reader of this digest sees the 0, or a later number
    to.digest.store(digest, std::memory_order_release);
    write(to.text, text);
    to.call.store(call, std::memory_order_release);
  }

  // Publish that this rank refuses its next call, of which the number is returned, for the reason
  // `text`.
  uint64_t refuse(const std::string& text) {
    const uint64_t call = latest_ + 1;
    store_refusal(segment_->rank, call, times_refused(segment_->rank, call) + 1, text);
    return call;
  }
  // How many times a rank has refused its call of this number.
  uint64_t times_refused(int rank, uint64_t call) const {
    const Refusal& from = refusal(rank);
    return from.call.load(std::memory_order_acquire) == call
               ? from.times.load(std::memory_order_relaxed)
               : 0;
  }
  // Note a refusal of a peer on another host (H8).
  void note_refusal(int peer, uint64_t call, uint64_t times, const std::string& text) {
    const Refusal& known = refusal(peer);
    if (known.call.load(std::memory_order_acquire) <= call && times_refused(peer, call) < times)
      store_refusal(peer, call, times, text);
  }
  // Write the refusal of a rank.
  void store_refusal(int rank, uint64_t call, uint64_t times, const std::string& text) {
    Refusal& to = refusal(rank);
    to.call.store(0, std::memory_order_relaxed);  // H2
    std::atomic_thread_fence(std::memory_order_release);
    to.times.store(times, std::memory_order_relaxed);
    write(to.text, text);
    to.call.store(call, std::memory_order_release);
  }
  // Whether `peer` refuses the call of this number, which this rank makes (H7).
  bool refused(int peer, uint64_t call) const {
    return times_refused(peer, call) > times_refused(segment_->rank, call) && !started(peer, call);
  }
  // Why a rank has refused its latest refused call.
  std::string reason(int rank) const { return refusal(rank).text; }

  // Whether `peer` has started its call of this number, equal to this rank's or not.
  bool started(int peer, uint64_t call) const {
    return header(peer, call).call.load(std::memory_order_acquire) >= call;
  }
  // Whether the header of `peer` shows another call than this rank's call of this number and
  // digest.
  bool mismatch(int peer, uint64_t call, uint64_t digest) const {
    const Header& theirs = header(peer, call);
    if (theirs.call.load(std::memory_order_acquire) != call) return false;
    bool same = theirs.digest.load(std::memory_order_acquire) == digest;
    // H2: not overwritten meanwhile
    return !same && theirs.call.load(std::memory_order_relaxed) == call;
  }
  // Number of the latest call that a rank has started to execute, which may be later than its
  // header was published.
  Counter& under_way(int rank) const { return counters(rank)[0]; }
  // Mark the world as closed for all peers of this host, before their threads have read this rank's
  // message (H5).
  void close() const {
    for (size_t rank = 0; rank < segment_->parts.size(); ++rank)
      if (static_cast<int>(rank) != segment_->rank)
        counters(rank)[1].value.store(1, std::memory_order_seq_cst);
  }
  // Whether a peer has closed the world, so that its memory may be in other use.
  bool closed() const { return counters(segment_->rank)[1].value.load(std::memory_order_acquire); }
  // The address that `peer` has published with this call; none if the peer is at another call by
  // now.
  std::optional<uint64_t> address(int peer, uint64_t call) const {
    const Header& theirs = header(peer, call);
    const uint64_t published = theirs.address.load(std::memory_order_acquire);
    return theirs.call.load(std::memory_order_relaxed) == call ? std::optional(published)
                                                               : std::nullopt;
  }
  // The latest calls of a rank, the earliest first; one that changes meanwhile is left out.
  std::vector<MadeCall> made(int rank) const {
    std::vector<MadeCall> found;
    for (size_t at = 0; at < kHeaders; ++at) {
      const Header& one = header(rank, at);
      const uint64_t call = one.call.load(std::memory_order_acquire);
      MadeCall copy{call, one.began.load(std::memory_order_acquire),
                    one.ended.load(std::memory_order_acquire) == call, one.text};
      if (call && one.call.load(std::memory_order_relaxed) == call)  // H2
        found.push_back(std::move(copy));
    }
    std::sort(found.begin(), found.end(),
              [](const MadeCall& a, const MadeCall& b) { return a.number < b.number; });
    return found;
  }
  // The text of the call of this number of `peer`; empty if the peer has not started it yet.
  std::string text(int peer, uint64_t call) const {
    const Header& theirs = header(peer, call);
    return theirs.call.load(std::memory_order_acquire) == call ? theirs.text : "";
  }

 private:
  // As much of a text as there is room for, and no part of a UTF-8 character.
  template <size_t kRoom>
  static void write(char (&to)[kRoom], const std::string& text) {
    size_t length = std::min(text.size(), kRoom - 1);
    while (length < text.size() && length && (text[length] & 0xc0) == 0x80) --length;
    std::memcpy(to, text.data(), length);
    to[length] = 0;  // H4
  }
  Refusal& refusal(int rank) const {
    return *reinterpret_cast<Refusal*>(segment_->parts[rank]->base() + kHeaders * sizeof(Header));
  }
  Counter* counters(int rank) const { return reinterpret_cast<Counter*>(&refusal(rank) + 1); }
  Header& header(int rank, uint64_t call) const {
    return reinterpret_cast<Header*>(segment_->parts[rank]->base())[call % kHeaders];
  }

  std::shared_ptr<Segment> segment_;
  uint64_t latest_ = 0;
  std::array<uint64_t, kHeaders> written_{};  // identities of the texts in this rank's headers
};

// Whether a peer refuses a call of this rank, for a wait that asks again and again: false while the
// peer has time to make the call after all.
class RefusedCall {
 public:
  RefusedCall(const Calls& calls, int peer, uint64_t call)
      : calls_(calls), peer_(peer), call_(call) {}

  bool stands() {
    if (!calls_.refused(peer_, call_)) return false;
    if (!second_try_) second_try_.emplace(kSecondTry);
    return second_try_->passed();
  }

 private:
  // Nanoseconds in which a rank that has refused a call may make it with other arguments.
  static constexpr int64_t kSecondTry = 1'000'000'000;

  const Calls& calls_;
  int peer_;
  uint64_t call_;
  std::optional<Deadline> second_try_;
};

}  // namespace weft
