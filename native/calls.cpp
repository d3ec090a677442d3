#include "calls.hpp"

#include <algorithm>
#include <cstring>

namespace weft {

uint64_t digest(const std::string& text) {
  uint64_t value = 0xcbf29ce484222325;
  for (unsigned char byte : text) value = (value ^ byte) * 0x100000001b3;
  return value;
}

Calls::Header& Calls::header(int rank, uint64_t call) const {
  return reinterpret_cast<Header*>(segment_->parts[rank]->base())[call % kHeaders];
}

uint64_t Calls::begin(uint64_t digest, const std::string& text, uint64_t address) {
  note(segment_->rank, ++latest_, digest, text, address);
  return latest_;
}

void Calls::note(int rank, uint64_t call, uint64_t digest, const std::string& text, uint64_t address) {
  Header& said = header(rank, call);
  said.address.store(address, std::memory_order_relaxed);
  if (said.digest.load(std::memory_order_relaxed) == digest) return said.call.store(call, std::memory_order_release);  // the same text
  said.call.store(0, std::memory_order_relaxed);  // not to be read while it is written
  said.digest.store(digest, std::memory_order_release);  // who reads it sees that the call before is gone
  size_t length = std::min(text.size(), sizeof said.text - 1);
  while (length < text.size() && length && (text[length] & 0xc0) == 0x80) --length;  // no half characters
  std::memcpy(said.text, text.data(), length);
  said.text[length] = 0;
  said.call.store(call, std::memory_order_release);
}

bool Calls::mismatch(int peer, uint64_t call, uint64_t digest) const {
  const Header& theirs = header(peer, call);
  if (theirs.call.load(std::memory_order_acquire) != call) return false;
  bool same = theirs.digest.load(std::memory_order_acquire) == digest;
  return !same && theirs.call.load(std::memory_order_relaxed) == call;  // and not overwritten meanwhile
}

std::string Calls::text(int peer, uint64_t call) const {
  const Header& theirs = header(peer, call);
  return theirs.call.load(std::memory_order_acquire) == call ? theirs.text : "";
}

}  // namespace weft
