#include "memory/signals.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace weft {

namespace {
// A futex has 32 bits: here the low half of the value, which changes with every increment.
uint32_t* futex_word(Counter& counter) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
                "the low half of a counter must come first");
  return reinterpret_cast<uint32_t*>(&counter.value);
}
}  // namespace

void add(Counter& counter, uint64_t amount) {
  counter.value.fetch_add(amount, std::memory_order_seq_cst);           // S1
  if (counter.sleepers.load(std::memory_order_seq_cst)) wake(counter);  // S2
}

void set(Counter& counter, uint64_t value) {
  counter.value.store(value, std::memory_order_seq_cst);                // S1
  if (counter.sleepers.load(std::memory_order_seq_cst)) wake(counter);  // S2
}

void wake(Counter& counter) {
  syscall(SYS_futex, futex_word(counter), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void sleep_on(Counter& counter, uint64_t seen, int64_t nanoseconds) {
  timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  syscall(SYS_futex, futex_word(counter), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr,
          0);
}

Sleeper::Sleeper(Counter& counter) : counter_(counter) {
  counter.sleepers.fetch_add(1, std::memory_order_seq_cst);  // S2
  for (auto& slot : slots_) {
    Counter* empty = nullptr;
    if (slot.compare_exchange_strong(empty, &counter)) {
      slot_ = &slot;
      return;
    }
  }
}

Sleeper::~Sleeper() {
  if (slot_) slot_->store(nullptr);
  counter_.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void Sleeper::wake_all() {
  for (auto& slot : slots_)
    if (Counter* counter = slot.load()) wake(*counter);
}

}  // namespace weft
