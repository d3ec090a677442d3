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

// The result of `work`, which an active profiler shows as ``weft:NAME``; `name` returns the name.
// Called with the GIL.
template <class Name, class Work>
auto in_range(Name name, Work work) {
  if (!profiled()) return work();  // R1
  const nb::object range = nb::module_::import_("torch.autograd.profiler")
                               .attr("record_function")((std::string("weft:") + name()).c_str());
  const auto end = [&] { range.attr("__exit__")(nb::none(), nb::none(), nb::none()); };
  const auto made = [&] {
    try {
      return work();
    } catch (...) {
      end();
      throw;
    }
  };
  range.attr("__enter__")();
  if constexpr (std::is_void_v<decltype(work())>) {
    made();
    end();
  } else {
    auto result = made();
    end();
    return result;
  }
}

}  // namespace weft
