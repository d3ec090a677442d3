#include "kernels/team.hpp"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <type_traits>

namespace weft {

namespace {

// The OpenMP library that torch uses, found by way of torch. Linked, it might be another one, whose
// idle threads would spin on the cores where torch's are to work. All libraries have the calls that
// GCC makes of a parallel region.
struct OpenMP {
  void (*parallel)(void (*run)(void*), void* given, unsigned threads, unsigned flags);
  int (*number)();   // of a thread in its team,
  int (*count)();    // and how many there are
  int (*threads)();  // torch's, of the calling thread

  OpenMP() {
    void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(
          dlsym(torch ? torch : RTLD_DEFAULT, name));
    };
    find(parallel, "GOMP_parallel"), find(number, "omp_get_thread_num"),
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

std::atomic<bool> cores_enough{true};
thread_local size_t given = 0;    // the number given to this thread, if any
thread_local bool begun = false;  // whether it has begun a team

// A child has none of the threads that its parent's team had, and the library would wait for them.
void after_fork() {
  if (begun) given = 1;
}

struct Region {
  void (*run)(const void* work, size_t part, size_t parts);
  const void* work;
};

// What each thread of a team does; what it calls in its turn it does alone.
void take_part(void* all) {
  const Region& region = *static_cast<const Region*>(all);
  const size_t before = given;
  given = 1;
  region.run(region.work, openmp().number(), openmp().count());
  given = before;
}

}  // namespace

size_t team_size() {
  if (given == 1 || !openmp().complete()) return 1;
  if (given) return given;
  return cores_enough.load(std::memory_order_relaxed) ? openmp().threads() : 1;
}

void set_team_size(size_t threads) { given = threads; }

void let_teams(bool share) { cores_enough.store(share, std::memory_order_relaxed); }

void run_team(size_t parts, void (*run)(const void* work, size_t part, size_t parts),
              const void* work) {
  static const int registered = pthread_atfork(nullptr, nullptr, after_fork);
  (void)registered;
  begun = true;
  Region region{run, work};
  openmp().parallel(take_part, &region, static_cast<unsigned>(parts), 0);
}

}  // namespace weft
