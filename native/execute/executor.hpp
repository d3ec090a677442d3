// The interpreter of a rank's programs.
//
// X1  One thread at a time makes calls, and all ranks begin the same calls in the same order.
// X2  An execution raises each counter of a rank by the same number, its `growth`. So every rank
//     knows the value from which an execution counts: the sum of the growth of all earlier ones.
//     The values that waits wait for are fixed when a call begins, so several calls may be
//     outstanding.
// X3  A signal counts only if the rank that raised it makes the same call. The first wait of a lane
//     for a peer checks that: by the counter's mark (S5), or by the headers of both calls (H1).
// X4  After a wait that ended early, no further instruction of its lane is executed, and the waits
//     of this rank's other lanes end too.
// X5  Rows of a peer's tensor count only if no peer had closed the world after they were read:
//     otherwise their owner may have overwritten them before.
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
#include "hosts/network.hpp"
#include "memory/mesh.hpp"
#include "execute/program.hpp"
#include "memory/segment.hpp"

namespace weft {

// Thrown because a world is used by one thread at a time, and never by a signal handler of a thread
// that is in the middle of a call.
struct InUse : std::runtime_error {
  explicit InUse(pthread_t user) : std::runtime_error("the world is in use"), thread(user) {}
  pthread_t thread;  // the thread that uses it
};

class Executor {
 public:
  static constexpr size_t kNames = 256;  // signal names of all plans of a world

  // Size of the control segment: headers of calls, counters, and eager buffers.
  static size_t control_bytes(size_t ranks) {
    return counters_end(ranks) + Program::kEagerSets * Program::kEager;
  }

  // `control` is a zeroed symmetric segment of control_bytes; `spins` is the number of spins of a
  // wait before it sleeps. `comm_threads` threads divide copies and sums of the lane thread;
  // torch's compute threads divide the caller's.
  Executor(std::shared_ptr<Mesh> mesh, std::shared_ptr<Segment> control, int spins,
           size_t comm_threads = 1);
  ~Executor();  // ends the waits of the lane thread

  // Reserve the world for the calling thread until it leaves; throws InUse if it is reserved.
  void enter();
  void leave() { user_.store(pthread_t{}, std::memory_order_release); }

  Counter& counter(int rank, uint32_t index) const;
  // Addresses of all ranks' eager buffers of the first set.
  std::vector<uintptr_t> eager_bases() const { return control_->bases(counters_end(ranks_)); }

  // Publish a call, and fix the counts that its waits wait for, each for up to `timeout`
  // nanoseconds. Calls begin in the same order on all ranks; throws InUse while another thread
  // makes a call.
  void begin(Program& program, int64_t timeout);
  // Interpret instructions of a lane from `at` on, up to a pause or the end. Returns the next
  // position, or -1 if a wait ended early.
  int run(Program& program, size_t lane, int at);
  int rank() const { return rank_; }
  // Let ranks on other hosts be reached, of so many in all.
  std::shared_ptr<Network> connect(size_t ranks, const Network::Connect& connect);
  bool within_host() const { return !network_; }
  // Before the first product of a call: yield the core to the threads that send its first rows.
  // They do not interrupt the product, and the link would be idle for some milliseconds of it.
  void let_others_begin() const;
  // End the waits of a program whose lane `lane` has ended early.
  void stop(Program& program, size_t lane = 0);
  // Called from time to time by waits on the caller's thread; true ends the wait.
  std::function<bool()> caller_interrupted = [] { return false; };
  // Called once by the first wait of a program that holds a lock of its caller and does not end
  // soon, to release the lock.
  std::function<void()> release_caller = [] {};
  // Whether ranks are processes of this host, so that none needs a lock of another, and nothing
  // delays their copies.
  bool quick() const;
  // Process ids of all ranks, to read memory that is not mapped here through the kernel.
  std::vector<int> pids;
  // Whether executions record the time span of each instruction.
  bool tracing = false;
  // Whether calls may be repeated with nothing but their operands checked.
  bool repeats() const { return !tracing && !mesh_->failed(); }

 private:
  // The eager buffers of the next execution with eager buffers (E1, E3).
  EagerOffset next_eager(const Program& program);
  static size_t counters_end(size_t ranks) {
    return Calls::kBytes + kNames * ranks * sizeof(Counter);
  }
  void run(const LaneThread::Job& job);
  bool wait(Execution& execution, size_t lane, int at, const Instruction& instruction);
  int move(Execution& execution, size_t lane, const Instruction* first, size_t count);
  void unreadable(Execution& execution, size_t lane, int at, int peer, int error);
  void lost(Execution& execution, size_t lane, int at, int peer);
  Network::Patience patience(const Execution& execution) const;
  void expect(Program& program, const CallText& text);
  void send(Execution& execution, Batch& batch);
  void sent(Batch& batch);
  WaitStatus early_end(const Execution& execution) const;
  void mark_link_ready(Execution& execution, size_t lane) const;

  std::shared_ptr<Mesh> mesh_;
  std::shared_ptr<Segment> control_;
  int rank_, ranks_, spins_;
  std::atomic<pthread_t> user_{};  // the thread that makes a call (X1)
  std::atomic<bool> ending_{false};
  std::vector<uint64_t> base_;  // sum of the growth of earlier executions, by counter (X2)
  size_t eager_count_ = 0;      // number of executions with eager buffers

 public:
  Calls calls;
  EmulatedLink link;  // for copies to and from peers

 private:
  std::shared_ptr<Network> network_;  // to ranks on other hosts; null if there are none

 public:
  LaneThread lane_thread;  // destroyed first: its jobs use the other members
};

}  // namespace weft
