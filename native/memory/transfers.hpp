// Asynchronous copies: a ring of them, and one thread that executes them in order, concurrently
// with the caller.
//
// Q1  Copies are numbered from 1 and executed in this order.
// Q2  Copy n is in slot n % kOutstanding from its submission until it is done. In between the slot
//     belongs to the transfers thread, otherwise to submitters.
// Q3  A slot's `done` is the number of the last copy done in it: a waiting thread is woken by its
//     own copy and not by earlier ones.
// Q4  After a copy was refused, all later ones are.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "memory/mesh.hpp"
#include "kernels/strided.hpp"
#include "kernels/team.hpp"

namespace weft {

class Transfers {
 public:
  static constexpr size_t kOutstanding = 1024;
  // called from time to time by waits; true ends the wait
  using Interrupted = std::function<bool()>;

  // `comm_threads` threads divide each queued copy.
  Transfers(std::shared_ptr<Mesh> mesh, int spins, size_t comm_threads = 1)
      : mesh_(std::move(mesh)), spins_(spins), comm_threads_(comm_threads) {}
  ~Transfers() {  // executes all queued copies first
    if (!thread_.joinable()) return;
    finish();
    stopping_.store(true);
    wake(*submitted_);
    thread_.join();
  }

  // Copy on the calling thread; false, and nothing is copied, if a peer has failed.
  bool copy(const StridedCopy& copy) const {
    if (mesh_->failed()) return false;
    copy.run();
    return true;
  }

  // Queue a copy behind all earlier ones; blocks the caller while kOutstanding are outstanding.
  // Returns its number, or 0 if interrupted.
  uint64_t submit(StridedCopy copy, const Interrupted& interrupted) {
    std::lock_guard lock(submitting_);
    uint64_t number = submitted_->value.load(std::memory_order_relaxed) + 1;
    if (number > kOutstanding && !wait(number - kOutstanding, Deadline(kForever), interrupted))
      return 0;  // Q2
    if (!thread_.joinable()) thread_ = std::thread(&Transfers::work, this);
    slot(number).copy = std::move(copy);
    add(*submitted_, 1);  // Q2: the slot is the thread's from here
    return number;
  }

  // Whether this copy and all earlier ones are done.
  bool done(uint64_t number) const {
    return slot(number).done.value.load(std::memory_order_acquire) >= number;
  }
  // Wait until they are done; false at the deadline or if interrupted.
  bool wait(uint64_t number, Deadline deadline, const Interrupted& interrupted) {
    return wait_until(slot(number).done, Compare::greater_equal, number, spins_, deadline,
                      interrupted);
  }
  // Whether this copy was not executed because a peer had failed.
  bool refused(uint64_t number) const { return number >= refused_.load(std::memory_order_acquire); }
  // Wait until all submitted copies are done.
  void finish() {
    wait(submitted_->value.load(std::memory_order_acquire), Deadline(kForever), never);
  }

 private:
  static constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();
  static constexpr int64_t kForever = std::numeric_limits<int64_t>::max() / 2;  // nanoseconds
  // The thread spins for a microsecond or two before it sleeps; longer would occupy a core that the
  // caller may need.
  // Measured on a 2-core Zen 4: without, eight puts of 32 bytes under way take 1.38 times as long.
  static constexpr int kLaneSpins = 50;
  struct Slot {
    Counter done;  // Q3
    std::optional<StridedCopy> copy;
  };
  Slot& slot(uint64_t number) const { return ring_[number % kOutstanding]; }

  void work() {
    set_team_size(comm_threads_);
    for (uint64_t number = 1;; ++number) {
      auto stopping = [&] { return stopping_.load(); };
      Deadline never_ends(kForever);
      if (!wait_until(*submitted_, Compare::greater_equal, number, std::min(spins_, kLaneSpins),
                      never_ends, stopping))
        return;
      Slot& next = slot(number);
      if (!execute(*next.copy) && refused_.load() == kNever)
        refused_.store(number, std::memory_order_release);
      next.copy.reset();
      set(next.done, number);  // Q3; Q2: the slot is the submitters' from here
    }
  }

  // Copy, unless a peer has failed. An exception closes the world, since no caller is there to
  // receive it.
  bool execute(const StridedCopy& next) {
    try {
      return copy(next);
    } catch (const std::exception& error) {
      mesh_->abort(error);
      return false;
    }
  }

  std::shared_ptr<Mesh> mesh_;
  int spins_;
  size_t comm_threads_;
  std::unique_ptr<Slot[]> ring_ = std::make_unique<Slot[]>(kOutstanding);
  std::unique_ptr<Counter> submitted_ = std::make_unique<Counter>();
  std::atomic<uint64_t> refused_{kNever};  // the first number refused (Q4)
  std::atomic<bool> stopping_{false};
  std::mutex submitting_;
  std::thread thread_;
};

}  // namespace weft
