// Weak references to Python objects.
#pragma once

#include <nanobind/nanobind.h>

namespace weft {

namespace nb = nanobind;

inline nb::object weak_reference(nb::handle to) {
  nb::object made = nb::steal(PyWeakref_NewRef(to.ptr(), nullptr));
  if (!made.is_valid()) throw nb::python_error();
  return made;
}

// The object of a weak reference; None, or null, if it is gone.
inline nb::object referent(nb::handle weak) {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* there = nullptr;
  if (PyWeakref_GetRef(weak.ptr(), &there) < 0) throw nb::python_error();
  return nb::steal(there);
#else  // deprecated in newer versions of Python
  return nb::borrow(PyWeakref_GetObject(weak.ptr()));
#endif
}

}  // namespace weft
