#include "execute/executor.hpp"

#include <cerrno>
#include <chrono>
#include <thread>

#include "execute/binding.hpp"
#include "kernels/copy.hpp"

namespace weft {

Executor::Executor(std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> control, int spins,
                   size_t comm_threads)
    : mesh_(std::move(mesh)),
      control_(std::move(control)),
      rank_(control_->rank),
      ranks_(static_cast<int>(control_->parts.size())),
      spins_(spins),
      base_(kNames * control_->parts.size()),
      calls(control_),
      lane_thread([this](const LaneThread::Job& job) { run(job); }, comm_threads) {
  mesh_->closing = [told = calls] { told.close(); };
}

Executor::~Executor() {
  ending_.store(true, std::memory_order_release);
  Sleeper::wake_all();
}

void Executor::enter() {
  pthread_t user{};
  if (!user_.compare_exchange_strong(user, pthread_self(), std::memory_order_acq_rel))
    throw InUse(user);
}

Counter& Executor::counter(int rank, uint32_t index) const {
  return reinterpret_cast<Counter*>(control_->parts[rank]->base() + Calls::kBytes)[index];
}

void Executor::begin(Program& program, int64_t timeout) {
  const pthread_t user = user_.load(std::memory_order_relaxed);
  if (user && user != pthread_self()) throw InUse(user);
  Execution& execution = program.execution;
  const Binding* bound = execution.binding;
  const Said& said = bound ? bound->said() : program.said;
  execution.reset(calls.begin(said, bound ? bound->offered() : 0), said.digest);
  execution.timeout = timeout;
  if (program.eager) execution.turn = turn(program);
  for (size_t lane = 0; lane < program.lanes.size(); ++lane) {
    const auto& instructions = program.lanes[lane];
    execution.spans[lane].resize(instructions.size()),
        execution.targets[lane].resize(instructions.size());
    for (size_t at = 0; at < instructions.size(); ++at)
      if (const Instruction& i = instructions[at]; i.op == Op::wait)
        execution.targets[lane][at] = base_[i.index] + i.count;
  }
  // what the next call's waits begin from
  for (auto [index, count] : program.promised) base_[index] += count;
}

Turn Executor::turn(const Program& program) {
  const bool crossed = program.crosses() && within_host && eager_ / Program::kEagerSets % 2;
  return {eager_++ % Program::kEagerSets * Program::kEager, crossed ? ~size_t{0} : 0};
}

int Executor::run(Program& program, size_t lane, int at) {
  Execution& execution = program.execution;
  const auto& instructions = program.lanes[lane];
  const int end = static_cast<int>(instructions.size());
  if (!within_host && lane == 0 && at == 0) set(calls.under_way(rank_), execution.call);
  feed(execution, lane);
  while (true) {
    // what was read may not be what the call was about
    if (at && instructions[at - 1].exposed && calls.closed()) {
      lost(execution, lane, at - 1, rank_);
      return -1;
    }
    if (at >= end) return at;
    const Instruction& instruction = instructions[at];
    int64_t start = tracing ? now() : 0;
    int count = 1;
    switch (instruction.op) {
      case Op::copy:
      case Op::reduce:
        while (at + count < end && instructions[at + count].follows) ++count;
        if (const int error = move(execution, lane, &instruction, count)) {
          unread(execution, lane, at, execution.binding->apart(instruction.operands[1]), error);
          return -1;
        }
        break;
      case Op::notify:
        instruction.counter->call.store(execution.mark, std::memory_order_relaxed);
        add(*instruction.counter, 1);
        break;
      case Op::wait:
        if (!wait(execution, lane, at, instruction)) return -1;
        break;
      case Op::pause:
        if (instruction.operands.empty() || execution.binding->rows(instruction.operands[0]))
          return at;
        break;  // nothing to multiply
    }
    if (tracing) {  // what is made in one pass shares its time
      int64_t each = (now() - start) / count;
      for (int i = 0; i < count; ++i)
        execution.spans[lane][at + i] = {start + i * each, start + (i + 1) * each};
    }
    at += count;
  }
}

// 0, or the number of the error with which a peer's memory cannot be read.
int Executor::move(Execution& execution, size_t lane, const Instruction* first, size_t count) {
  thread_local std::vector<Target> targets;  // kept, so that a repeated call allocates nothing
  thread_local std::vector<Rows> sources;
  targets.clear(), sources.clear();
  const Binding& bound = *execution.binding;
  const size_t rows = bound.rows(first->operands[first->measure]);
  if (!rows) return 0;
  for (size_t i = 0; i < count; ++i) {
    const Operand& target = first[i].operands[0];
    const size_t whole = first[i].together ? bound.written() : rows * bound.row_bytes(target);
    targets.push_back(
        {bound.at(target, execution.turn), bound.stride(target), whole, first[i].reader});
  }
  const Operand& source = first->operands[1];
  if (const int peer = bound.apart(source); peer >= 0) {
    const std::optional<uint64_t> told = calls.address(peer, execution.call);
    if (!told) return ESTALE;
    const uintptr_t from = *told + reinterpret_cast<uintptr_t>(bound.at(source));
    const Target& to = targets[0];
    const int error = read_memory(pids.at(peer), from, bound.stride(source), to.base, to.stride,
                                  rows, bound.row_bytes(source));
    if (error) return error;
    copy_rows(targets.data() + 1, count - 1, to.base, to.stride, rows, bound.row_bytes(source));
  } else if (first->op == Op::copy) {
    copy_rows(targets.data(), count, bound.at(source, execution.turn), bound.stride(source), rows,
              bound.row_bytes(source));
  } else {
    for (size_t i = 1; i < first->operands.size(); ++i)
      sources.push_back({bound.at(first->operands[i], execution.turn),
                         bound.stride(first->operands[i]), first->dtypes[i]});
    reduce_rows(first->combine, first->dtypes[0], sources, rows, bound.columns(source), ranks_,
                targets.data(), count);
    feed(execution, lane);
  }
  if (link.on())
    for (size_t i = 0; i < count; ++i)
      if (first[i].remote)
        link.carry(execution.held[lane], rows * bound.row_bytes(first[i].operands[0]));
  return 0;
}

// Why the memory of a peer could not be read: it is gone, it has closed the world, or the kernel
// does not hand out what lies there.
void Executor::unread(Execution& execution, size_t lane, int at, int peer, int error) {
  if (error == ESRCH || calls.closed() || mesh_->failed()) return lost(execution, lane, at, peer);
  execution.failures[lane] = {WaitStatus::unread, at, peer, 0, static_cast<uint64_t>(error)};
}

// What became of a peer, as soon as that is known.
void Executor::lost(Execution& execution, size_t lane, int at, int peer) {
  const int64_t deadline = now() + execution.timeout;
  WaitStatus status = ended(execution);
  while (status == WaitStatus::timeout && now() < deadline) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    status = peer != rank_ && mesh_->left(peer) && !mesh_->failed() ? WaitStatus::left
                                                                    : ended(execution);
  }
  execution.failures[lane] = {status, at, peer, 0, 0};
}

// What ends all waits of an execution, if anything did; else they end by their time.
WaitStatus Executor::ended(const Execution& execution) const {
  if (!LaneThread::current() && caller_interrupted()) return WaitStatus::interrupted;
  if (mesh_->failed()) return WaitStatus::failed;
  if (ending_.load(std::memory_order_acquire)) return WaitStatus::lane;
  return execution.stopped.load(std::memory_order_acquire) >= 0 ? WaitStatus::lane
                                                                : WaitStatus::timeout;
}

// From now on copies can have been ready for the link: what they copy was not there before.
void Executor::feed(Execution& execution, size_t lane) const {
  if (link.on()) execution.held[lane] = now();
}

bool Executor::wait(Execution& execution, size_t lane, int at, const Instruction& instruction) {
  int source = instruction.source;
  uint64_t expected = execution.targets[lane][at];
  const Counter& counter = *instruction.counter;
  const bool begun = link.on() && counter.value.load() < expected;
  const bool first = source != rank_ && !execution.agreed[lane][source];
  const auto says_the_same = [&] {
    return instruction.count && counter.call.load(std::memory_order_relaxed) == execution.mark;
  };
  if (spin(counter, Compare::greater_equal, expected, spins_) && (!first || says_the_same())) {
    execution.agreed[lane][source] = 1;
    if (begun) feed(execution, lane);
    return true;
  }
  WaitStatus status = WaitStatus::timeout;
  auto interrupted = [&] {
    const bool others = source != rank_ && calls.mismatch(source, execution.call, execution.digest);
    status = others ? WaitStatus::mismatch : ended(execution);
    return status != WaitStatus::timeout;
  };
  auto gone = [&] {
    if (source != rank_ && mesh_->left(source)) status = WaitStatus::left;
    return status == WaitStatus::left;
  };
  // A lane that waits for its own rank's products, which work on the core that it needs, gives way
  // to nobody: it would wait until their time slice is over, some milliseconds; who is woken from
  // sleep gets the core at once.
  const int yields = LaneThread::current() && source == rank_ ? 0 : kYields;
  const int64_t deadline = now() + execution.timeout;
  bool come = wait_until(*instruction.counter, Compare::greater_equal, expected, spins_, deadline,
                         interrupted, gone, yields);
  // A signal of a peer that has not begun this call is one of another call, which that peer made as
  // this rank made an earlier one: it counts for nothing here, and the peer will see that calls
  // differ.
  while (come && first && instruction.count && within_host &&
         !calls.begun(source, execution.call)) {
    come = !interrupted() && !gone() && now() < deadline;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (come && first) {
    if (calls.mismatch(source, execution.call, execution.digest))
      come = false, status = WaitStatus::mismatch;
    else if (instruction.count)
      execution.agreed[lane][source] = 1;
  }
  if (come) {
    if (begun) feed(execution, lane);
    return true;
  }
  uint64_t base = expected - instruction.count, actual = instruction.counter->value.load();
  execution.failures[lane] = {status, at, source, instruction.count,
                              actual > base ? actual - base : 0};
  return false;
}

WaitStatus Executor::wait_under_way(uint64_t call, const std::vector<int>& ranks,
                                    int64_t nanoseconds) {
  const int64_t deadline = now() + nanoseconds;
  for (int rank : ranks) {
    const auto failed = [&] { return mesh_->failed(); };
    const auto left = [&] { return rank != rank_ && mesh_->left(rank); };
    if (!wait_until(calls.under_way(rank), Compare::greater_equal, call, spins_, deadline, failed,
                    left) &&
        !left())
      return failed() ? WaitStatus::failed : WaitStatus::timeout;
  }
  return WaitStatus::none;
}

void Executor::stop(Program& program, size_t lane) {
  program.execution.stopped.store(static_cast<int>(lane), std::memory_order_release);
  Sleeper::wake_all();
}

// What the lane thread does with a job.
void Executor::run(const LaneThread::Job& job) {
  try {
    if (run(*job.program, job.lane, 0) >= 0) return;
  } catch (const std::exception& error) {
    mesh_->abort(error);
    job.program->execution.failures[job.lane] = {WaitStatus::failed, 0, rank_, 0, 0};
  }
  const WaitFailure& failure = job.program->execution.failures[job.lane];
  // A lane that waited for another of this rank too long: that one has a limit, and a cause, of its
  // own.
  if (failure.status == WaitStatus::timeout && failure.source == rank_) return;
  stop(*job.program, job.lane);  // what other lanes wait for may never come
}

}  // namespace weft
