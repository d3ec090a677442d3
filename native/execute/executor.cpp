#include "execute/executor.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "execute/binding.hpp"
#include "hosts/packed.hpp"
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
  mesh_->closing = [headers = calls] { headers.close(); };
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

bool Executor::quick() const {
  return within_host() && !tracing && !link.on() &&
         std::count(pids.begin(), pids.end(), pids[rank_]) == 1;
}

void Executor::begin(Program& program, int64_t timeout) {
  const pthread_t user = user_.load(std::memory_order_relaxed);
  if (user && user != pthread_self()) throw InUse(user);
  Execution& execution = program.execution;
  const Binding* bound = execution.binding;
  const CallText& text = bound ? bound->text() : program.text;
  execution.reset(calls.begin(text, bound ? bound->published() : 0), text.digest);
  execution.timeout = timeout;
  // A lane that yields to another process loses its core for some milliseconds, so the only lane of
  // a plan waits longer before it does; of several, one may need the core of another.
  // Measured on a 2-core Xeon with AMX, beside two busy processes: all-reduces of 1 MiB take 24 us,
  // with a tenth of it at times 3 ms (`weft bench all-reduce --sizes 4K,1M --neighbours 2`).
  constexpr int kPatient = 100;
  const auto used = [](const auto& lane) { return !lane.empty(); };
  const auto lanes = std::count_if(program.lanes.begin(), program.lanes.end(), used);
  execution.spins = lanes > 1 ? spins_ : kPatient * spins_;
  if (program.eager) execution.eager = next_eager(program);
  for (size_t lane = 0; lane < program.lanes.size(); ++lane) {
    const auto& instructions = program.lanes[lane];
    execution.spans[lane].resize(instructions.size());
    execution.targets[lane].resize(instructions.size());
    for (size_t at = 0; at < instructions.size(); ++at)
      if (const Instruction& i = instructions[at]; i.op == Op::wait)
        execution.targets[lane][at] = base_[i.index] + i.count;  // X2
  }
  // X2: the waits of the next call count from here
  for (auto [index, count] : program.growth) base_[index] += count;
  program.sent.clear();
  if (network_) expect(program, text);
}

EagerOffset Executor::next_eager(const Program& program) {
  static_assert(Program::kEagerSets == 2);  // E1 needs two sets: call n - 2 has ended
  const bool swapped =
      program.swaps_eager() && within_host() && eager_count_ / Program::kEagerSets % 2;
  return {eager_count_++ % Program::kEagerSets * Program::kEager, swapped ? ~size_t{0} : 0};
}

int Executor::run(Program& program, size_t lane, int at) {
  Execution& execution = program.execution;
  const auto& instructions = program.lanes[lane];
  const int end = static_cast<int>(instructions.size());
  if (network_ && lane == 0 && at == 0) set(calls.under_way(rank_), execution.call);
  mark_link_ready(execution, lane);
  while (true) {
    if (at && instructions[at - 1].reads_peer_tensor && calls.closed()) {  // X5
      lost(execution, lane, at - 1, rank_);
      return -1;
    }
    if (at >= end) {
      if (lane == 0) calls.end(execution.call);
      if (network_) network_->hand_over();
      return at;
    }
    const Instruction& instruction = instructions[at];
    int64_t start = tracing ? now() : 0;
    int count = 1;
    switch (instruction.op) {
      case Op::copy:
      case Op::reduce:
        while (at + count < end && instructions[at + count].follows) ++count;
        if (const int error = move(execution, lane, &instruction, count)) {
          unreadable(execution, lane, at,
                     execution.binding->unmapped_owner(instruction.operands[1]), error);
          return -1;
        }
        break;
      case Op::notify:
        instruction.counter->call.store(execution.mark, std::memory_order_relaxed);  // S5
        add(*instruction.counter, 1);
        break;
      case Op::wait:
        if (!wait(execution, lane, at, instruction)) return -1;  // X4
        break;
      case Op::pause:
        if (instruction.operands.empty() || execution.binding->rows(instruction.operands[0])) {
          if (network_) network_->hand_over();
          return at;
        }
        break;  // a product of no rows
      case Op::send:
        send(execution, program.batches[instruction.index]);
        break;
    }
    if (tracing) {  // instructions executed in one pass divide its time evenly
      int64_t each = (now() - start) / count;
      for (int i = 0; i < count; ++i)
        execution.spans[lane][at + i] = {start + i * each, start + (i + 1) * each};
    }
    at += count;
  }
}

// Execute copies and sums in one pass. Returns 0, or the number of the error of reading a peer's
// memory.
int Executor::move(Execution& execution, size_t lane, const Instruction* first, size_t count) {
  thread_local std::vector<Target> targets;  // reused, so that a repeated call allocates nothing
  thread_local std::vector<Rows> sources;
  targets.clear();
  sources.clear();
  const Binding& bound = *execution.binding;
  const size_t rows = bound.rows(first->operands[first->sizing]);
  if (!rows) return 0;
  for (size_t i = 0; i < count; ++i) {
    const Operand& target = first[i].operands[0];
    const size_t total =
        first[i].counts_as_output ? bound.written() : rows * bound.row_bytes(target);
    targets.push_back(
        {bound.at(target, execution.eager), bound.stride(target), total, first[i].reader});
  }
  const Operand& source = first->operands[1];
  if (const int peer = bound.unmapped_owner(source); peer >= 0) {
    const std::optional<uint64_t> published = calls.address(peer, execution.call);
    if (!published) return ESTALE;
    const uintptr_t from = *published + reinterpret_cast<uintptr_t>(bound.at(source));
    const Target& to = targets[0];
    const int error = read_memory(pids.at(peer), from, bound.stride(source), to.base, to.stride,
                                  rows, bound.row_bytes(source));
    if (error) return error;
    copy_rows(targets.data() + 1, count - 1, to.base, to.stride, rows, bound.row_bytes(source));
  } else if (first->op == Op::copy) {
    copy_rows(targets.data(), count, bound.at(source, execution.eager), bound.stride(source), rows,
              bound.row_bytes(source));
  } else {
    for (size_t i = 1; i < first->operands.size(); ++i)
      sources.push_back({bound.at(first->operands[i], execution.eager),
                         bound.stride(first->operands[i]), first->dtypes[i]});
    reduce_rows(first->combine, first->dtypes[0], sources, rows, bound.columns(source), ranks_,
                targets.data(), count);
    mark_link_ready(execution, lane);
  }
  if (link.on())
    for (size_t i = 0; i < count; ++i)
      if (first[i].remote)
        link.transfer(execution.link_ready[lane], rows * bound.row_bytes(first[i].operands[0]));
  return 0;
}

// Record the reason why a peer's memory could not be read: the peer has ended or closed the world,
// or the kernel does not permit it.
void Executor::unreadable(Execution& execution, size_t lane, int at, int peer, int error) {
  if (error == ESRCH || calls.closed() || mesh_->failed()) return lost(execution, lane, at, peer);
  execution.failures[lane] = {WaitStatus::unreadable, at, peer, 0, static_cast<uint64_t>(error)};
}

// Record the reason why a peer is lost, which this rank may learn only after a moment.
void Executor::lost(Execution& execution, size_t lane, int at, int peer) {
  Deadline deadline(execution.timeout);
  WaitStatus status = early_end(execution);
  while (status == WaitStatus::timeout && !deadline.passed()) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    status = peer != rank_ && mesh_->left(peer) && !mesh_->failed() ? WaitStatus::left
                                                                    : early_end(execution);
  }
  execution.failures[lane] = {status, at, peer, 0, 0};
}

// The reason for which all waits of an execution end now; `timeout` if there is none.
WaitStatus Executor::early_end(const Execution& execution) const {
  if (!LaneThread::current() && caller_interrupted()) return WaitStatus::interrupted;
  if (mesh_->failed()) return WaitStatus::failed;
  if (ending_.load(std::memory_order_acquire)) return WaitStatus::lane;
  return execution.stopped.load(std::memory_order_acquire) >= 0 ? WaitStatus::lane
                                                                : WaitStatus::timeout;
}

// Let the link's next transfers start from now at the earliest: their rows were not ready before.
void Executor::mark_link_ready(Execution& execution, size_t lane) const {
  if (link.on()) execution.link_ready[lane] = now();
}

bool Executor::wait(Execution& execution, size_t lane, int at, const Instruction& instruction) {
  int source = instruction.source;
  uint64_t expected = execution.targets[lane][at];
  const Counter& counter = *instruction.counter;
  const bool had_to_wait = link.on() && counter.value.load() < expected;
  const bool first = source != rank_ && !execution.agreed[lane][source];
  const auto same_call = [&] {  // X3, by S5
    return instruction.count && counter.call.load(std::memory_order_relaxed) == execution.mark;
  };
  const int spins = network_ ? 0 : LaneThread::current() ? spins_ : execution.spins;
  if (execution.locked) {
    constexpr int kBrief = 100;  // about as long as releasing a lock and getting it again takes
    if (!spin(counter, Compare::greater_equal, expected, kBrief)) {
      execution.locked = false;
      release_caller();
    }
  }
  if (spin(counter, Compare::greater_equal, expected, spins) && (!first || same_call())) {
    execution.agreed[lane][source] = 1;
    if (had_to_wait) mark_link_ready(execution, lane);
    return true;
  }
  WaitStatus status = WaitStatus::timeout;
  RefusedCall refused(calls, source, execution.call);
  auto interrupted = [&] {
    const bool differs =
        source != rank_ && calls.mismatch(source, execution.call, execution.digest);
    status = differs            ? WaitStatus::mismatch
             : refused.stands() ? WaitStatus::refused
                                : early_end(execution);
    return status != WaitStatus::timeout;
  };
  auto gone = [&] {
    if (source != rank_ && mesh_->left(source)) status = WaitStatus::left;
    return status == WaitStatus::left;
  };
  // the products of this rank use the core that its lanes need
  const bool own_products = LaneThread::current() && source == rank_;
  const Yields yields = own_products ? kNoYield : yields_after(spins_);
  Deadline deadline(execution.timeout);
  Counter& awaited = *instruction.counter;
  bool arrived =
      network_ ? network_->wait_until(awaited, expected, instruction.arrives, patience(execution),
                                      yields, deadline, interrupted, gone)
               : wait_until(awaited, Compare::greater_equal, expected, 0, deadline, interrupted,
                            gone, yields);
  // X3: by H1 a signal of a peer that has not started this call belongs to another call, made in
  // place of an earlier one of this rank. The peer detects that the calls differ.
  while (arrived && first && instruction.count && within_host() &&
         !calls.started(source, execution.call)) {
    arrived = !interrupted() && !gone() && !deadline.passed();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (arrived && first) {  // X3, by the headers
    if (calls.mismatch(source, execution.call, execution.digest)) {
      arrived = false;
      status = WaitStatus::mismatch;
    } else if (instruction.count) {
      execution.agreed[lane][source] = 1;
    }
  }
  if (arrived) {
    if (had_to_wait) mark_link_ready(execution, lane);
    return true;
  }
  uint64_t base = expected - instruction.count, actual = instruction.counter->value.load();
  execution.failures[lane] = {status, at, source, instruction.count,
                              actual > base ? actual - base : 0};
  return false;
}

// How long a wait of this thread polls the network.
Network::Patience Executor::patience(const Execution& execution) const {
  // the products of this rank use the core that its other lanes need
  if (LaneThread::current()) return {0, 0};
  const bool several = execution.spins == spins_ && spins_;
  return {spins_ ? kPollsAlone : 0, several ? kPollsAlone : kPolls};
}

std::shared_ptr<Network> Executor::connect(size_t ranks, const Network::Connect& connect) {
  return network_ = std::make_shared<Network>(rank_, ranks, calls, mesh_, connect);
}

// Let the rows of an execution arrive from now on.
void Executor::expect(Program& program, const CallText& text) {
  const Execution& execution = program.execution;
  std::list<Network::Expected> expected = network_->blank(program.arrivals.size());
  auto one = expected.begin();
  for (const Arrivals& arrivals : program.arrivals) {
    one->channel = arrivals.channel;
    one->call = execution.call;
    one->digest = execution.digest;
    one->mark = execution.mark;
    one->places.clear();
    for (const MessageRows& message : arrivals.messages)
      one->places.push_back(message.any ? execution.binding->rows_of(message, execution.eager)
                                        : Strided{});
    ++one;
  }
  network_->begin(execution.call, text, std::move(expected));
  if (std::exchange(program.connected, true)) return;
  for (const Batch& batch : program.batches) network_->need(batch.peer);
  for (const Arrivals& arrivals : program.arrivals) network_->need(arrivals.channel->sender);
}

// Put a batch to another host, as far as that does not block; the network puts the rest.
void Executor::send(Execution& execution, Batch& batch) {
  // Bytes that a caller's thread sends that has products to compute; any other sends all that the
  // connection takes.
  // Measured on two hosts of 2 cores: all-to-all of 8 bytes takes 54 us, with the call cache, and
  // 110 to 170 before both (`weft bench all-to-all --sizes 8:256K:8`).
  constexpr size_t kAtOnce = 256 << 10;
  thread_local std::vector<Strided> rows;  // reused, so that a repeated call allocates nothing
  rows.clear();
  batch.packed.resize(batch.messages.size());
  for (size_t at = 0; at < batch.messages.size(); ++at) {
    const MessageRows& message = batch.messages[at];
    Strided own;
    if (message.any) own = execution.binding->rows_of(message, execution.eager);
    rows.push_back(message.packed ? pack(*message.packed, own, batch.packed[at]) : own);
  }
  if (tracing) batch.begun = now();
  const Label label{Kind::rows, batch.lane, execution.call, execution.digest};
  const bool computes = batch.lane == 0 && batch.program->computes();
  if (network_->put(batch.peer, label, rows, computes ? kAtOnce : SIZE_MAX,
                    [this, &batch] { sent(batch); }))
    sent(batch);
  else
    network_->hand_over();  // the link should not be idle while this thread does something else
}

// The rows of a batch may be overwritten.
void Executor::sent(Batch& batch) {
  Program& program = *batch.program;
  if (tracing) {
    const std::lock_guard lock(program.sending);
    program.sent.push_back({batch.number, batch.begun, now()});
  }
  batch.sent->call.store(program.execution.mark, std::memory_order_relaxed);  // S5
  add(*batch.sent, 1);
}

void Executor::let_others_begin() const {
  // Measured on two hosts of 2 busy cores, 1 Gbit/s: the first rows of a call leave after 0.03 ms
  // in the median, without after 6.3 of 36 ms (`weft bench all-gather-matmul --shape
  // 2048x2048x2048`).
  constexpr int kTimes = 3;
  for (int i = 0; network_ && i < kTimes; ++i) sched_yield();
}

void Executor::stop(Program& program, size_t lane) {
  program.execution.stopped.store(static_cast<int>(lane), std::memory_order_release);
  Sleeper::wake_all();
}

// Run a job on the lane thread.
void Executor::run(const LaneThread::Job& job) {
  try {
    if (run(*job.program, job.lane, 0) >= 0) return;
  } catch (const std::exception& error) {
    mesh_->abort(error);
    job.program->execution.failures[job.lane] = {WaitStatus::failed, 0, rank_, 0, 0};
  }
  const WaitFailure& failure = job.program->execution.failures[job.lane];
  // This lane waited too long for another lane of its rank, which reports its own cause.
  if (failure.status == WaitStatus::timeout && failure.source == rank_) return;
  stop(*job.program, job.lane);  // X4: other lanes may wait for signals of this one
}

}  // namespace weft
