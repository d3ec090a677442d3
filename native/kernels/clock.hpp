// The clock of all time limits and traces, in nanoseconds.
#pragma once

#include <time.h>

#include <cstdint>

namespace weft {

// CLOCK_MONOTONIC, which is common to all processes of a host.
inline int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

constexpr double kLongestWait = 1e6;  // seconds; longer time limits are shortened to this
inline int64_t nanoseconds(double seconds) {
  return static_cast<int64_t>((seconds < kLongestWait ? seconds : kLongestWait) * 1e9);
}

}  // namespace weft
