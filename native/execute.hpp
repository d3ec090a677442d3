// How Python's threads call what may take long.
#pragma once

#include <nanobind/nanobind.h>

#include "binding.hpp"
#include "executor.hpp"

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

// A whole call of `program`, one of one lane without pauses as `weft.engines.host` has it, with a binding of its. Raises what the call
// does.
inline void execute(Executor& executor, nb::handle program, Binding& bound, double timeout) {
  Program& native = bound.program();
  if (executor.must_meet(native)) program.attr("engine").attr("meet")(timeout);
  if (native.execution.binding != &bound) program.attr("apply")(nb::find(bound));
  try {
    const bool done = unlocked([&] {
      executor.begin(native, nanoseconds(timeout));
      return executor.run(native, 0, 0) >= 0;
    });
    if (done) return;
  } catch (nb::python_error& error) {  // what a signal handler raised
    program.attr("world").attr("fail")(error.value());
    throw;
  }
  const nb::object error = program.attr("stopped")(0, timeout);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

}  // namespace weft
