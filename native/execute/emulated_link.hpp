// An emulated link between a rank and its peers, to show on one host the effect of a slower
// network.
#pragma once

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <atomic>

#include "kernels/clock.hpp"

namespace weft {

// Transfers over the link take at least a given time, one after the other. A thread that is ready
// in time uses it without a gap, as if its transfers were queued, so that a late wake-up of the
// thread costs the link nothing.
class EmulatedLink {
 public:
  // 0 bytes per second ends the emulation.
  void set(double bytes_per_second, double latency_seconds) {
    seconds_per_byte_ = bytes_per_second > 0 ? 1 / bytes_per_second : 0;
    latency_ = latency_seconds;
    // so that the caller's own transfers end in time too; 0 is the default
    prctl(PR_SET_TIMERSLACK, on() ? kTimerSlack : 0);
  }
  bool on() const { return seconds_per_byte_ > 0; }
  // Block the caller until the link has transferred `bytes` bytes that were ready at time `ready`.
  void transfer(int64_t ready, size_t bytes) {
    const double seconds = latency_.load() + seconds_per_byte_.load() * static_cast<double>(bytes);
    int64_t free = std::max(free_.load(), ready) + nanoseconds(seconds);
    free_.store(free);
    if (free <= now()) return;  // even a sleep of no time would give up the core
    timespec until{free / 1'000'000'000, free % 1'000'000'000};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
  }

 private:
  std::atomic<double> seconds_per_byte_{0}, latency_{0};  // read by lanes while `set` changes them
  std::atomic<int64_t> free_{0};  // time at which the link has transferred all earlier bytes
};

}  // namespace weft
