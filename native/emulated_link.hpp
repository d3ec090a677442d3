// An emulated link between a rank and its peers, to see on one host what a slower network would do.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace weft {

// Transfers over it take at least a given time, one after the other. Whoever is not held up feeds it without a gap, as if its
// transfers were queued, so that a late wake-up of a thread costs the link nothing.
class EmulatedLink {
 public:
  // 0 bytes a second ends the emulation.
  void set(double bytes_per_second, double latency_seconds);
  bool on() const { return seconds_per_byte_ > 0; }
  // Hold the caller until the link has carried so many bytes, which were ready for it at a time of `now()`.
  void carry(int64_t ready, size_t bytes);

 private:
  double seconds_per_byte_ = 0, latency_ = 0;
  std::atomic<int64_t> free_{0};  // when the link has carried all it was given
};

}  // namespace weft
