// What was made for calls, found by how their tensors lie: a look at each of them and no way through Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "segment.hpp"
#include "tensor_view.hpp"

namespace weft {

class Alike {
 public:
  static PyType_Slot slots[];  // through which the garbage collector sees what is held here

  // `plain` are the types of tensors, `packed` that of weights which have theirs as an attribute `plain`; `world` is the number of the
  // world whose symmetric memory rows may lie in; `api` is the capsule with torch's `Exchange`, or None.
  Alike(nb::tuple plain, nb::object packed, uint64_t world, nb::handle api)
      : eye_(std::move(plain), api), packed_(std::move(packed)), world_(world) {}

  void add(nb::object options, nb::handle a, nb::handle weights, nb::handle biases, nb::object made) {
    uint64_t name;
    if (!look(options, a, weights, biases, name)) return;
    if (made_.size() >= kMost) clear();
    made_[name] = {std::move(options), lies_, std::move(made)};
  }

  // What was made for a call like this; None if nothing was, or `a` are not contiguous rows in this process's memory.
  nb::object find(nb::handle options, nb::handle a, nb::handle weights, nb::handle biases) {
    uint64_t name;
    if (!look(options, a, weights, biases, name)) return nb::none();
    const auto found = made_.find(name);
    if (found == made_.end() || found->second.lies != lies_ || !found->second.options.equal(options)) return nb::none();
    return found->second.made;
  }

  void clear() { std::exchange(made_, {}); }  // ends of objects may run Python code that comes back here
  size_t size() const { return made_.size(); }

 private:
  struct Made {
    nb::object options;
    std::vector<int64_t> lies;
    nb::object made;
  };
  static constexpr size_t kMost = 4096;

  // Note in `lies_` how all these lie, and name it; false for what has to be checked.
  bool look(nb::handle options, nb::handle a, nb::handle weights, nb::handle biases, uint64_t& name) {
    lies_.clear();
    if (!note(a) || !eye_.contiguous()) return false;
    const Segment* within = Segment::around(eye_.address);
    if (within && within->world != world_) return false;
    lies_.push_back(within != nullptr);
    for (nb::handle weight : weights) {
      const bool packed = weight.type().is(packed_);
      lies_.push_back(packed);
      if (!(packed ? note(nb::object(weight.attr("plain"))) : note(weight))) return false;
    }
    for (nb::handle bias : biases) {
      if (bias.is_none())
        lies_.push_back(-1);
      else if (!note(bias))
        return false;
    }
    name = mixed(lies_, options);
    return true;
  }

  bool note(nb::handle tensor) {
    if (!eye_.look(tensor)) return false;
    eye_.add_layout(lies_);
    return true;
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    for (auto& [name, known] : nb::inst_ptr<Alike>(self)->made_) Py_VISIT(known.made.ptr());
    return 0;
  }
  static int release(PyObject* self) {
    nb::inst_ptr<Alike>(self)->clear();
    return 0;
  }

  Eye eye_;
  nb::object packed_;
  uint64_t world_;
  std::unordered_map<uint64_t, Made> made_;
  std::vector<int64_t> lies_;  // how the tensors of the latest call lie; kept for its room
};

inline PyType_Slot Alike::slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(release)}, {0, nullptr}};

}  // namespace weft
