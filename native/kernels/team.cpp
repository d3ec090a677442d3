#include "kernels/team.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <type_traits>

namespace weft {

namespace {

// The OpenMP library that torch uses, looked up through torch. A linked library might be another
// one, with idle threads that spin on the cores that torch's threads need. All OpenMP libraries
// have the functions to which GCC compiles a parallel region.
struct OpenMP {
  void (*parallel)(void (*run)(void*), void* argument, unsigned threads, unsigned flags);
  int (*number)();   // number of a thread in its team
  int (*count)();    // number of threads in a team
  int (*threads)();  // number of threads of torch's operators, on the calling thread

  OpenMP() {
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
          dlsym(torch ? torch : RTLD_DEFAULT, name));
    };
    find(parallel, "GOMP_parallel");
    find(number, "omp_get_thread_num");
    find(count, "omp_get_num_threads");
    find(threads, "_ZN2at15get_num_threadsEv");
    if (!threads) find(threads, "omp_get_max_threads");
  }
  bool complete() const { return parallel && number && count && threads; }
};

const OpenMP& openmp() {
  static const OpenMP found;
  return found;
}

std::atomic<bool> teams_allowed{true};
thread_local size_t fixed_size = 0;  // as set for this thread; 0: not set
thread_local bool has_team = false;  // whether it has started a team

void after_fork() {  // T4: the library would wait for the threads of the parent's team
  if (has_team) fixed_size = 1;
}

struct Region {
  void (*run)(const void* work, size_t part, size_t parts);
  const void* work;
};

// Run one part on a thread of a team.
void take_part(void* all) {
  const Region& region = *static_cast<const Region*>(all);
  const size_t before = fixed_size;
  fixed_size = 1;  // T3
  region.run(region.work, openmp().number(), openmp().count());
  fixed_size = before;
}

}  // namespace

size_t team_size() {
  if (fixed_size == 1 || !openmp().complete()) return 1;
  if (fixed_size) return fixed_size;
  return teams_allowed.load(std::memory_order_relaxed) ? openmp().threads() : 1;
}

void set_team_size(size_t threads) { fixed_size = threads; }

bool allow_teams(bool allowed) {
  return teams_allowed.exchange(allowed, std::memory_order_relaxed);
}

void run_team(size_t parts, void (*run)(const void* work, size_t part, size_t parts),
              const void* work) {
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork);
  (void)registered;
  has_team = true;
  Region region{run, work};
  openmp().parallel(take_part, &region, static_cast<unsigned>(parts), 0);
}

}  // namespace weft
