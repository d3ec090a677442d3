// Counters for one-sided calls: an array on every rank. Every rank may add to them and set them;
// their own rank tests them and waits for them.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "memory/mesh.hpp"
#include "memory/segment.hpp"
#include "memory/signals.hpp"

namespace weft {

// Counters of an array: `count` of them from `start` on, with step `step`.
struct Selection {
  size_t start, count, step;

  size_t operator[](size_t i) const { return start + i * step; }
};

class SignalArray {
 public:
  // `segment` is zeroed and contains only counters; `driver` moves what peers on other hosts
  // change, null if there are none.
  SignalArray(std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> segment, int spins,
              std::shared_ptr<Driver> driver)
      : mesh_(std::move(mesh)),
        segment_(std::move(segment)),
        spins_(spins),
        driver_(std::move(driver)) {}

  // Add to or set `rank`'s counters, after all earlier writes of this thread are visible there.
  // False if a peer has failed.
  bool add(int rank, Selection selection, uint64_t value) {
    return raise(weft::add, rank, selection, value);
  }
  bool set(int rank, Selection selection, uint64_t value) {
    return raise(weft::set, rank, selection, value);
  }

  // Whether all of this rank's selected counters satisfy the comparison, read one after the other.
  bool test(Selection selection, Compare compare, uint64_t expected) const {
    return unsatisfied(selection, compare, expected) == selection.count;
  }
  bool failed() const { return mesh_->failed(); }
  const Segment& segment() const { return *segment_; }
  std::vector<uint64_t> values(Selection selection) const {
    std::vector<uint64_t> all;
    for (size_t i = 0; i < selection.count; ++i) all.push_back(value(selection[i]));
    return all;
  }

  struct Outcome {
    WaitStatus status;  // `left`: all peers have left, so no rank can raise a counter any more
    size_t index;       // a counter that does not satisfy the comparison
    uint64_t actual;    // its value
  };
  // Block until one pass over this rank's counters finds that all satisfy the comparison.
  // `interrupted` is called from time to time.
  Outcome wait(Selection selection, Compare compare, uint64_t expected, int64_t timeout,
               const std::function<bool()>& interrupted) {
    if (driver_ && drive_until(selection, compare, expected)) return {WaitStatus::none, 0, 0};
    Deadline deadline(timeout);
    WaitStatus status = WaitStatus::timeout;
    auto is = [&](bool condition, WaitStatus found) { return condition && (status = found, true); };
    auto ended = [&] {
      return is(interrupted(), WaitStatus::interrupted) || is(failed(), WaitStatus::failed);
    };
    auto gone = [&] { return is(all_left(), WaitStatus::left); };
    auto stopped = [&](size_t i) -> Outcome { return {status, selection[i], value(selection[i])}; };
    while (true) {
      for (size_t i = 0; i < selection.count; ++i)
        if (Counter& own = counter(segment_->rank, selection[i]);
            !wait_until(own, compare, expected, spins_, deadline, ended, gone))
          return stopped(i);
      size_t i = selection.count > 1 ? unsatisfied(selection, compare, expected) : selection.count;
      if (i == selection.count) return {WaitStatus::none, 0, 0};
      // counters that satisfy the comparison only for a moment must not keep this loop running
      if (deadline.passed() || ended()) return stopped(i);
      if (gone() && (i = unsatisfied(selection, compare, expected)) < selection.count)
        return stopped(i);
    }
  }

 private:
  Counter& counter(int rank, size_t index) const {
    return reinterpret_cast<Counter*>(segment_->parts[rank]->base())[index];
  }
  uint64_t value(size_t index) const {
    return counter(segment_->rank, index).value.load(std::memory_order_acquire);
  }

  bool raise(void (*change)(Counter&, uint64_t), int rank, Selection selection, uint64_t value) {
    if (failed()) return false;
    for (size_t i = 0; i < selection.count; ++i) change(counter(rank, selection[i]), value);
    return true;
  }

  // Receive from other hosts for a while; whether all counters satisfy the comparison meanwhile.
  bool drive_until(Selection selection, Compare compare, uint64_t expected) const {
    const Yields yields = yields_after(spins_);
    const int64_t start = now();
    do {
      driver_->poll();
      if (test(selection, compare, expected)) return true;
      pause();
    } while (now() - start < (spins_ ? kPollsAlone : 0) ||
             (now() - start < kPolls && yield(yields)));
    driver_->nudge();
    return false;
  }

  // Index of the first counter that does not satisfy the comparison, `count` if all do.
  size_t unsatisfied(Selection selection, Compare compare, uint64_t expected) const {
    size_t i = 0;
    while (i < selection.count && holds(compare, value(selection[i]), expected)) ++i;
    return i;
  }

  bool all_left() const {
    int ranks = static_cast<int>(segment_->parts.size());
    for (int peer = 0; peer < ranks; ++peer)
      if (peer != segment_->rank && !mesh_->left(peer)) return false;
    return ranks > 1;
  }

  std::shared_ptr<Mesh> mesh_;
  std::shared_ptr<Segment> segment_;
  int spins_;
  std::shared_ptr<Driver> driver_;
};

}  // namespace weft
