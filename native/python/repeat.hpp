// A repeated call as one native call: all that precedes the call cache, too.
#pragma once

#include <cmath>

#include "python/call_cache.hpp"

namespace weft {

// Weak references to the worlds of calls that name none: of a thread that is a rank, and of the
// process. Not released, since Python ends before static objects.
inline thread_local PyObject* world_of_thread = nullptr;
inline PyObject* world_of_process = nullptr;

inline void set_default_world(nb::handle world, bool of_thread) {
  PyObject*& own = of_thread ? world_of_thread : world_of_process;
  Py_XDECREF(std::exchange(own, weak_reference(world).release().ptr()));
}

// `world`, or the default one; null if there is none.
inline nb::object world_or_default(nb::handle world) {
  if (!world.is_none()) return nb::borrow(world);
  PyObject* const own = world_of_thread ? world_of_thread : world_of_process;
  return own ? referent(own) : nb::object();
}

// The limit of each wait in seconds: of a call, else of its world; 0 for one that must be checked.
inline double limit(nb::handle timeout, nb::handle world) {
  static PyObject* const name = PyUnicode_InternFromString("timeout");
  const nb::object of_world =
      timeout.is_none() ? nb::steal(PyObject_GetAttr(world.ptr(), name)) : nb::borrow(timeout);
  if (!of_world.is_valid() || !(PyFloat_Check(of_world.ptr()) || PyLong_CheckExact(of_world.ptr())))
    return 0;
  const double seconds = PyFloat_AsDouble(of_world.ptr());  // -1 with an error if it is too large
  return std::isfinite(seconds) && seconds > 0 ? seconds : 0;
}

// `CallCache::call` in a world, by default that of this thread or process. None, with nothing done,
// if the call is not cached or must be checked, as in a world that is closed or is no world.
inline nb::object repeat(nb::handle function, nb::handle options, nb::handle a, nb::handle out,
                         nb::handle weights, nb::handle biases, nb::handle world,
                         nb::handle timeout) {
  static PyObject* const repeats = PyUnicode_InternFromString("repeats");
  const nb::object of = world_or_default(world);
  if (!of.is_valid()) return nb::none();
  const nb::object cache = nb::steal(PyObject_GetAttr(of.ptr(), repeats));
  const double seconds = cache.is_valid() && !cache.is_none() ? limit(timeout, of) : 0;
  if (!seconds) {
    clear_only({PyExc_AttributeError, PyExc_OverflowError});
    return nb::none();
  }
  return nb::cast<CallCache&>(cache).call(function, options, a, out, weights, biases, seconds);
}

// What makes a collective that is not repeated, run(check, a, out, options, world, timeout). Not
// released, since Python ends before static objects.
inline PyObject* first_call = nullptr;

inline void set_first_call(nb::handle run) {
  Py_XDECREF(std::exchange(first_call, run.inc_ref().ptr()));
}

// The result of a collective, repeated if it can be.
inline nb::object run(nb::handle check, nb::handle a, nb::handle out, nb::handle options,
                      nb::handle world, nb::handle timeout) {
  const nb::handle none = Py_None;
  if (!a.is_none()) {
    nb::object repeated = repeat(check, options, a, out, none, none, world, timeout);
    if (!repeated.is_none()) return repeated;
  }
  return nb::handle(first_call)(check, a, out, options, world, timeout);
}

}  // namespace weft
