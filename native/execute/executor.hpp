// The interpreter of a rank's programs.
#pragma once

#include <pthread.h>

#include <atomic>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "memory/calls.hpp"
#include "execute/emulated_link.hpp"
#include "execute/lane_thread.hpp"
#include "memory/mesh.hpp"
#include "execute/program.hpp"
#include "memory/segment.hpp"

namespace weft {

// A world is used by one thread at a time, and by no signal handler of a thread that is in the
// middle of a call.
struct InUse : std::runtime_error {
  explicit InUse(pthread_t user) : std::runtime_error("the world is in use"), thread(user) {}
  pthread_t thread;  // that uses it
};

class Executor {
 public:
  static constexpr size_t kNames = 256;  // signal names of all plans of a world

  // Headers of calls, counters, and eager buffers.
  static size_t control_bytes(size_t ranks) {
    return counters_end(ranks) + Program::kEagerSets * Program::kEager;
  }

  // `control` is a zeroed symmetric segment of control_bytes; `spins` is how long a wait spins
  // before it sleeps. What the lane thread copies and adds is shared by `comm_threads`; what the
  // caller does, by as many as torch uses there.
  Executor(std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> control, int spins,
           size_t comm_threads = 1);
  ~Executor();  // what the lane thread still waits for is given up

  // The calling thread uses the world until it leaves; throws InUse if a thread does already.
  void enter();
  void leave() { user_.store(pthread_t{}, std::memory_order_release); }

  Counter& counter(int rank, uint32_t index) const;
  // Where each rank's eager buffers of the first set begin.
  std::vector<uintptr_t> eager_bases() const { return control_->bases(counters_end(ranks_)); }

  // Publish a call, and fix what its waits wait for, each for so many nanoseconds. Calls begin in
  // the same order on all ranks; throws InUse while another thread makes one.
  void begin(Program& program, int64_t timeout);
  // Interpret instructions of a lane from `at` on, up to a pause or the end; the next position, or
  // -1 if a wait ended early.
  int run(Program& program, size_t lane, int at);
  // Wait so long until these ranks of this host have begun to carry out a call, or have left.
  WaitStatus wait_under_way(uint64_t call, const std::vector<int>& ranks, int64_t nanoseconds);
  // End the waits of a program, of which `lane` has ended early.
  void stop(Program& program, size_t lane = 0);
  // Called now and then by waits on the caller's thread; true ends the wait.
  std::function<bool()> caller_interrupted = [] { return false; };
  // Whether all peers are on this host, where they publish a call before they raise its signals.
  bool within_host = true;
  // The processes of all ranks, whose memory is read through the kernel where it is not mapped.
  std::vector<int> pids;
  // Whether executions take note of when each instruction begins and ends.
  bool tracing = false;

 private:
  // The eager buffers of the next execution that has some. A rank that uses a set again has ended
  // the execution before, which all had begun by then: they have read what was in the set.
  Turn turn(const Program& program);
  static size_t counters_end(size_t ranks) {
    return Calls::kBytes + kNames * ranks * sizeof(Counter);
  }
  void run(const LaneThread::Job& job);
  bool wait(Execution& execution, size_t lane, int at, const Instruction& instruction);
  int move(Execution& execution, size_t lane, const Instruction* first, size_t count);
  void unread(Execution& execution, size_t lane, int at, int peer, int error);
  void lost(Execution& execution, size_t lane, int at, int peer);
  WaitStatus ended(const Execution& execution) const;
  void feed(Execution& execution, size_t lane) const;

  std::shared_ptr<Mesh> mesh_;
  std::shared_ptr<Segment> control_;
  int rank_, ranks_, spins_;
  std::atomic<pthread_t> user_{};  // the thread that makes a call
  std::atomic<bool> ending_{false};
  std::vector<uint64_t> base_;  // what earlier executions promised, by counter
  size_t eager_ = 0;            // executions that had eager buffers

 public:
  Calls calls;
  EmulatedLink link;       // that copies to and from peers go over
  LaneThread lane_thread;  // ends first: its jobs use the rest
};

}  // namespace weft
