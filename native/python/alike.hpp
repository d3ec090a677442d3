// What was made for calls, found by how their tensors lie: a look at each of them and no way
// through Python.
#pragma once

#include <cstdint>
#include <utility>

#include "memory/segment.hpp"
#include "python/tensor_view.hpp"

namespace weft {

class Alike : public Remembered<Made, 4096> {
 public:
  // `packed` is the type of weights which have a tensor as an attribute `plain`; `world` is the
  // number of the world whose symmetric memory rows may lie in.
  Alike(nb::object packed, uint64_t world) : packed_(std::move(packed)), world_(world) {}

  void add(nb::object options, nb::handle a, nb::handle weights, nb::handle biases,
           nb::object made) {
    if (look(a, weights, biases)) remember({std::move(options), lies_, std::move(made)});
  }

  // What was made for a call like this; None if nothing was, or `a` are not contiguous rows in this
  // process's memory.
  nb::object find(nb::handle options, nb::handle a, nb::handle weights, nb::handle biases) {
    const auto known = look(a, weights, biases) ? found(options) : nullptr;
    return known ? known->made : nb::none();
  }

 private:
  // Note in `lies_` how all these lie; false for what has to be checked.
  bool look(nb::handle a, nb::handle weights, nb::handle biases) {
    lies_.clear();
    if (!view_.note(a, lies_) || !view_.contiguous()) return false;
    const Segment* within = Segment::around(view_.address);
    if (within && within->world != world_) return false;
    lies_.push_back(within != nullptr);
    for (nb::handle weight : weights) {
      const bool packed = weight.type().is(packed_);
      lies_.push_back(packed);
      if (!view_.note(packed ? nb::object(weight.attr("plain")) : nb::borrow(weight), lies_))
        return false;
    }
    for (nb::handle bias : biases)
      if (!view_.note_any(bias, lies_)) return false;
    return true;
  }

  nb::object packed_;
  uint64_t world_;
};

}  // namespace weft
