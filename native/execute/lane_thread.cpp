#include "execute/lane_thread.hpp"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "kernels/team.hpp"

namespace weft {

namespace {

// A lane thread usually sleeps, and should run at once when it is woken, even if computing threads
// use all cores. A short time slice gives it an early deadline in the kernel's fair scheduler,
// without any privilege.
void shorten_slices() {
  prctl(PR_SET_TIMERSLACK, kTimerSlack);
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
    // SCHED_OTHER with slices of 100 us
  } attributes{48, 0, 0, getpriority(PRIO_PROCESS, 0), 0, 100'000, 0, 0};
  // older kernels ignore the slice or refuse the call; both are fine
  syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

LaneThread::~LaneThread() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void LaneThread::start(Job job) {
  std::vector<Job> over;  // L2: released after the lock
  std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread(&LaneThread::work, this);
  jobs_.push_back(std::move(job));
  done_.swap(over);
  changed_.notify_all();
}

bool LaneThread::join(const Program& program, double seconds) {
  std::vector<Job> over;  // L2: released after the lock
  std::unique_lock lock(mutex_);
  const bool joined = changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
    return std::none_of(jobs_.begin(), jobs_.end(),
                        [&](const Job& job) { return job.program == &program; });
  });
  done_.swap(over);
  return joined;
}

void LaneThread::work() {
  current_ = true;
  shorten_slices();
  set_team_size(threads_);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const Job job{jobs_.front().program, jobs_.front().lane};
    lock.unlock();
    run_(job);
    lock.lock();
    if (jobs_.front().retained) done_.push_back(std::move(jobs_.front()));  // L2
    jobs_.pop_front();
    changed_.notify_all();
  }
}

}  // namespace weft
