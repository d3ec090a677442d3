// Calls that are issued for later, and when the thread should carry them out that does so if nobody
// else comes.
#pragma once

#include <atomic>

#include "memory/signals.hpp"

namespace weft {

// Who issues a call mostly waits for it soon, and carries it out then. To wake a thread for each
// would take several times as long as a small call does; so the thread looks around by itself as
// long as there are calls, and for that it needs nothing that they need.
class Backlog {
 public:
  void issue() {
    const uint64_t issued = issued_.fetch_add(1, std::memory_order_seq_cst) + 1;
    if (issued != begun_.load(std::memory_order_seq_cst) &&
        resting_.load(std::memory_order_seq_cst))
      ring();
  }
  void begin() { begun_.fetch_add(1, std::memory_order_seq_cst); }
  // Do not wait whether somebody comes for what is issued.
  void hurry() {
    pressing_.store(true, std::memory_order_seq_cst);
    ring();
  }
  void close() {
    closed_.store(true, std::memory_order_seq_cst);
    ring();
  }

  // Hold until something is issued that nobody has begun for a while, or should not wait; false
  // once closed.
  bool due() {
    constexpr uint64_t kNone = ~uint64_t{0};
    uint64_t waiting = kNone;  // the first call that was not begun at the last look
    int idle = 0;
    while (!closed_.load(std::memory_order_seq_cst)) {
      const uint64_t rings = bell_.value.load(std::memory_order_seq_cst);
      const bool pressing = pressing_.exchange(false, std::memory_order_seq_cst);
      const uint64_t begun = begun_.load(std::memory_order_seq_cst);
      const bool open = issued_.load(std::memory_order_seq_cst) != begun;
      if (open && (pressing || waiting == begun)) return true;
      waiting = open ? begun : kNone;
      idle = open || begun != last_ ? 0 : idle + 1;
      last_ = begun;
      if (idle < kIdle)
        sleep_on(bell_, rings, kPatience);
      else
        rest(rings);
    }
    return false;
  }

 private:
  // What waits for a large call mostly comes later than this, what waits for a small one earlier,
  // also where eager DTensors take their time in between.
  static constexpr int64_t kPatience = 500'000;  // nanoseconds
  // looks without a call, after which it rests until there is one
  static constexpr int kIdle = 4;

  void ring() {
    bell_.value.fetch_add(1, std::memory_order_seq_cst);
    wake(bell_);
  }

  // Either this sees what is issued, or its issuer that this rests.
  void rest(uint64_t rings) {
    resting_.store(true, std::memory_order_seq_cst);
    if (issued_.load(std::memory_order_seq_cst) == begun_.load(std::memory_order_seq_cst))
      sleep_on(bell_, rings, kSlice * 50);
    resting_.store(false, std::memory_order_seq_cst);
  }

  std::atomic<uint64_t> issued_{0}, begun_{0};
  std::atomic<bool> resting_{false}, pressing_{false}, closed_{false};
  Counter bell_{};
  uint64_t last_ = 0;  // how many calls were begun at the last look
};

}  // namespace weft
