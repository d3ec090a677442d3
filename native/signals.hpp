// 64-bit counters in shared memory, one per cache line, and waits on them that sleep on a futex.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

namespace weft {

struct alignas(64) Counter {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint64_t> call;  // of a counter that one rank raises: in which call it last did, as `Execution::mark` has it
};
static_assert(sizeof(Counter) == 64 && std::atomic<uint64_t>::is_always_lock_free);

enum class Compare : int { equal, not_equal, greater, greater_equal, less, less_equal };

bool holds(Compare compare, uint64_t actual, uint64_t expected);

// Both publish everything that this thread wrote before, and wake whoever sleeps on the counter.
void add(Counter& counter, uint64_t amount);
void set(Counter& counter, uint64_t value);
void wake(Counter& counter);

// Sleep until the counter no longer holds `seen`, is woken, or `nanoseconds` have passed.
void sleep_on(Counter& counter, uint64_t seen, int64_t nanoseconds);

// The counters that threads of this process sleep on, so that bad news can wake them at once.
class Sleepers {
 public:
  class Entry {
   public:
    Entry(Sleepers& owner, Counter& counter);
    ~Entry();

   private:
    std::atomic<Counter*>* slot_ = nullptr;
    Counter& counter_;
  };
  void wake_all();

 private:
  static constexpr int kSlots = 64;  // further threads still wake, after one slice of their sleep
  std::atomic<Counter*> slots_[kSlots] = {};
};

// Leave the core to its other thread and the memory to others for a moment.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield`, made for this, does nothing on most processors; this takes about as long as a pause elsewhere
#endif
}

int64_t now();  // nanoseconds of CLOCK_MONOTONIC, which is common to all processes of a host
inline int64_t nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

constexpr int64_t kSlice = 20'000'000;  // a sleeper looks around at least this often, in nanoseconds

// How long a wait tries before it sleeps.
struct SpinPolicy {
  int spins;
  int yields;
};

constexpr int kYields = 300;  // about as long as a peer that shares this core may need

inline SpinPolicy usual(int spins) { return {spins, kYields}; }

// Of a lane that waits for its own rank's products, which work on the core that it needs. To give way would be to wait until their
// time slice is over, some milliseconds; who is woken from sleep gets the core at once.
inline SpinPolicy beside_products(int spins) { return {spins, 0}; }

inline bool nobody() { return false; }

// Try so often whether `compare` holds.
inline bool spin(const Counter& counter, Compare compare, uint64_t expected, int spins) {
  for (int i = 0; i <= spins; ++i) {
    if (holds(compare, counter.value.load(std::memory_order_acquire), expected)) return true;
    pause();
  }
  return false;
}

// Wait until `compare` holds: spin, then give way to whoever may share the core, then sleep. False if `interrupted()` returned true
// or the deadline passed first, or if `gone()` did: whoever raises the counter will not any more, but what they raised before counts.
template <class Interrupted, class Gone = bool (*)()>
bool wait_until(Counter& counter, Compare compare, uint64_t expected, SpinPolicy policy, int64_t deadline, Sleepers& sleepers,
                Interrupted&& interrupted, Gone&& gone = nobody) {
  if (spin(counter, compare, expected, policy.spins)) return true;
  for (int i = 0; i < policy.yields && now() < deadline; ++i) {
    if (holds(compare, counter.value.load(std::memory_order_acquire), expected)) return true;
    sched_yield();
  }
  Sleepers::Entry entry(sleepers, counter);
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
