// What ranks say of their latest calls, where their peers can read it: how all notice that they do not make the same one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "segment.hpp"

namespace weft {

// What hosts compare of a text: FNV-1a of 64 bits, whose value no compiler or library may choose.
uint64_t digest(const std::string& text);

class Calls {
 private:
  struct Header {
    std::atomic<uint64_t> call;
    std::atomic<uint64_t> digest;
    std::atomic<uint64_t> address;
    char text[488];
  };
  static_assert(sizeof(Header) == 512);
  static constexpr size_t kHeaders = 32;  // a rank is never this many calls ahead of a peer that still waits for it

 public:
  static constexpr size_t kBytes = kHeaders * sizeof(Header);  // of a rank's part of the segment, at its beginning

  explicit Calls(std::shared_ptr<Segment> segment) : segment_(std::move(segment)) {}

  // The number of calls that this rank has begun; the latest has it.
  uint64_t latest() const { return latest_; }
  // Begin the next call, and let peers read what it is, and at which address they find what they read through the kernel; its number.
  uint64_t begin(uint64_t digest, const std::string& text, uint64_t address);
  // Write down what a rank says of a call. That of a peer on another host comes by message, and is kept where its header is
  // looked for.
  void note(int rank, uint64_t call, uint64_t digest, const std::string& text, uint64_t address = 0);

  // Has `peer` begun the call of this number, whatever it is?
  bool begun(int peer, uint64_t call) const { return header(peer, call).call.load(std::memory_order_acquire) >= call; }
  // Does `peer` say that it made another call than this rank, whose `call` has this digest?
  bool mismatch(int peer, uint64_t call, uint64_t digest) const;
  // The address that `peer` told with this call.
  uint64_t address(int peer, uint64_t call) const { return header(peer, call).address.load(std::memory_order_relaxed); }
  // The text of the call that `peer` made as this rank made `call`; empty if it has not made it yet.
  std::string text(int peer, uint64_t call) const;

 private:
  Header& header(int rank, uint64_t call) const;

  std::shared_ptr<Segment> segment_;
  uint64_t latest_ = 0;
};

}  // namespace weft
