#include "emulated_link.hpp"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>

#include "signals.hpp"

namespace weft {

void EmulatedLink::set(double bytes_per_second, double latency_seconds) {
  seconds_per_byte_ = bytes_per_second > 0 ? 1 / bytes_per_second : 0;
  latency_ = latency_seconds;
  prctl(PR_SET_TIMERSLACK, on() ? 1000 : 0);  // nanoseconds: the caller's own transfers end in time too; 0: as usual
}

void EmulatedLink::carry(int64_t ready, size_t bytes) {
  double seconds = latency_ + seconds_per_byte_ * static_cast<double>(bytes);
  int64_t free = std::max(free_.load(), ready) + static_cast<int64_t>(seconds * 1e9);
  free_.store(free);
  if (free <= now()) return;  // a sleep until then would still give the core away
  timespec until{free / 1'000'000'000, free % 1'000'000'000};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
}

}  // namespace weft
