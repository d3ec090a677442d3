// A complete execution of a program as one call from Python.
//
// Y1  The GIL is released in all waits and copies but those of some microseconds, and held for
//     everything that calls Python.
// Y2  An execution that raises an error has closed the world: counters no longer agree (X2).
// Y3  No execution returns while the lane thread still runs a lane of it.
#pragma once

#include "execute/binding.hpp"
#include "execute/executor.hpp"
#include "python/gil.hpp"
#include "python/range.hpp"

namespace weft {

// The Python exception that names the thread that uses the world.
inline nb::object in_use(const InUse& use) {
  // a pthread_t is a number or a pointer, depending on the C library
  return nb::module_::import_("weft.errors").attr("in_use")((uintptr_t)use.thread);
}

// Call `work` for a call of `program` with the world reserved for this thread. If another thread
// uses it, close the world and raise the exception.
template <class Work>
void exclusively(Executor& executor, nb::handle program, Work work) {
  struct Exclusive {
    explicit Exclusive(Executor& of) : executor(of) { executor.enter(); }
    ~Exclusive() { executor.leave(); }
    Executor& executor;
  };
  try {
    const Exclusive exclusive(executor);
    work();
  } catch (const InUse& use) {
    const nb::object error = in_use(use);
    program.attr("world").attr("failure").attr("fail")(error);
    raise(error);
  }
}

// Execute `program`, a `HostProgram` of weft.engines.host, with one of its bindings; the caller has
// reserved the world for this thread. `multiply` computes the product of an instruction of the
// compute lane. Raises the error of the call, which has then closed the world.
template <class Multiply>
void execute_once(Executor& executor, nb::handle program, Binding& bound, double timeout,
                  Multiply multiply) {
  Program& native = bound.program();
  if (native.execution.binding != &bound) program.attr("apply")(nb::find(bound));
  const int end = static_cast<int>(native.lanes[0].size());
  const bool has_comm = !native.lanes[1].empty();
  struct Join {  // Y3: a destructor, so that it also joins if the compute lane ends early
    ~Join() {
      if (!has_comm) return;
      nb::gil_scoped_release release;
      executor.lane_thread.join(native);
    }
    Executor& executor;
    Program& native;
    bool has_comm;
  };
  const auto fail = [&](nb::handle error) {
    program.attr("world").attr("failure").attr("fail")(error);
  };
  {
    const Join join{executor, native, has_comm};
    try {
      const bool brief = native.brief() && executor.quick();
      const auto run = [&](auto begin, int from) {
        const auto work = [&] {
          begin();
          native.execution.locked = brief;
          return executor.run(native, 0, from);
        };
        return brief ? briefly_locked(work) : unlocked(work);
      };
      const auto begin = [&] {
        executor.begin(native, nanoseconds(timeout));
        if (has_comm) executor.lane_thread.start({&native, 1});
      };
      int at = run(begin, 0);
      if (has_comm && at >= 0 && at < end) executor.let_others_begin();
      while (at >= 0 && at < end) {
        const int64_t start = executor.tracing ? now() : 0;
        multiply(at);
        if (executor.tracing) native.execution.spans[0][at] = {start, now()};
        at = run([] {}, at + 1);
      }
      if (at < 0) raise(program.attr("stopped")(0, timeout));
    } catch (nb::python_error& error) {
      fail(error.value());  // Y2
      throw;
    } catch (const std::exception& error) {
      fail(nb::module_::import_("weft.errors").attr("WeftError")(error.what()));
      throw;
    }
  }
  if (has_comm && native.execution.failures[1].status != WaitStatus::none)
    raise(program.attr("stopped")(1, timeout));
}

// `execute_once`, in a range with the name of the operator.
template <class Multiply>
void execute(Executor& executor, nb::handle program, Binding& bound, double timeout,
             Multiply multiply) {
  in_range([&] { return nb::cast<std::string>(program.attr("plan").attr("operator")); },
           [&] { execute_once(executor, program, bound, timeout, multiply); });
}

}  // namespace weft
