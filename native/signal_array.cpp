#include "signal_array.hpp"

namespace weft {

SignalArray::SignalArray(std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> segment, int spins)
    : mesh_(std::move(mesh)), segment_(std::move(segment)), spins_(spins) {}

Counter& SignalArray::counter(int rank, Selection selection, size_t i) const {
  return reinterpret_cast<Counter*>(segment_->parts[rank]->base())[selection.start + i * selection.step];
}

bool SignalArray::add(int rank, Selection selection, uint64_t value) {
  if (failed()) return false;
  for (size_t i = 0; i < selection.count; ++i) weft::add(counter(rank, selection, i), value);
  return true;
}

bool SignalArray::set(int rank, Selection selection, uint64_t value) {
  if (failed()) return false;
  for (size_t i = 0; i < selection.count; ++i) weft::set(counter(rank, selection, i), value);
  return true;
}

// The first that does not satisfy the comparison, `count` if all do.
size_t SignalArray::unsatisfied(Selection selection, Compare compare, uint64_t value) const {
  size_t i = 0;
  while (i < selection.count &&
         holds(compare, counter(segment_->rank, selection, i).value.load(std::memory_order_acquire), value))
    ++i;
  return i;
}

bool SignalArray::test(Selection selection, Compare compare, uint64_t value) const {
  return unsatisfied(selection, compare, value) == selection.count;
}

std::vector<uint64_t> SignalArray::values(Selection selection) const {
  std::vector<uint64_t> all;
  for (size_t i = 0; i < selection.count; ++i)
    all.push_back(counter(segment_->rank, selection, i).value.load(std::memory_order_acquire));
  return all;
}

bool SignalArray::deserted() const {
  int ranks = static_cast<int>(segment_->parts.size());
  for (int peer = 0; peer < ranks; ++peer)
    if (peer != segment_->rank && !mesh_->left(peer)) return false;
  return ranks > 1;
}

SignalArray::Outcome SignalArray::wait(Selection selection, Compare compare, uint64_t value, int64_t timeout,
                           const std::function<bool()>& interrupted) {
  int64_t deadline = now() + timeout;
  WaitStatus status = WaitStatus::timeout;
  auto is = [&](bool condition, WaitStatus what) { return condition && (status = what, true); };
  auto ended = [&] { return is(interrupted(), WaitStatus::interrupted) || is(failed(), WaitStatus::failed); };
  auto gone = [&] { return is(deserted(), WaitStatus::left); };
  auto stopped = [&](size_t i) -> Outcome {
    uint64_t actual = counter(segment_->rank, selection, i).value.load(std::memory_order_acquire);
    return {status, selection.start + i * selection.step, actual};
  };
  while (true) {
    for (size_t i = 0; i < selection.count; ++i)
      if (!wait_until(counter(segment_->rank, selection, i), compare, value, usual(spins_), deadline, mesh_->sleepers(), ended,
                      gone))
        return stopped(i);
    size_t i = selection.count > 1 ? unsatisfied(selection, compare, value) : selection.count;
    if (i == selection.count) return {WaitStatus::none, 0, 0};
    if (now() > deadline || ended()) return stopped(i);  // counters that come and go must not keep this loop for ever
    if (gone() && (i = unsatisfied(selection, compare, value)) < selection.count) return stopped(i);
  }
}

}  // namespace weft
