// Calls that were made before, found by the tensors and options they were made with: to make one again is one native call.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>

#include "compiled.hpp"
#include "tensor_snapshot.hpp"

namespace weft {

class Repeats {
 public:
  static PyType_Slot slots[];  // through which the garbage collector sees what is held here

  explicit Repeats(Executor& executor) : executor_(executor) {}

  // Remember that `what` with these tensors and options is an execution of `program`, of one lane, with `binding`; both as they are
  // in `weft.engines.host`.
  void add(nb::object what, nb::handle a, nb::handle out, nb::object options, nb::object program, nb::object binding, nb::handle look) {
    if (known_.size() >= kMost) clear();
    auto* compiled = nb::cast<Compiled*>(program.attr("native"));
    auto* bound = nb::cast<const Binding*>(binding.attr("native"));
    known_[name(what, a, out, options)] =
        std::make_shared<Call>(Call{what, options, program, binding, {a, look}, {out, look}, *compiled, *bound});
  }

  // Make the call again, if it was made before and its tensors are as they were; else do nothing: false. Raises what the call does.
  bool call(nb::handle what, nb::handle a, nb::handle out, nb::handle options, double timeout) {
    auto found = known_.find(name(what, a, out, options));
    if (found == known_.end()) return false;
    const std::shared_ptr<Call> held = found->second;  // whatever Python does meanwhile
    const Call& known = *held;
    if (!known.what.is(what) || !known.options.equal(options)) return false;
    if (!known.a.matches(a) || !(out.is(a) || known.out.matches(out))) return false;
    if (executor_.must_meet(known.compiled.program)) known.program.attr("engine").attr("meet")(timeout);
    if (known.compiled.execution.binding != &known.bound) known.program.attr("apply")(known.binding);
    try {
      if (execute(executor_, known.compiled, timeout)) return true;
    } catch (nb::python_error& error) {  // what a signal handler raised
      known.program.attr("world").attr("fail")(error.value());
      throw;
    }
    const nb::object error = known.program.attr("stopped")(0, timeout);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    throw nb::python_error();
  }

  void clear() { std::exchange(known_, {}); }  // ends of objects may run Python code that comes back here
  size_t size() const { return known_.size(); }

 private:
  struct Call {
    nb::object what, options, program, binding;
    TensorSnapshot a, out;
    Compiled& compiled;
    const Binding& bound;
  };
  static constexpr size_t kMost = 1024;

  static uint64_t name(nb::handle what, nb::handle a, nb::handle out, nb::handle options) {
    uint64_t mixed = static_cast<uint64_t>(PyObject_Hash(options.ptr()));
    if (PyErr_Occurred()) PyErr_Clear();  // what is wrong with options that cannot be hashed is said by who checks them
    for (nb::handle each : {what, a, out}) {
      mixed = (mixed ^ reinterpret_cast<uintptr_t>(each.ptr())) * 0x9e3779b97f4a7c15;
      mixed ^= mixed >> 32;
    }
    return mixed;
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    for (auto& [name, known] : nb::inst_ptr<Repeats>(self)->known_) Py_VISIT(known->program.ptr());
    return 0;
  }
  static int release(PyObject* self) {
    nb::inst_ptr<Repeats>(self)->clear();
    return 0;
  }

  Executor& executor_;
  std::unordered_map<uint64_t, std::shared_ptr<Call>> known_;
};

inline PyType_Slot Repeats::slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(release)}, {0, nullptr}};

}  // namespace weft
