// A program as Python has it: with the state of its execution.
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
        execution(program, ranks) {
    program.meets = meets;
  }

  void add(size_t lane, Instruction instruction, bool returns = false) {
    program.add(lane, std::move(instruction), returns);
    execution.spans[lane].emplace_back();
    execution.targets[lane].emplace_back();
  }
};

inline void throw_pending() {
  if (PyErr_Occurred()) throw nb::python_error();  // a signal handler raised during a wait
}

// A whole call of a program that is one lane without pauses; whether it came to its end.
inline bool execute(Executor& executor, Compiled& c, double timeout) {
  c.execution.timeout = static_cast<int64_t>(timeout * 1e9);
  bool done;
  {
    nb::gil_scoped_release release;
    executor.begin(c.program, c.execution);
    done = executor.run(c.program, c.execution, 0, 0) >= 0;
  }
  throw_pending();
  return done;
}

}  // namespace weft
