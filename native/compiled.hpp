// A program as Python has it.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>
#include <vector>

#include "executor.hpp"

namespace weft {

namespace nb = nanobind;

// A program together with the state of its execution.
struct Compiled {
  Program program;
  Execution execution;

  Compiled(std::string call, size_t lanes, std::vector<std::pair<uint32_t, uint64_t>> promised, size_t ranks, bool meets)
      : program{std::vector<std::vector<Instruction>>(lanes), std::move(promised), call, {}, weft::digest(call)},
        execution(lanes, ranks) {
    program.meets = meets;
  }
};

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

// A whole call of a program that is one lane without pauses, with a binding; both are given as `weft.engines.host` has them, too. Raises
// what the call does.
inline void execute(Executor& executor, nb::handle program, Compiled& c, nb::handle binding, const Binding& bound, double timeout) {
  if (executor.must_meet(c.program)) program.attr("engine").attr("meet")(timeout);
  if (c.execution.binding != &bound) program.attr("apply")(binding);
  c.execution.timeout = nanoseconds(timeout);
  try {
    const bool done = unlocked([&] {
      executor.begin(c.program, c.execution);
      return executor.run(c.program, c.execution, 0, 0) >= 0;
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
