// The clock of all time limits and traces, in nanoseconds, the date, and the processor's counter of
// cycles.
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

// The date, in nanoseconds since 1970, as of the latest timer tick, at most 10 ms ago: it takes a
// few nanoseconds to read.
inline int64_t date() {
  timespec t;
  clock_gettime(CLOCK_REALTIME_COARSE, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

// Ticks of the counter that programs may read, at its own constant rate: the time-stamp counter of
// x86-64, the virtual counter of 64-bit Arm; 0 elsewhere.
inline uint64_t cycles() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t ticks;
  asm volatile("isb\n\tmrs %0, cntvct_el0" : "=r"(ticks)::"memory");  // not before earlier work
  return ticks;
#else
  return 0;
#endif
}

constexpr double kLongestWait = 1e6;  // seconds; longer time limits are shortened to this
inline int64_t nanoseconds(double seconds) {
  return static_cast<int64_t>((seconds < kLongestWait ? seconds : kLongestWait) * 1e9);
}

}  // namespace weft
