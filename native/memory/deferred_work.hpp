// Counts of issued and started calls of a deferred-work queue, by which its progress thread decides
// when to execute calls itself.
//
// D1  No issued call is forgotten. `issue` raises `issued_`, then reads `resting_`; `rest` sets
//     `resting_`, then reads `issued_`. All four are sequentially consistent, so at least one of
//     the threads sees the other.
// D2  `started_` may be ahead of `issued_` for a moment, since a call may end before its issue is
//     counted. So the counts are compared for equality only.
#pragma once

#include <atomic>

#include "memory/signals.hpp"

namespace weft {

// A thread that issues a call usually waits for it soon, and executes it then. Waking the progress
// thread for each call would take several times as long as a small call. So the progress thread
// checks at intervals while there are calls, and needs no lock of the threads that execute them.
class DeferredWork {
 public:
  void issue() {
    const uint64_t issued = issued_.fetch_add(1, std::memory_order_seq_cst) + 1;
    if (issued != started_.load(std::memory_order_seq_cst) &&
        resting_.load(std::memory_order_seq_cst))
      ring();
  }
  void begin() { started_.fetch_add(1, std::memory_order_seq_cst); }
  // Make issued calls due at once: no thread is about to wait for them.
  void hurry() {
    hurried_.store(true, std::memory_order_seq_cst);
    ring();
  }
  void close() {
    closed_.store(true, std::memory_order_seq_cst);
    ring();
  }

  // Block until an issued call has not been started for a while, or `hurry` is called; false once
  // closed.
  bool due() {
    constexpr uint64_t kNone = ~uint64_t{0};
    uint64_t waiting = kNone;  // the first call that was not started at the last check
    int idle = 0;
    while (!closed_.load(std::memory_order_seq_cst)) {
      const uint64_t rings = doorbell_.value.load(std::memory_order_seq_cst);
      const bool hurried = hurried_.exchange(false, std::memory_order_seq_cst);
      const uint64_t started = started_.load(std::memory_order_seq_cst);
      const bool open = issued_.load(std::memory_order_seq_cst) != started;
      if (open && (hurried || waiting == started)) return true;
      waiting = open ? started : kNone;
      idle = open || started != last_ ? 0 : idle + 1;
      last_ = started;
      if (idle < kIdle)
        sleep_on(doorbell_, rings, kPatience);
      else
        rest(rings);
    }
    return false;
  }

 private:
  // Nanoseconds between checks. Waits for small calls usually begin earlier, also with the overhead
  // of eager DTensors in between; waits for large calls later.
  // Measured on a 2-core Zen 4: an asynchronous collective of 32 KiB takes 21 to 46 us instead of
  // 57 to 125 (`python examples/torch_distributed.py --length 8`).
  static constexpr int64_t kPatience = 500'000;
  // number of checks without a call, after which the thread sleeps until there is one: a program
  // that makes one every 2 ms never wakes it
  static constexpr int kIdle = 4;

  void ring() {
    doorbell_.value.fetch_add(1, std::memory_order_seq_cst);
    wake(doorbell_);
  }

  // Sleep until a call is issued (D1).
  void rest(uint64_t rings) {
    resting_.store(true, std::memory_order_seq_cst);
    if (issued_.load(std::memory_order_seq_cst) == started_.load(std::memory_order_seq_cst))
      sleep_on(doorbell_, rings, kSlice * 50);
    resting_.store(false, std::memory_order_seq_cst);
  }

  std::atomic<uint64_t> issued_{0}, started_{0};
  std::atomic<bool> resting_{false}, hurried_{false}, closed_{false};
  Counter doorbell_{};
  uint64_t last_ = 0;  // number of started calls at the last check
};

}  // namespace weft
