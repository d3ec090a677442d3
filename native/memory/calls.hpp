// What ranks say of their latest calls, where their peers can read it: how all notice that they do
// not make the same one.
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

#include "memory/segment.hpp"
#include "memory/signals.hpp"

namespace weft {

// FNV-1a of 64 bits, whose value no compiler or library may choose.
inline uint64_t hash(std::string_view text, uint64_t value = 0xcbf29ce484222325) {
  for (unsigned char byte : text) value = (value ^ byte) * 0x100000001b3;
  return value;
}

// What a rank says of a call: the call in the user's words, then, behind a line break, all that
// ranks must agree on. Without a line break the words are all of it.
struct Said {
  std::string text;
  uint64_t digest;    // of what ranks must agree on, for peers to compare
  uint64_t identity;  // of the whole text

  explicit Said(std::string what) : text(std::move(what)) {
    const size_t line = text.find('\n'), words = line == std::string::npos ? 0 : line + 1;
    digest = hash(std::string_view(text).substr(words));
    identity = words ? hash(std::string_view(text).substr(0, words), digest) : digest;
  }
};

class Calls {
 private:
  struct Header {
    std::atomic<uint64_t> call;
    std::atomic<uint64_t> digest;
    std::atomic<uint64_t> address;
    char text[488];
  };
  static_assert(sizeof(Header) == 512);
  // a rank is never this many calls ahead of a peer that still waits for it
  static constexpr size_t kHeaders = 32;

 public:
  // Of a rank's part of the segment, at its beginning: headers, `under_way`, `closed`.
  static constexpr size_t kBytes = kHeaders * sizeof(Header) + 2 * sizeof(Counter);

  explicit Calls(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  // The number of calls that this rank has begun; the latest has it.
  uint64_t latest() const { return latest_; }
  // Begin the next call, and let peers read what it is, and at which address they find what they
  // read through the kernel; its number.
  uint64_t begin(const Said& said, uint64_t address) {
    const uint64_t call = ++latest_;
    Header& own = header(segment_->rank, call);
    own.call.store(0, std::memory_order_relaxed);  // not to be read while it is written
    std::atomic_thread_fence(std::memory_order_release);
    own.address.store(address, std::memory_order_relaxed);
    uint64_t& written = written_[call % kHeaders];
    if (written == said.identity) {
      own.call.store(call, std::memory_order_release);
    } else {
      note(segment_->rank, call, said.digest, said.text);
      written = said.identity;
    }
    return call;
  }

  // Write down what a rank says of a call. That of a peer on another host comes by message, and is
  // kept where its header is looked for.
  void note(int rank, uint64_t call, uint64_t digest, const std::string& text) {
    Header& said = header(rank, call);
    said.call.store(0, std::memory_order_relaxed);  // not to be read while it is written
    // who reads it sees that the call before is gone
    said.digest.store(digest, std::memory_order_release);
    size_t length = std::min(text.size(), sizeof said.text - 1);
    // no half characters
    while (length < text.size() && length && (text[length] & 0xc0) == 0x80) --length;
    std::memcpy(said.text, text.data(), length);
    said.text[length] = 0;
    said.call.store(call, std::memory_order_release);
  }

  // Has `peer` begun the call of this number, whatever it is?
  bool begun(int peer, uint64_t call) const {
    return header(peer, call).call.load(std::memory_order_acquire) >= call;
  }
  // Does `peer` say that it made another call than this rank, whose `call` has this digest?
  bool mismatch(int peer, uint64_t call, uint64_t digest) const {
    const Header& theirs = header(peer, call);
    if (theirs.call.load(std::memory_order_acquire) != call) return false;
    bool same = theirs.digest.load(std::memory_order_acquire) == digest;
    // and not overwritten meanwhile
    return !same && theirs.call.load(std::memory_order_relaxed) == call;
  }
  // The number of the latest call that a rank has begun to carry out, which may be later than it
  // began the call.
  Counter& under_way(int rank) const { return counters(rank)[0]; }
  // Let all peers of this host see that this rank has closed the world, however late they are to
  // read its message.
  void close() const {
    for (size_t rank = 0; rank < segment_->parts.size(); ++rank)
      if (static_cast<int>(rank) != segment_->rank)
        counters(rank)[1].value.store(1, std::memory_order_seq_cst);
  }
  // Has a peer closed the world, so that its memory may be in other use?
  bool closed() const { return counters(segment_->rank)[1].value.load(std::memory_order_acquire); }
  // The address that `peer` told with this call; nothing if the peer is at another call by now.
  std::optional<uint64_t> address(int peer, uint64_t call) const {
    const Header& theirs = header(peer, call);
    const uint64_t told = theirs.address.load(std::memory_order_acquire);
    return theirs.call.load(std::memory_order_relaxed) == call ? std::optional(told) : std::nullopt;
  }
  // The text of the call that `peer` made as this rank made `call`; empty if it has not made it
  // yet.
  std::string text(int peer, uint64_t call) const {
    const Header& theirs = header(peer, call);
    return theirs.call.load(std::memory_order_acquire) == call ? theirs.text : "";
  }

 private:
  Counter* counters(int rank) const {
    return reinterpret_cast<Counter*>(segment_->parts[rank]->base() + kHeaders * sizeof(Header));
  }
  Header& header(int rank, uint64_t call) const {
    return reinterpret_cast<Header*>(segment_->parts[rank]->base())[call % kHeaders];
  }

  std::shared_ptr<Segment> segment_;
  uint64_t latest_ = 0;
  std::array<uint64_t, kHeaders> written_{};  // the identities of the texts in this rank's headers
};

}  // namespace weft
