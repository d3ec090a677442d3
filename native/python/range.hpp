// Ranges of calls that torch's profilers show, made by `torch.profiler.record_function`.
//
// R1  Without an active profiler a range costs one look-up in a dictionary.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <type_traits>
#include <utility>

namespace weft {

namespace nb = nanobind;

// Whether a profiler of torch's is active: `torch.profiler.profile`, or `emit_nvtx` or `emit_itt`
// of `torch.autograd.profiler`, which make ranges of NVTX or ITT.
inline bool profiled() {
  // not released, since Python ends before static objects
  static PyObject* const variables =
      nb::object(nb::module_::import_("torch.autograd.profiler").attr("__dict__")).release().ptr();
  static PyObject* const name = PyUnicode_InternFromString("_is_profiler_enabled");
  return PyDict_GetItemWithError(variables, name) == Py_True;
}

// A range that has begun, and ends with `end`, or with the exception that leaves its block.
class Range {
 public:
  explicit Range(const std::string& name)
      : shown_(
            nb::module_::import_("torch.autograd.profiler").attr("record_function")(name.c_str())) {
    shown_.attr("__enter__")();
  }
  ~Range() {
    try {
      if (shown_.is_valid()) end();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("the range of a call");
    }
  }
  void end() {
    const nb::object shown = std::exchange(shown_, {});
    shown.attr("__exit__")(nb::none(), nb::none(), nb::none());
  }

 private:
  nb::object shown_;
};

// The result of `work`, which an active profiler shows as ``weft:NAME``; `name` returns the name.
// Called with the GIL.
template <class Name, class Work>
auto in_range(Name name, Work work) {
  if (!profiled()) return work();  // R1
  Range range(std::string("weft:") + name());
  if constexpr (std::is_void_v<decltype(work())>) {
    work();
    range.end();
  } else {
    auto result = work();
    range.end();
    return result;
  }
}

}  // namespace weft
