// The thread that runs lanes beside the caller, one after the other.
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
    // what the program works on; let go on a thread that starts, joins or ends jobs
    std::shared_ptr<void> held = {};
  };

  // `run` does a job; its waits have time limits. `threads` share what it copies and adds.
  LaneThread(std::function<void(const Job&)> run, size_t threads)
      : run_(std::move(run)), threads_(threads) {}
  ~LaneThread();  // when all jobs are done

  void start(Job job);
  // Wait until the jobs of this program are done; false if `seconds` pass first.
  bool join(const Program& program, double seconds = 1e9);
  // Whether a lane thread is what calls this.
  static bool current() { return current_; }

 private:
  void work();

  static inline thread_local bool current_ = false;
  std::function<void(const Job&)> run_;
  size_t threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;   // the first is being done
  std::vector<Job> done_;  // whose `held` is to be let go
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace weft
