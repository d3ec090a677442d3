// How Python's threads call what may take long.
#pragma once

#include <nanobind/nanobind.h>

#include "execute/binding.hpp"
#include "execute/executor.hpp"

namespace weft {

namespace nb = nanobind;

// Do `work` without the GIL, and raise what a signal handler raised while it waited.
template <class Work>
auto unlocked(Work work) {
  auto made = [&] {
    nb::gil_scoped_release release;
    return work();
  }();
  if (PyErr_Occurred()) throw nb::python_error();
  return made;
}

// The exception that says which thread uses the world.
inline nb::object in_use(const InUse& use) {
  // a number or a pointer, as the C library has it
  return nb::module_::import_("weft.errors").attr("in_use")((uintptr_t)use.thread);
}

[[noreturn]] inline void raise(const nb::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
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
  if (executor.must_meet(native)) program.attr("engine").attr("meet")(timeout);
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
