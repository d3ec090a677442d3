#include "transfers.hpp"

#include <algorithm>

#include "team.hpp"

namespace weft {

namespace {
constexpr int64_t kForever = std::numeric_limits<int64_t>::max();
// The thread looks for the next copy for a microsecond or two before it sleeps; longer, and it keeps a core from the caller.
constexpr int kLaneSpins = 50;
}  // namespace

Transfers::Transfers(std::shared_ptr<Mesh> mesh, int spins, size_t comm_threads)
    : mesh_(std::move(mesh)), spins_(spins), comm_threads_(comm_threads) {}

Transfers::~Transfers() {
  if (!thread_.joinable()) return;
  finish();
  stopping_.store(true);
  wake(*submitted_);
  thread_.join();
}

bool Transfers::copy(const StridedCopy& copy) const {
  if (mesh_->failed()) return false;
  copy.run();
  return true;
}

uint64_t Transfers::submit(StridedCopy copy, const Interrupted& interrupted) {
  std::lock_guard lock(submitting_);
  uint64_t number = submitted_->value.load(std::memory_order_relaxed) + 1;
  if (number > kOutstanding && !wait(number - kOutstanding, kForever, interrupted)) return 0;
  if (!thread_.joinable()) thread_ = std::thread(&Transfers::work, this);
  slot(number).copy = std::move(copy);
  add(*submitted_, 1);
  return number;
}

bool Transfers::wait(uint64_t number, int64_t deadline, const Interrupted& interrupted) {
  return wait_until(slot(number).done, Compare::greater_equal, number, usual(spins_), deadline, sleepers_, interrupted);
}

void Transfers::finish() {
  wait(submitted_->value.load(std::memory_order_acquire), kForever, [] { return false; });
}

void Transfers::work() {
  set_team_size(comm_threads_);
  for (uint64_t number = 1;; ++number) {
    auto stopping = [&] { return stopping_.load(); };
    const SpinPolicy policy = usual(std::min(spins_, kLaneSpins));
    if (!wait_until(*submitted_, Compare::greater_equal, number, policy, kForever, sleepers_, stopping)) return;
    Slot& next = slot(number);
    if (!copy(*next.copy) && refused_.load() == kNever) refused_.store(number, std::memory_order_release);
    next.copy.reset();
    set(next.done, number);
  }
}

}  // namespace weft
