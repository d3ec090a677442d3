// Copies that run beside the caller: a ring of them, and one thread that works it off in order.
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
  // called now and then by what waits; true ends the wait
  using Interrupted = std::function<bool()>;

  // What the thread copies is shared by `comm_threads`.
  Transfers(std::shared_ptr<Mesh> mesh, int spins, size_t comm_threads = 1)
      : mesh_(std::move(mesh)), spins_(spins), comm_threads_(comm_threads) {}
  ~Transfers() {  // when all that was queued is done
    if (!thread_.joinable()) return;
    finish();
    stopping_.store(true);
    wake(*submitted_);
    thread_.join();
  }

  // Copy now; false, and nothing is copied, if a peer has failed.
  bool copy(const StridedCopy& copy) const {
    if (mesh_->failed()) return false;
    copy.run();
    return true;
  }

  // Queue a copy behind all earlier ones; holds the caller while kOutstanding are under way. Its
  // number, or 0 if interrupted.
  uint64_t submit(StridedCopy copy, const Interrupted& interrupted) {
    std::lock_guard lock(submitting_);
    uint64_t number = submitted_->value.load(std::memory_order_relaxed) + 1;
    if (number > kOutstanding && !wait(number - kOutstanding, kForever, interrupted)) return 0;
    if (!thread_.joinable()) thread_ = std::thread(&Transfers::work, this);
    slot(number).copy = std::move(copy);
    add(*submitted_, 1);
    return number;
  }

  // Are this copy and all before it over?
  bool done(uint64_t number) const {
    return slot(number).done.value.load(std::memory_order_acquire) >= number;
  }
  // Wait until they are; false at the deadline or if interrupted.
  bool wait(uint64_t number, int64_t deadline, const Interrupted& interrupted) {
    return wait_until(slot(number).done, Compare::greater_equal, number, spins_, deadline,
                      interrupted);
  }
  // Was this copy, when its turn came, not made because a peer had failed?
  bool refused(uint64_t number) const { return number >= refused_.load(std::memory_order_acquire); }
  // Wait until everything submitted is over.
  void finish() { wait(submitted_->value.load(std::memory_order_acquire), kForever, nobody); }

 private:
  static constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();
  static constexpr int64_t kForever = std::numeric_limits<int64_t>::max();
  // The thread looks for the next copy for a microsecond or two before it sleeps; longer, and it
  // keeps a core from the caller.
  static constexpr int kLaneSpins = 50;
  // Copies are numbered from 1 and end in order. Number n is in slot n % kOutstanding from when it
  // is submitted until it is done; the copy is the thread's in between and the submitters' else.
  // Each slot says which number was the last done in it, so that whoever waits for a copy is woken
  // by that one and not by those before it.
  struct Slot {
    Counter done;
    std::optional<StridedCopy> copy;
  };
  Slot& slot(uint64_t number) const { return ring_[number % kOutstanding]; }

  void work() {
    set_team_size(comm_threads_);
    for (uint64_t number = 1;; ++number) {
      auto stopping = [&] { return stopping_.load(); };
      if (!wait_until(*submitted_, Compare::greater_equal, number, std::min(spins_, kLaneSpins),
                      kForever, stopping))
        return;
      Slot& next = slot(number);
      if (!made(*next.copy) && refused_.load() == kNever)
        refused_.store(number, std::memory_order_release);
      next.copy.reset();
      set(next.done, number);
    }
  }

  // Copy, unless a peer has failed; what cannot be copied closes the world, since nobody else
  // learns of it.
  bool made(const StridedCopy& next) {
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
  std::atomic<uint64_t> refused_{kNever};  // the first number refused; a failure is for good
  std::atomic<bool> stopping_{false};
  std::mutex submitting_;
  std::thread thread_;
};

}  // namespace weft
