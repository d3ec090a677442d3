// The clock of all time limits and traces, in nanoseconds, the date, and the processor's counter of
// cycles.
#pragma once

#include <time.h>

#include <cstdint>

namespace weft {

// Nanoseconds by which a sleep of a thread may end too late, less than it takes to wake up; the
// kernel's default is 50 us.
constexpr int kTimerSlack = 1000;

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

// The end of a time limit, which counts only time in which this process runs: whoever waits looks
// at it many times a second, so after a longer gap the process was stopped, as whole jobs are by
// schedulers and containers, and its peers with it.
class Deadline {
 public:
  explicit Deadline(int64_t nanoseconds) : looked_(now()), end_(looked_ + nanoseconds) {}
  // Nanoseconds that are left.
  int64_t left() {
    const int64_t time = now();
    if (time - looked_ > kStopped) end_ += time - looked_;
    looked_ = time;
    return end_ - time;
  }
  bool passed() { return left() <= 0; }

 private:
  static constexpr int64_t kStopped = 1'000'000'000;
  int64_t looked_, end_;
};

constexpr double kLongestWait = 1e6;  // seconds; longer time limits are shortened to this
inline int64_t nanoseconds(double seconds) {
  return static_cast<int64_t>((seconds < kLongestWait ? seconds : kLongestWait) * 1e9);
}

}  // namespace weft
