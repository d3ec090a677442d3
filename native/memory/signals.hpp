// 64-bit counters in shared memory, one per cache line, and waits on them that sleep on a futex.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "kernels/clock.hpp"

namespace weft {

struct alignas(64) Counter {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> sleepers;
  // of a counter that one rank raises: in which call it last did, as `Execution::mark` has it
  std::atomic<uint64_t> call;
};
static_assert(sizeof(Counter) == 64 && std::atomic<uint64_t>::is_always_lock_free);

// What a number may be beside the one that is expected: less, equal and greater are a bit each.
enum class Compare : unsigned {
  less = 1,
  equal = 2,
  less_equal = 3,
  greater = 4,
  not_equal = 5,
  greater_equal = 6
};

// How a wait ended. `lane`: another lane of this rank ended. `unread`: the kernel does not hand out
// a peer's memory; `actual` is the error's number.
enum class WaitStatus : int { none, timeout, failed, left, mismatch, interrupted, lane, unread };

inline bool holds(Compare compare, uint64_t actual, uint64_t expected) {
  return static_cast<unsigned>(compare) & (actual < expected ? 1 : actual == expected ? 2 : 4);
}

// Both publish everything that this thread wrote before, and wake whoever sleeps on the counter.
void add(Counter& counter, uint64_t amount);
void set(Counter& counter, uint64_t value);
void wake(Counter& counter);

// Sleep until the counter no longer holds `seen`, is woken, or `nanoseconds` have passed.
void sleep_on(Counter& counter, uint64_t seen, int64_t nanoseconds);

// A thread of this process that sleeps on a counter, so that bad news can wake it at once.
class Sleeper {
 public:
  explicit Sleeper(Counter& counter);
  ~Sleeper();
  static void wake_all();  // of this process; those whom the news does not concern go on sleeping

 private:
  // further threads still wake, after one slice of their sleep
  static inline std::atomic<Counter*> slots_[256] = {};
  std::atomic<Counter*>* slot_ = nullptr;
  Counter& counter_;
};

// Leave the core to its other thread and the memory to others for a moment.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  // `yield`, made for this, does nothing on most processors; this takes about as long as a pause
  // elsewhere
  asm volatile("isb");
#endif
}

// a sleeper looks around at least this often, in nanoseconds
constexpr int64_t kSlice = 20'000'000;
// how often a wait gives way: about as long as a peer that shares this core may need
constexpr int kYields = 300;

inline bool nobody() { return false; }

// Try so often whether `compare` holds.
inline bool spin(const Counter& counter, Compare compare, uint64_t expected, int spins) {
  for (int i = 0; i <= spins; ++i) {
    if (holds(compare, counter.value.load(std::memory_order_acquire), expected)) return true;
    pause();
  }
  return false;
}

// Wait until `compare` holds: spin, then give way to whoever may share the core, both so often,
// then sleep. False if `interrupted()` returned true or the deadline passed first, or if `gone()`
// did: whoever raises the counter will not any more, but what they raised before counts.
template <class Interrupted, class Gone = bool (*)()>
bool wait_until(Counter& counter, Compare compare, uint64_t expected, int spins, int64_t deadline,
                Interrupted&& interrupted, Gone&& gone = nobody, int yields = kYields) {
  if (spin(counter, compare, expected, spins)) return true;
  for (int i = 0; i < yields && now() < deadline; ++i) {
    if (holds(compare, counter.value.load(std::memory_order_acquire), expected)) return true;
    sched_yield();
  }
  Sleeper sleeper(counter);
  while (true) {
    uint64_t seen = counter.value.load(std::memory_order_seq_cst);
    if (holds(compare, seen, expected)) return true;
    if (interrupted()) return false;
    if (gone()) return holds(compare, counter.value.load(std::memory_order_seq_cst), expected);
    int64_t left = deadline - now();
    if (left <= 0) return false;
    sleep_on(counter, seen, left < kSlice ? left : kSlice);
  }
}

}  // namespace weft
