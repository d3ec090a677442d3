// Release of the GIL around waits, and exceptions of Python in native code.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <utility>

namespace weft {

namespace nb = nanobind;

// Call `work` without the GIL, and raise the exception of a signal handler that ran meanwhile.
template <class Work>
auto unlocked(Work work) {
  auto result = [&] {
    nb::gil_scoped_release release;
    return work();
  }();
  if (PyErr_Occurred()) throw nb::python_error();
  return result;
}

// The GIL of a thread that holds it in native work, until `release_gil`.
inline thread_local PyThreadState* released_gil = nullptr;
inline void release_gil() { released_gil = PyEval_SaveThread(); }

// Call `work`, which calls `release_gil` before it waits for long, and raise the exception of a
// signal handler that ran meanwhile. To release the GIL and get it again takes as long as passing a
// cache line to another core.
template <class Work>
auto briefly_locked(Work work) {
  struct Again {  // a signal handler in the wait of one call may make another
    PyThreadState* const outer = std::exchange(released_gil, nullptr);
    ~Again() {
      if (released_gil) PyEval_RestoreThread(released_gil);
      released_gil = outer;
    }
  };
  auto result = [&] {
    const Again again;
    return work();
  }();
  if (PyErr_Occurred()) throw nb::python_error();
  return result;
}

// Run Python's signal handlers; true if one raised.
inline bool signal_pending() {
  nb::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

// Clear Python's error if its type is one of these itself, and raise any other: wherever Python
// code runs, as to hash, compare or read an attribute, a signal handler may have raised its own.
inline void clear_only(std::initializer_list<PyObject*> meant) {
  PyObject* const type = PyErr_Occurred();
  if (!type) return;
  if (std::find(meant.begin(), meant.end(), type) == meant.end()) throw nb::python_error();
  PyErr_Clear();
}

[[noreturn]] inline void raise(const nb::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nb::python_error();
}

// A reference to a Python object for native code without Python; null for None.
inline std::shared_ptr<void> keep(nb::object object) {
  if (object.is_none()) return nullptr;
  return {object.release().ptr(), [](void* kept) {
            nb::gil_scoped_acquire acquire;
            Py_DECREF(static_cast<PyObject*>(kept));
          }};
}

}  // namespace weft
