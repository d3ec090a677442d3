// The thread that runs lanes concurrently with the caller, one after the other.
//
// L1  Jobs run in the order in which they are started.
// L2  The objects that a job retains are released only after the job, and never on the lane thread
//     or under the lock: their destructors may run Python code.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "execute/program.hpp"

namespace weft {

class LaneThread {
 public:
  struct Job {
    Program* program;
    size_t lane;
    // objects that the program needs (L2)
    std::shared_ptr<void> retained = {};
  };

  // `run` executes a job; its waits have time limits. `threads` threads divide its copies and sums.
  LaneThread(std::function<void(const Job&)> run, size_t threads)
      : run_(std::move(run)), threads_(threads) {}
  ~LaneThread();  // executes all jobs first

  void start(Job job);
  // Wait until the jobs of this program are done; false if `seconds` pass first.
  bool join(const Program& program, double seconds = 1e9);
  // Whether the calling thread is a lane thread.
  static bool current() { return current_; }

 private:
  void work();

  static inline thread_local bool current_ = false;
  std::function<void(const Job&)> run_;
  size_t threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;   // the first one is being executed
  std::vector<Job> done_;  // with objects to be released by the next `start` or `join` (L2)
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace weft
