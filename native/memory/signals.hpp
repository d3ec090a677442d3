// 64-bit counters in shared memory, one per cache line, and waits on them that sleep on a futex.
//
// S1  `add` and `set` publish all earlier writes of their thread: a wait that ends by the new value
//     sees these writes, whatever the processor's order of memory.
// S2  No wake-up is lost. A writer raises the value, then reads `sleepers`; a waiter registers in
//     `sleepers`, then reads the value. All four are sequentially consistent, so at least one of
//     them sees the other.
// S3  A wait that ends because its writer has left reads the value once more: increments before the
//     farewell count.
// S4  A sleeping waiter checks all reasons to end at least once per kSlice. So `wake_all` only
//     makes the end of waits prompt; it may miss a waiter.
// S5  A counter of a plan has one writer, and only grows. Its writer stores `call` before it raises
//     the value, so a waiter that sees the value sees the mark of that call, or of a later one.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "kernels/clock.hpp"

namespace weft {

struct alignas(64) Counter {
  std::atomic<uint64_t> value;
  std::atomic<uint32_t> sleepers;
  // `Execution::mark` of the call in which a counter with one writer was last raised (S5)
  std::atomic<uint64_t> call;
};
static_assert(sizeof(Counter) == 64 && std::atomic<uint64_t>::is_always_lock_free);

// Comparison of a number with the expected one: one bit each for less, equal and greater.
enum class Compare : unsigned {
  less = 1,
  equal = 2,
  less_equal = 3,
  greater = 4,
  not_equal = 5,
  greater_equal = 6
};

// Result of a wait. `lane`: another lane of this rank has ended early. `unreadable`: the kernel
// does not permit reading a peer's memory; `actual` is the number of the error.
enum class WaitStatus : int {
  none,
  timeout,
  failed,
  left,
  mismatch,
  refused,
  interrupted,
  lane,
  unreadable
};

inline bool holds(Compare compare, uint64_t actual, uint64_t expected) {
  return static_cast<unsigned>(compare) & (actual < expected ? 1 : actual == expected ? 2 : 4);
}

// Both publish all earlier writes of this thread (S1), and wake the threads that sleep on the
// counter (S2).
void add(Counter& counter, uint64_t amount);
void set(Counter& counter, uint64_t value);
void wake(Counter& counter);

// Sleep until the counter differs from `seen`, is woken, or `nanoseconds` have passed.
void sleep_on(Counter& counter, uint64_t seen, int64_t nanoseconds);

// A thread of this process that sleeps on a counter: registered so that `wake_all` can wake it at
// once.
class Sleeper {
 public:
  explicit Sleeper(Counter& counter);
  ~Sleeper();
  // Wake all sleepers of this process, so that each checks whether its wait has ended.
  static void wake_all();

 private:
  // a thread that finds no free slot is not woken early (S4)
  static inline std::atomic<Counter*> slots_[256] = {};
  std::atomic<Counter*>* slot_ = nullptr;
  Counter& counter_;
};

// Leave the core to its other hardware thread, and the memory to other cores, for a moment.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  // `yield`, which is meant for this, does nothing on most processors; `isb` takes about as long as
  // a pause of other processors
  asm volatile("isb");
#endif
}

// longest sleep of a waiter between two checks, in nanoseconds (S4)
constexpr int64_t kSlice = 20'000'000;
// How often a wait yields: for about as long as a peer on the same core may need.
// Measured on a 2-core Zen 4 where eight other processes computed, as 4 ranks made all-reduces of
// 8 B to 256 KiB: 20 yields take 0.16 to 0.18 of the time, 100 a third, 1000 0.4 to 2.1 times.
constexpr int kYields = 300;
// Nanoseconds of a yield from which on another thread is keeping the core of a rank that has one of
// its own.
// Measured on a 2-core Zen 4, beside two busy processes: a token of vLLM's Llama takes 32 ms, with
// yields 41 (`make vllm`).
constexpr int64_t kLongYield = 200'000;
// for how many nanoseconds thereafter waits of this thread do not yield: some time slices
constexpr int64_t kBusyCore = 100'000'000;
// The same of ranks that share cores, where a peer may need some of the time.
// Measured on a 2-core Zen 4: beside a busy process all-reduces of 8 B by 4 ranks take 17 us
// instead of 4.0 ms; at 0.2 ms, without one, those of 1 MiB 0.23 ms instead of 0.21 (`weft bench
// all-reduce -n 4 --sizes 8,1M --algorithm one_shot --neighbours 1`).
constexpr int64_t kLongTurn = 1'000'000;
// for how many nanoseconds thereafter they do not yield: ten of those
constexpr int64_t kBusyTurn = 10 * kLongTurn;

// How waits yield: after a yield of `longest` nanoseconds they sleep instead, for `pause`
// nanoseconds. A thread that yields to one that computes gets its core back after the time slice of
// that one, some milliseconds; one that is woken from sleep gets it at once.
struct Yields {
  int64_t longest, pause;
};
constexpr Yields kNoYield{0, 0};

// Threads that spin have cores of their own.
inline Yields yields_after(int spins) {
  return spins ? Yields{kLongYield, kBusyCore} : Yields{kLongTurn, kBusyTurn};
}

// Yield to other threads of this core; false if a wait should rather sleep.
inline bool yield(Yields yields) {
  thread_local int64_t busy_until = 0;
  const int64_t start = now();
  if (!yields.longest || start < busy_until) return false;
  sched_yield();
  const int64_t end = now();
  if (end - start < yields.longest) return true;
  busy_until = end + yields.pause;
  return false;
}

inline bool never() { return false; }

// Nanoseconds for which a wait polls connections to other hosts before it sleeps: with a core of
// its own first without leaving it to others, and in all. Measured on two namespaces of a 2-core
// machine: see docs/performance.md.
constexpr int64_t kPollsAlone = 20'000, kPolls = 1'000'000;

// What moves bytes between this host and others, for threads that wait.
struct Driver {
  virtual ~Driver() = default;
  // Receive and send what can be at once, unless another thread does; whether anything was.
  virtual bool poll() = 0;
  // Let a thread in the background go on, while this one sleeps.
  virtual void nudge() = 0;
};

// Test up to `spins` + 1 times whether `compare` holds.
inline bool spin(const Counter& counter, Compare compare, uint64_t expected, int spins) {
  for (int i = 0; i <= spins; ++i) {
    if (holds(compare, counter.value.load(std::memory_order_acquire), expected)) return true;
    pause();
  }
  return false;
}

// Wait until `compare` holds: spin `spins` times, yield up to kYields times, then sleep. False if
// `interrupted()` returned true or the deadline passed first, or if `gone()` returned true: the
// writer has left (S3).
template <class Interrupted, class Gone>
bool wait_until(Counter& counter, Compare compare, uint64_t expected, int spins, Deadline& deadline,
                Interrupted&& interrupted, Gone&& gone, Yields yields) {
  if (spin(counter, compare, expected, spins)) return true;
  for (int i = 0; i < kYields && !deadline.passed() && yield(yields); ++i)
    if (holds(compare, counter.value.load(std::memory_order_acquire), expected)) return true;
  Sleeper sleeper(counter);
  while (true) {
    uint64_t seen = counter.value.load(std::memory_order_seq_cst);  // S2: after `sleepers`
    if (holds(compare, seen, expected)) return true;
    if (interrupted()) return false;
    if (gone())  // S3
      return holds(compare, counter.value.load(std::memory_order_seq_cst), expected);
    const int64_t left = deadline.left();
    if (left <= 0) return false;
    sleep_on(counter, seen, left < kSlice ? left : kSlice);
  }
}

template <class Interrupted, class Gone = bool (*)()>
bool wait_until(Counter& counter, Compare compare, uint64_t expected, int spins, Deadline& deadline,
                Interrupted&& interrupted, Gone&& gone = never) {
  return wait_until(counter, compare, expected, spins, deadline, interrupted, gone,
                    yields_after(spins));
}

}  // namespace weft
