// A whole execution as one call from Python.
#pragma once

#include "execute/binding.hpp"
#include "execute/executor.hpp"
#include "python/gil.hpp"

namespace weft {

// The exception that says which thread uses the world.
inline nb::object in_use(const InUse& use) {
  // a number or a pointer, as the C library has it
  return nb::module_::import_("weft.errors").attr("in_use")((uintptr_t)use.thread);
}

// Do `work` for a call of `program` while this thread alone uses the world; if a thread does
// already, close the world and raise that.
template <class Work>
void in_turn(Executor& executor, nb::handle program, Work work) {
  struct Turn {
    explicit Turn(Executor& of) : executor(of) { executor.enter(); }
    ~Turn() { executor.leave(); }
    Executor& executor;
  };
  try {
    const Turn turn(executor);
    work();
  } catch (const InUse& use) {
    const nb::object error = in_use(use);
    program.attr("world").attr("fail")(error);
    raise(error);
  }
}

// A whole call of `program`, one of one lane without pauses as `weft.engines.host` has it, with a
// binding of its, in this thread's turn. Raises what the call does.
inline void execute(Executor& executor, nb::handle program, Binding& bound, double timeout) {
  Program& native = bound.program();
  if (native.execution.binding != &bound) program.attr("apply")(nb::find(bound));
  const auto fail = [&](nb::handle error) { program.attr("world").attr("fail")(error); };
  try {
    const bool done = unlocked([&] {
      executor.begin(native, nanoseconds(timeout));
      return executor.run(native, 0, 0) >= 0;
    });
    if (done) return;
  } catch (nb::python_error& error) {  // what a signal handler raised
    fail(error.value());
    throw;
  } catch (const std::exception& error) {
    fail(nb::module_::import_("weft.errors").attr("WeftError")(error.what()));
    throw;
  }
  raise(program.attr("stopped")(0, timeout));
}

}  // namespace weft
