#include "world.hpp"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "copy.hpp"

namespace weft {

namespace {

// A lane thread mostly sleeps; when there is something to do it should do it at once, also where threads that compute keep all
// cores busy. A short time slice gives it an early deadline in the kernel's fair scheduler, without any privilege.
void be_punctual() {
  prctl(PR_SET_TIMERSLACK, 1000);  // nanoseconds
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes{48, 0, 0, getpriority(PRIO_PROCESS, 0), 0, 100'000, 0, 0};  // SCHED_OTHER with slices of 100 us
  syscall(SYS_sched_setattr, 0, &attributes, 0);  // older kernels ignore the slice or refuse the call; both are fine
}

}  // namespace

World::World(std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> control, int spins)
    : mesh_(std::move(mesh)),
      control_(std::move(control)),
      rank_(control_->rank),
      ranks_(static_cast<int>(control_->parts.size())),
      spins_(spins),
      base_(kNames * control_->parts.size()) {}

World::~World() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

Counter& World::counter(int rank, uint32_t index) const {
  char* base = control_->parts[rank]->base() + kHeaders * sizeof(Header);
  return reinterpret_cast<Counter*>(base)[index];
}

Header& World::header(int rank, uint64_t call) const {
  return reinterpret_cast<Header*>(control_->parts[rank]->base())[call % kHeaders];
}

void World::begin(const Program& program, Execution& execution) {
  execution.reset(++calls_);
  for (size_t lane = 0; lane < program.lanes.size(); ++lane)
    for (size_t at = 0; at < program.lanes[lane].size(); ++at)
      if (const Instruction& i = program.lanes[lane][at]; i.op == Op::wait) execution.targets[lane][at] = base_[i.index] + i.count;
  for (auto [index, count] : program.promised) base_[index] += count;  // what the next call's waits begin from
  publish(rank_, calls_, program.hash, program.call);
}

void World::publish(int rank, uint64_t call, uint64_t hash, const std::string& text) {
  Header& said = header(rank, call);
  said.call.store(0, std::memory_order_relaxed);  // not to be read while it is written
  said.hash.store(hash, std::memory_order_relaxed);
  size_t length = std::min(text.size(), sizeof said.text - 1);
  while (length < text.size() && length && (text[length] & 0xc0) == 0x80) --length;  // no half characters
  std::memcpy(said.text, text.data(), length);
  said.text[length] = 0;
  said.call.store(call, std::memory_order_release);
}

void World::hear(int peer, uint64_t call, uint64_t hash, const std::string& text) { publish(peer, call, hash, text); }

bool World::mismatch(int peer, const Program& program, uint64_t call) const {
  const Header& theirs = header(peer, call);
  if (theirs.call.load(std::memory_order_acquire) != call) return false;
  bool same = theirs.hash.load(std::memory_order_acquire) == program.hash;
  return !same && theirs.call.load(std::memory_order_relaxed) == call;  // and not overwritten meanwhile
}

std::string World::peer_call(int peer, uint64_t call) const {
  const Header& theirs = header(peer, call);
  return theirs.call.load(std::memory_order_acquire) == call ? theirs.text : "";
}

int World::run(const Program& program, Execution& execution, size_t lane, int at) {
  const auto& instructions = program.lanes[lane];
  const int end = static_cast<int>(instructions.size());
  feed(execution, lane);
  while (at < end) {
    const Instruction& instruction = instructions[at];
    int64_t start = tracing_ ? now() : 0;
    int count = 1;
    switch (instruction.op) {
      case Op::copy: case Op::reduce:
        while (at + count < end && instructions[at + count].follows) ++count;
        move(execution, lane, &instruction, count);
        break;
      case Op::notify: add(*instruction.counter, 1); break;
      case Op::wait:
        if (!wait(program, execution, lane, at, instruction)) return -1;
        break;
      case Op::pause: return at;
    }
    if (tracing_) {  // what is made in one pass shares its time
      int64_t each = (now() - start) / count;
      for (int i = 0; i < count; ++i) execution.spans[lane][at + i] = {start + i * each, start + (i + 1) * each};
    }
    at += count;
  }
  return at;
}

void World::move(Execution& execution, size_t lane, const Instruction* first, size_t count) {
  thread_local std::vector<Target> targets;  // kept, so that a repeated call allocates nothing
  thread_local std::vector<Rows> operands;
  targets.clear(), operands.clear();
  auto place = [&](const Operand& operand) { return execution.slots[operand.slot] + operand.offset; };
  for (size_t i = 0; i < count; ++i) targets.push_back({place(first[i].operands[0]), first[i].operands[0].stride, first[i].whole});
  if (first->op == Op::copy) {
    copy_rows(targets.data(), count, place(first->operands[1]), first->operands[1].stride, first->rows, first->columns);
  } else {
    for (size_t i = 0; i < first->operands.size(); ++i)
      operands.push_back({place(first->operands[i]), first->operands[i].stride, first->dtypes[i]});
    reduce_rows(first->combine, operands, first->rows, first->columns, ranks_, first->whole, targets.data() + 1, count - 1);
    feed(execution, lane);
  }
  if (seconds_per_byte_ > 0)
    for (size_t i = 0; i < count; ++i)
      if (first[i].remote) pass_link(execution.held[lane], first[i].rows * first[i].columns);
}

// From now on copies can have been ready for the link: what they copy was not there before.
void World::feed(Execution& execution, size_t lane) const {
  if (seconds_per_byte_ > 0) execution.held[lane] = now();
}

void World::pass_link(int64_t ready, size_t bytes) {
  double seconds = latency_ + seconds_per_byte_ * static_cast<double>(bytes);
  int64_t free = std::max(link_free_.load(), ready) + static_cast<int64_t>(seconds * 1e9);
  link_free_.store(free);
  if (free <= now()) return;  // a sleep until then would still give the core away
  timespec until{free / 1'000'000'000, free % 1'000'000'000};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr);
}

bool World::wait(const Program& program, Execution& execution, size_t lane, int at, const Instruction& instruction) {
  int source = instruction.source;
  uint64_t expected = execution.targets[lane][at];
  bool begun = seconds_per_byte_ > 0 && instruction.counter->value.load() < expected;
  Trouble trouble = Trouble::timeout;
  bool mine = std::this_thread::get_id() != thread_.get_id();
  auto is = [&](bool condition, Trouble what) { return condition && (trouble = what, true); };
  auto interrupted = [&] {
    if (is(source != rank_ && mismatch(source, program, execution.call), Trouble::mismatch)) return true;
    if (is(mine && caller_interrupted(), Trouble::interrupted)) return true;
    if (is(mesh_->failed(), Trouble::failed)) return true;
    return is(execution.stopped.load(std::memory_order_acquire) >= 0, Trouble::lane);
  };
  auto gone = [&] { return is(source != rank_ && mesh_->left(source), Trouble::left); };
  const Patience patience = !mine && source == rank_ ? beside_products(spins_) : usual(spins_);
  bool come = wait_until(*instruction.counter, Compare::greater_equal, expected, patience, now() + execution.timeout,
                         mesh_->sleepers(), interrupted, gone);
  if (come && source != rank_ && !execution.agreed[lane][source]) {
    if (mismatch(source, program, execution.call)) come = false, trouble = Trouble::mismatch;
    else if (instruction.count) execution.agreed[lane][source] = 1;
  }
  if (come) {
    if (begun) feed(execution, lane);
    return true;
  }
  uint64_t base = expected - instruction.count, actual = instruction.counter->value.load();
  execution.stops[lane] = {trouble, at, source, instruction.count, actual > base ? actual - base : 0};
  return false;
}

void World::start(const Program& program, Execution& execution, size_t lane) {
  std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread(&World::work, this);
  jobs_.push_back({&program, &execution, lane});
  outstanding_.store(jobs_.size(), std::memory_order_release);
  changed_.notify_all();
}

void World::join() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return jobs_.empty(); });  // each wait of a job has its time limit
}

bool World::join(const Execution& execution, double seconds) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
    return std::none_of(jobs_.begin(), jobs_.end(), [&](const Job& job) { return job.execution == &execution; });
  });
}

void World::work() {
  be_punctual();
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job job = jobs_.front();
    lock.unlock();
    bool ended = run(*job.program, *job.execution, job.lane, 0) < 0;
    const Stop& stop = job.execution->stops[job.lane];
    bool of_another = stop.trouble == Trouble::timeout && stop.source == rank_;  // which has a limit, and a cause, of its own
    if (ended && !of_another) {  // what other lanes wait for may never come
      job.execution->stopped.store(static_cast<int>(job.lane), std::memory_order_release);
      mesh_->sleepers().wake_all();
    }
    lock.lock();
    jobs_.pop_front();
    outstanding_.store(jobs_.size(), std::memory_order_release);
    changed_.notify_all();
  }
}

void World::emulate_link(double bytes_per_second, double latency_seconds) {
  seconds_per_byte_ = bytes_per_second > 0 ? 1 / bytes_per_second : 0;
  latency_ = latency_seconds;
  prctl(PR_SET_TIMERSLACK, seconds_per_byte_ > 0 ? 1000 : 0);  // the caller's own transfers end in time too; 0: as usual
}

}  // namespace weft
