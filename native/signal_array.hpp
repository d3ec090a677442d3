// Counters for one-sided calls: a row of them on every rank, which anyone may raise, set, test and wait for.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "mesh.hpp"
#include "program.hpp"
#include "segment.hpp"

namespace weft {

// Some counters of a row: `count` of them from `start` on, `step` apart.
struct Selection {
  size_t start, count, step;
};

class SignalArray {
 public:
  // `segment` is zeroed and holds nothing but counters.
  SignalArray(std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> segment, int spins);

  // Add to or set `rank`'s counters, after everything that this thread wrote is visible there. False if a peer has failed.
  bool add(int rank, Selection selection, uint64_t value) { return raise(weft::add, rank, selection, value); }
  bool set(int rank, Selection selection, uint64_t value) { return raise(weft::set, rank, selection, value); }

  // Do all of this rank's counters satisfy the comparison, as seen one after the other?
  bool test(Selection selection, Compare compare, uint64_t value) const;
  bool failed() const { return mesh_->failed(); }
  std::vector<uint64_t> values(Selection selection) const;

  struct Outcome {
    WaitStatus status;  // `left`: all peers have, so nobody can raise a counter any more
    size_t index;     // a counter that does not satisfy the comparison, and what it holds
    uint64_t actual;
  };
  // Hold until one look over this rank's counters finds that all satisfy the comparison. `interrupted` is called now and then.
  Outcome wait(Selection selection, Compare compare, uint64_t expected, int64_t timeout, const std::function<bool()>& interrupted);

 private:
  Counter& counter(int rank, Selection selection, size_t i) const;
  uint64_t value(Selection selection, size_t i) const;  // of this rank's
  bool raise(void (*how)(Counter&, uint64_t), int rank, Selection selection, uint64_t value);
  size_t unsatisfied(Selection selection, Compare compare, uint64_t expected) const;
  bool deserted() const;

  std::shared_ptr<Mesh> mesh_;
  std::shared_ptr<Segment> segment_;
  int spins_;
};

}  // namespace weft
