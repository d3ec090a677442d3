#include "signal_array.hpp"

namespace weft {

SignalArray::SignalArray(std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> segment, int spins)
    : mesh_(std::move(mesh)), segment_(std::move(segment)), spins_(spins) {}

Counter& SignalArray::counter(int rank, Selection selection, size_t i) const {
  return reinterpret_cast<Counter*>(segment_->parts[rank]->base())[selection.start + i * selection.step];
}

uint64_t SignalArray::value(Selection selection, size_t i) const {
  return counter(segment_->rank, selection, i).value.load(std::memory_order_acquire);
}

bool SignalArray::raise(void (*how)(Counter&, uint64_t), int rank, Selection selection, uint64_t value) {
  if (failed()) return false;
  for (size_t i = 0; i < selection.count; ++i) how(counter(rank, selection, i), value);
  return true;
}

// The first that does not satisfy the comparison, `count` if all do.
size_t SignalArray::unsatisfied(Selection selection, Compare compare, uint64_t expected) const {
  size_t i = 0;
  while (i < selection.count && holds(compare, value(selection, i), expected)) ++i;
  return i;
}

bool SignalArray::test(Selection selection, Compare compare, uint64_t value) const {
  return unsatisfied(selection, compare, value) == selection.count;
}

std::vector<uint64_t> SignalArray::values(Selection selection) const {
  std::vector<uint64_t> all;
  for (size_t i = 0; i < selection.count; ++i) all.push_back(value(selection, i));
  return all;
}

bool SignalArray::deserted() const {
  int ranks = static_cast<int>(segment_->parts.size());
  for (int peer = 0; peer < ranks; ++peer)
    if (peer != segment_->rank && !mesh_->left(peer)) return false;
  return ranks > 1;
}

SignalArray::Outcome SignalArray::wait(Selection selection, Compare compare, uint64_t expected, int64_t timeout,
                                       const std::function<bool()>& interrupted) {
  int64_t deadline = now() + timeout;
  WaitStatus status = WaitStatus::timeout;
  auto is = [&](bool condition, WaitStatus what) { return condition && (status = what, true); };
  auto ended = [&] { return is(interrupted(), WaitStatus::interrupted) || is(failed(), WaitStatus::failed); };
  auto gone = [&] { return is(deserted(), WaitStatus::left); };
  auto stopped = [&](size_t i) -> Outcome { return {status, selection.start + i * selection.step, value(selection, i)}; };
  while (true) {
    for (size_t i = 0; i < selection.count; ++i)
      if (Counter& own = counter(segment_->rank, selection, i);
          !wait_until(own, compare, expected, usual(spins_), deadline, mesh_->sleepers(), ended, gone))
        return stopped(i);
    size_t i = selection.count > 1 ? unsatisfied(selection, compare, expected) : selection.count;
    if (i == selection.count) return {WaitStatus::none, 0, 0};
    if (now() > deadline || ended()) return stopped(i);  // counters that come and go must not keep this loop for ever
    if (gone() && (i = unsatisfied(selection, compare, expected)) < selection.count) return stopped(i);
  }
}

}  // namespace weft
