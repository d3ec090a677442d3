// An emulated link between a rank and its peers, to see on one host what a slower network would do.
#pragma once

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <atomic>

#include "kernels/clock.hpp"

namespace weft {

// Transfers over it take at least a given time, one after the other. Whoever is not held up feeds
// it without a gap, as if its transfers were queued, so that a late wake-up of a thread costs the
// link nothing.
class EmulatedLink {
 public:
  // 0 bytes a second ends the emulation.
  void set(double bytes_per_second, double latency_seconds) {
    seconds_per_byte_ = bytes_per_second > 0 ? 1 / bytes_per_second : 0;
    latency_ = latency_seconds;
    // nanoseconds: the caller's own transfers end in time too; 0: as usual
    prctl(PR_SET_TIMERSLACK, on() ? 1000 : 0);
  }
  bool on() const { return seconds_per_byte_ > 0; }
  // Hold the caller until the link has carried so many bytes, which were ready for it at a time of
  // `now()`.
  void carry(int64_t ready, size_t bytes) {
    const double seconds = latency_.load() + seconds_per_byte_.load() * static_cast<double>(bytes);
    int64_t free = std::max(free_.load(), ready) + nanoseconds(seconds);
    free_.store(free);
    if (free <= now()) return;  // a sleep until then would still give the core away
    timespec until{free / 1'000'000'000, free % 1'000'000'000};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
  }

 private:
  std::atomic<double> seconds_per_byte_{0}, latency_{0};  // which lanes read meanwhile
  std::atomic<int64_t> free_{0};  // when the link has carried all it was given
};

}  // namespace weft
