// What a tensor was when something was made for it, compared with what it is without a way through Python where torch allows it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <vector>

namespace weft {

namespace nb = nanobind;

// What torch 2.10 and later offer as `Tensor.__dlpack_c_exchange_api__`; of DLPack 1.3, whose first version this layout belongs to.
struct Exchange {
  uint32_t major, minor;
  const Exchange* previous;
  void *allocate, *from_tensor, *to_tensor;
  int (*look)(void* tensor, nb::dlpack::dltensor* out);
};

// Identity, address, dtype, shape and strides of a tensor. Identities are used again once a tensor is gone, and the rest can be
// changed in place.
class TensorSnapshot {
 public:
  // `api` is the capsule with torch's `Exchange`, or None.
  TensorSnapshot(nb::handle tensor, nb::handle api) : identity_(nb::steal(PyWeakref_NewRef(tensor.ptr(), nullptr))) {
    if (!identity_.is_valid()) throw nb::python_error();
    if (!api.is_none()) exchange_ = static_cast<const Exchange*>(PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api"));
    if (PyErr_Occurred()) throw nb::python_error();
    if (exchange_ && exchange_->major != 1) exchange_ = nullptr;
    if (!exchange_) {
      for (const char* name : kAttributes) attributes_.push_back(attribute(tensor, name));
      return;
    }
    if (exchange_->look(tensor.ptr(), &view_)) throw nb::python_error();
    for (const int64_t* all : {view_.shape, view_.strides}) sizes_.insert(sizes_.end(), all, all + view_.ndim);
  }

  bool matches(nb::handle tensor) const {
    if (!identity_().is(tensor)) return false;
    if (!exchange_)
      return std::equal(attributes_.begin(), attributes_.end(), kAttributes,
                        [&](const nb::object& was, const char* name) { return was.equal(attribute(tensor, name)); });
    nb::dlpack::dltensor now;
    if (exchange_->look(tensor.ptr(), &now)) {
      PyErr_Clear();  // it has become one that cannot be looked at
      return false;
    }
    const int64_t* was = sizes_.data();
    return now.data == view_.data && now.ndim == view_.ndim && now.dtype == view_.dtype &&
           std::equal(now.shape, now.shape + now.ndim, was) && std::equal(now.strides, now.strides + now.ndim, was + now.ndim);
  }

 private:
  static constexpr const char* kAttributes[] = {"data_ptr", "dtype", "shape", "stride"};

  static nb::object attribute(nb::handle tensor, const char* name) {
    nb::object value = tensor.attr(name);
    return PyCallable_Check(value.ptr()) ? value() : value;  // data_ptr and stride are methods
  }

  nb::object identity_;
  const Exchange* exchange_ = nullptr;
  nb::dlpack::dltensor view_{};
  std::vector<int64_t> sizes_;  // shape, then strides
  std::vector<nb::object> attributes_;
};

}  // namespace weft
