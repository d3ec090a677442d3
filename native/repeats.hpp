// Calls that were made before, found by what they are made of: to make one again, on tensors that lie alike, is one native call.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "compiled.hpp"
#include "segment.hpp"
#include "tensor_view.hpp"

namespace weft {

class Repeats {
 public:
  static PyType_Slot slots[];  // through which the garbage collector sees what is held here

  // `plain` and `api` as an `Eye` takes them.
  Repeats(Executor& executor, int rank, nb::tuple plain, nb::handle api) : executor_(executor), rank_(rank), eye_(std::move(plain), api) {}

  // Remember that `what` with these tensors and options is an execution of `program`, of one lane, with `binding`; both as they are
  // in `weft.engines.host`. `tensors` are those of the program's buffers, each of which lies within `a` or `out`.
  void add(nb::object what, nb::handle a, nb::handle out, nb::object options, nb::object program, nb::object binding,
           nb::handle tensors) {
    if (!look(what, a, out)) return;
    std::vector<Moved> moved;
    for (auto [name, tensor] : nb::cast<nb::dict>(tensors)) {
      if (!eye_.look(tensor)) return;
      if (!eye_.span()) continue;
      const bool within_out = eye_.address - out_.address < out_.bytes;
      if (!within_out && eye_.address - a_.address >= a_.bytes) return;
      const uintptr_t begin = within_out ? out_.address : a_.address;
      moved.push_back({nb::cast<uint32_t>(program.attr("numbers")[name]), within_out, eye_.address - begin});
    }
    if (known_.size() >= kMost) clear();
    auto* compiled = nb::cast<Compiled*>(program.attr("native"));
    auto* bound = nb::cast<Binding*>(binding.attr("native"));
    known_[mixed(lies_, options)] =
        std::make_shared<Call>(Call{what, options, program, binding, lies_, std::move(moved), {}, {}, *compiled, *bound});
  }

  // Make the call again, if one like it was made before; else do nothing: false. Raises what the call does.
  bool call(nb::handle what, nb::handle a, nb::handle out, nb::handle options, double timeout) {
    if (!look(what, a, out)) return false;
    auto found = known_.find(mixed(lies_, options));
    if (found == known_.end()) return false;
    const std::shared_ptr<Call> held = found->second;  // whatever Python does meanwhile
    Call& known = *held;
    if (!known.what.is(what) || known.lies != lies_ || !known.options.equal(options)) return false;
    if (!same(known.out, out)) {
      if (nb::cast<bool>(out.attr("requires_grad")) || !eye_.read_as_they_lie(out)) return false;  // who checks may have something to say
      known.out = weak(out);
    }
    if (!out.is(a) && !same(known.a, a)) {
      if (!eye_.read_as_they_lie(a)) return false;
      known.a = weak(a);
    }
    const Place from = a_, to = out_;
    if (executor_.must_meet(known.compiled.program)) known.program.attr("engine").attr("meet")(timeout);
    if (known.compiled.execution.binding != &known.bound) known.program.attr("apply")(known.binding);
    for (const Moved& one : known.moved)
      known.bound.move(known.compiled.program, rank_, one.buffer, (one.within_out ? to : from).address + one.offset);
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
  // A buffer of the caller's: where it begins within one of the tensors.
  struct Moved {
    uint32_t buffer;
    bool within_out;
    uintptr_t offset;
  };
  struct Place {
    uintptr_t address = 0;
    size_t bytes = 0;
  };
  struct Call {
    nb::object what, options, program, binding;
    std::vector<int64_t> lies;
    std::vector<Moved> moved;
    nb::object a, out;  // weak references to the tensors of the latest call, which need not be looked at twice
    Compiled& compiled;
    Binding& bound;
  };
  static constexpr size_t kMost = 1024;
  static constexpr int64_t kApart = std::numeric_limits<int64_t>::min();

  // Note in `lies_` how the tensors lie, where in symmetric memory, and where to each other if they overlap.
  bool look(nb::handle what, nb::handle a, nb::handle out) {
    lies_.assign(1, reinterpret_cast<intptr_t>(what.ptr()));
    if (!note(a, a_) || !note(out, out_)) return false;
    const bool overlap = a_.address - out_.address < out_.bytes || out_.address - a_.address < a_.bytes;
    lies_.push_back(overlap ? static_cast<int64_t>(out_.address - a_.address) : kApart);
    return true;
  }

  bool note(nb::handle tensor, Place& place) {
    if (!eye_.look(tensor)) return false;
    place = {eye_.address, eye_.span()};
    eye_.add_layout(lies_);
    if (const Segment* within = Segment::around(place.address))  // peers have it where theirs is
      for (uint64_t each : {within->world, within->number, uint64_t{place.address}}) lies_.push_back(static_cast<int64_t>(each));
    return place.bytes > 0;
  }

  static bool same(const nb::object& weak, nb::handle tensor) { return weak.is_valid() && weak().is(tensor); }
  static nb::object weak(nb::handle tensor) {
    nb::object made = nb::steal(PyWeakref_NewRef(tensor.ptr(), nullptr));
    if (!made.is_valid()) throw nb::python_error();
    return made;
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
  int rank_;
  Eye eye_;
  Place a_, out_;              // of the latest call that was looked for
  std::vector<int64_t> lies_;  // how its tensors lie; kept for its room
  std::unordered_map<uint64_t, std::shared_ptr<Call>> known_;
};

inline PyType_Slot Repeats::slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(release)}, {0, nullptr}};

}  // namespace weft
