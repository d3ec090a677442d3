// The modes of torch that a repeated call depends on: those in which it is checked in Python first,
// modes of this thread that see the operators of torch, such as those that trace them, and
// forward-mode gradients; and deterministic algorithms, for which other variants are selected.
#pragma once

#include <dlfcn.h>
#include <nanobind/nanobind.h>

#include <cstdint>

namespace weft {

namespace nb = nanobind;

// A function of one of torch's libraries, by its mangled name; null if it does not exist. To call
// it through Python would take a part of the time of a small call.
template <class Function>
Function* of_torch(const char* library, const char* name) {
  void* torch = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Function*>(dlsym(torch ? torch : RTLD_DEFAULT, name));
}

// The number of this thread's dispatch modes.
inline int64_t dispatch_modes() {
  static const auto count =
      of_torch<int64_t()>("libc10.so", "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv");
  if (count) return count();
  return nb::cast<int64_t>(nb::module_::import_("torch._C").attr("_len_torch_dispatch_stack")());
}

// Whether torch is to use deterministic algorithms only.
inline bool deterministic() {
  static const auto context = of_torch<void*()>("libtorch_cpu.so", "_ZN2at13globalContextEv");
  static const auto asked =
      of_torch<bool(const void*)>("libtorch_cpu.so", "_ZNK2at7Context23deterministicAlgorithmsEv");
  if (context && asked) return asked(context());
  const auto torch = nb::module_::import_("torch");
  return nb::cast<bool>(torch.attr("are_deterministic_algorithms_enabled")());
}

// Whether tensors may have tangents: forward-mode gradients are under way in this process.
inline bool forward_gradients() {
  static PyObject* const variables =  // not released, since Python ends before static objects
      nb::object(nb::module_::import_("torch.autograd.forward_ad").attr("__dict__"))
          .release()
          .ptr();
  static PyObject* const level = PyUnicode_InternFromString("_current_level");
  PyObject* const found = PyDict_GetItemWithError(variables, level);
  return found && PyLong_AsLong(found) >= 0;
}

inline bool checked_modes() { return dispatch_modes() || forward_gradients(); }

}  // namespace weft
