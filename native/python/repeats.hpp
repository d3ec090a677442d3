// Calls that were made before, found by what they are made of: to make one again, on tensors that
// lie alike, is one native call.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "python/execute.hpp"
#include "memory/segment.hpp"
#include "python/tensor_view.hpp"

namespace weft {

// A buffer of the caller's: where it begins within one of the tensors.
struct Moved {
  uint32_t buffer;
  bool within_out;
  uintptr_t offset;
};

// A call that was made before; what was made for it is its program. The address of `what` is in
// `lies`, so it lives as long.
struct Repeated : Made {
  nb::object what, binding;
  std::vector<Moved> moved;
  Binding& bound;
  // weak references to the tensors of the latest call, which need not be looked at twice
  nb::object a = {}, out = {};
};

class Repeats : public Remembered<Repeated, 1024> {
 public:
  explicit Repeats(Executor& executor) : executor_(executor) {}

  // Remember that `what` with these tensors and options is an execution of `program`, of one lane,
  // with `binding`; both as they are in `weft.engines.host`. `tensors` are those of the program's
  // buffers, each of which lies within `a` or `out`.
  void add(nb::object what, nb::handle a, nb::handle out, nb::object options, nb::object program,
           nb::object binding, nb::handle tensors) {
    if (!look(what, a, out)) return;
    auto& bound = nb::cast<Binding&>(binding);
    std::vector<Moved> moved;
    for (auto [name, tensor] : nb::cast<nb::dict>(tensors)) {
      if (!view_.look(tensor)) return;
      if (!view_.span()) continue;
      const bool within_out = view_.address - out_.address < out_.bytes;
      if (!within_out && view_.address - a_.address >= a_.bytes) return;
      const uintptr_t begin = within_out ? out_.address : a_.address;
      moved.push_back({bound.program().number(nb::cast<std::string_view>(name)), within_out,
                       view_.address - begin});
    }
    remember({{options, lies_, program}, what, binding, std::move(moved), bound});
  }

  // Make the call again, if one like it was made before; else do nothing: false. Raises what the
  // call does.
  bool call(nb::handle what, nb::handle a, nb::handle out, nb::handle options, double timeout) {
    if (!look(what, a, out)) return false;
    const std::shared_ptr<Repeated> held = found(options);
    if (!held) return false;
    Repeated& known = *held;
    // who checks may have something to say
    if (recorded(out) || (!out.is(a) && recorded(a))) return false;
    if (!same(known.out, out)) {
      if (!view_.read_as_they_lie(out)) return false;
      known.out = weak(out);
    }
    if (!out.is(a) && !same(known.a, a)) {
      if (!view_.read_as_they_lie(a)) return false;
      known.a = weak(a);
    }
    in_turn(executor_, known.made, [&] {
      for (const Moved& one : known.moved)
        known.bound.move(one.buffer, (one.within_out ? out_ : a_).address + one.offset);
      execute(executor_, known.made, known.bound, timeout);
    });
    return true;
  }

 private:
  struct Place {
    uintptr_t address = 0;
    size_t bytes = 0;
  };
  static constexpr int64_t kApart = std::numeric_limits<int64_t>::min();

  // Note in `lies_` how the tensors lie, where in symmetric memory, and where to each other if they
  // overlap.
  bool look(nb::handle what, nb::handle a, nb::handle out) {
    lies_.assign(1, reinterpret_cast<intptr_t>(what.ptr()));
    if (!note(a, a_)) return false;
    if (out.is(a))
      out_ = a_;
    else if (!note(out, out_))
      return false;
    const bool overlap =
        a_.address - out_.address < out_.bytes || out_.address - a_.address < a_.bytes;
    lies_.push_back(overlap ? static_cast<int64_t>(out_.address - a_.address) : kApart);
    return true;
  }

  bool note(nb::handle tensor, Place& place) {
    if (!view_.note(tensor, lies_)) return false;
    place = {view_.address, view_.span()};
    if (const Segment* within = Segment::around(place.address))  // peers have it where theirs is
      for (uint64_t each : {within->world, within->number, uint64_t{place.address}})
        lies_.push_back(static_cast<int64_t>(each));
    return place.bytes > 0;
  }

  static bool same(const nb::object& weak, nb::handle tensor) {
    if (!weak.is_valid()) return false;
#if PY_VERSION_HEX >= 0x030d0000
    PyObject* there = nullptr;
    if (PyWeakref_GetRef(weak.ptr(), &there) < 0) throw nb::python_error();
    return nb::steal(there).is(tensor);
#else  // which newer ones want to be rid of
    return PyWeakref_GetObject(weak.ptr()) == tensor.ptr();
#endif
  }
  static nb::object weak(nb::handle tensor) {
    nb::object made = nb::steal(PyWeakref_NewRef(tensor.ptr(), nullptr));
    if (!made.is_valid()) throw nb::python_error();
    return made;
  }

  Executor& executor_;
  Place a_, out_;  // of the latest call that was looked for
};

}  // namespace weft
