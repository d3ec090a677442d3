// What a tensor is, and whether it still is what it was when something was made for it: without a way through Python where torch
// allows it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
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

// How to look at tensors, given the capsule with torch's `Exchange`, or None; null if that cannot be.
inline const Exchange* exchange(nb::handle api) {
  if (api.is_none()) return nullptr;
  auto* found = static_cast<const Exchange*>(PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api"));
  if (!found) throw nb::python_error();
  return found->major == 1 ? found : nullptr;
}

// A matrix whose rows are contiguous and begin `stride` bytes apart.
struct Matrix {
  uintptr_t address;
  size_t rows, columns, stride;
};

// Throws std::invalid_argument for a tensor that is none.
inline Matrix matrix(nb::handle tensor, const Exchange* exchange) {
  using Sizes = std::vector<int64_t>;
  auto of = [&](uintptr_t address, size_t item, size_t dimensions, const int64_t* shape, const int64_t* strides) -> Matrix {
    if (dimensions != 2 || (shape[1] > 1 && strides[1] != 1))
      throw std::invalid_argument(std::string("a buffer is a matrix with contiguous rows; got shape ") +
                                  nb::str(nb::tuple(tensor.attr("shape"))).c_str() + ", strides " +
                                  nb::str(tensor.attr("stride")()).c_str());
    const size_t rows = static_cast<size_t>(shape[0]), columns = static_cast<size_t>(shape[1]);
    return {address, rows, columns, (rows > 1 ? static_cast<size_t>(strides[0]) : columns) * item};
  };
  if (!exchange) {
    const auto shape = nb::cast<Sizes>(tensor.attr("shape")), strides = nb::cast<Sizes>(tensor.attr("stride")());
    return of(nb::cast<uintptr_t>(tensor.attr("data_ptr")()), nb::cast<size_t>(tensor.attr("itemsize")), shape.size(), shape.data(),
              strides.data());
  }
  nb::dlpack::dltensor view;
  if (exchange->look(tensor.ptr(), &view)) throw nb::python_error();
  return of(reinterpret_cast<uintptr_t>(view.data) + view.byte_offset, view.dtype.bits / 8, view.ndim, view.shape, view.strides);
}

// Looks at plain tensors in this process's memory.
class Eye {
 public:
  // What was seen last: where, the dtype as a number, the bytes of an element, and sizes in elements.
  uintptr_t address;
  int64_t dtype;
  size_t item;
  const int64_t *shape, *strides;
  size_t dimensions;

  // `plain` are the types of such tensors, `api` is the capsule with torch's `Exchange`, or None.
  Eye(nb::tuple plain, nb::handle api) : plain_(std::move(plain)), exchange_(exchange(api)) {}

  // False for anything else.
  bool look(nb::handle tensor) {
    bool plain = false;
    for (nb::handle type : plain_) plain = plain || tensor.type().is(type);
    if (!plain) return false;
    if (exchange_) {
      if (exchange_->look(tensor.ptr(), &view_)) {
        PyErr_Clear();  // one without a place in memory
        return false;
      }
      address = reinterpret_cast<uintptr_t>(view_.data) + view_.byte_offset;
      dtype = view_.dtype.code << 16 | view_.dtype.bits, item = view_.dtype.bits / 8;
      shape = view_.shape, strides = view_.strides, dimensions = static_cast<size_t>(view_.ndim);
      return view_.device.device_type == nb::device::cpu::value;
    }
    try {
      if (!nb::cast<bool>(tensor.attr("is_cpu"))) return false;
      address = nb::cast<uintptr_t>(tensor.attr("data_ptr")()), item = nb::cast<size_t>(tensor.attr("itemsize"));
      dtype = reinterpret_cast<intptr_t>(nb::object(tensor.attr("dtype")).ptr());
      shape_ = nb::cast<std::vector<int64_t>>(tensor.attr("shape")), strides_ = nb::cast<std::vector<int64_t>>(tensor.attr("stride")());
      shape = shape_.data(), strides = strides_.data(), dimensions = shape_.size();
      return true;
    } catch (const nb::python_error&) {
      return false;
    }
  }

  bool contiguous() const {
    int64_t below = 1;
    for (size_t dim = dimensions; dim-- > 0; below *= shape[dim])
      if (shape[dim] != 1 && strides[dim] != below) return false;
    return true;
  }

  // The bytes from the first element to behind the last.
  size_t span() const {
    size_t last = 0;
    for (size_t dim = 0; dim < dimensions; ++dim) {
      if (!shape[dim]) return 0;
      last += static_cast<size_t>((shape[dim] - 1) * strides[dim]);
    }
    return (last + 1) * item;
  }

  // Add how it lies, but not where: its dtype, shape and strides.
  void add_layout(std::vector<int64_t>& numbers) const {
    numbers.push_back(static_cast<int64_t>(dimensions));
    numbers.push_back(dtype);
    for (const int64_t* all : {shape, strides}) numbers.insert(numbers.end(), all, all + dimensions);
  }

 private:
  nb::tuple plain_;
  const Exchange* exchange_;
  nb::dlpack::dltensor view_;
  std::vector<int64_t> shape_, strides_;
};

// A name of numbers, and of what can be hashed in Python.
inline uint64_t mixed(const std::vector<int64_t>& numbers, nb::handle options) {
  uint64_t name = static_cast<uint64_t>(PyObject_Hash(options.ptr()));
  if (PyErr_Occurred()) PyErr_Clear();  // what is wrong with options that cannot be hashed is said by who checks them
  for (int64_t number : numbers) {
    name = (name ^ static_cast<uint64_t>(number)) * 0x9e3779b97f4a7c15;
    name ^= name >> 32;
  }
  return name;
}

// How plain tensors of this process's memory lie, but not where, to find what was made for tensors that lie like these; None if one is
// something else. Where there is none, None stands for it.
inline nb::object layouts(nb::handle tensors, nb::tuple plain, nb::handle api) {
  Eye eye(std::move(plain), api);
  std::vector<int64_t> numbers;
  numbers.reserve(24);
  for (nb::handle tensor : tensors) {
    if (tensor.is_none())
      numbers.push_back(-1);
    else if (eye.look(tensor))
      eye.add_layout(numbers);
    else
      return nb::none();
  }
  return nb::bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t));
}

// Whether two vectors of one dtype, of this process's memory, have the same bytes.
inline bool same_vectors(nb::handle one, nb::handle other, nb::handle api) {
  const Exchange* look = exchange(api);
  nb::dlpack::dltensor a, b;
  if (!look || look->look(one.ptr(), &a) || look->look(other.ptr(), &b)) throw nb::python_error();
  if (a.ndim != 1 || b.ndim != 1 || a.dtype != b.dtype || a.shape[0] != b.shape[0]) return false;
  const size_t item = a.dtype.bits / 8;
  for (int64_t i = 0; i < a.shape[0]; ++i)
    if (std::memcmp(static_cast<char*>(a.data) + i * a.strides[0] * item, static_cast<char*>(b.data) + i * b.strides[0] * item, item))
      return false;
  return true;
}

// Identity, address, dtype, shape and strides of a tensor. Identities are used again once a tensor is gone, and the rest can be
// changed in place.
class TensorSnapshot {
 public:
  // `api` is the capsule with torch's `Exchange`, or None.
  TensorSnapshot(nb::handle tensor, nb::handle api) : identity_(nb::steal(PyWeakref_NewRef(tensor.ptr(), nullptr))) {
    if (!identity_.is_valid()) throw nb::python_error();
    exchange_ = exchange(api);
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
