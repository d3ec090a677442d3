// The memory and layout of a tensor, read without Python if torch has an interface for that.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/strided.hpp"
#include "python/gil.hpp"

namespace weft {

namespace nb = nanobind;

// The table `Tensor.__dlpack_c_exchange_api__` of torch 2.10 and later, in the layout of version 1
// of DLPack 1.3.
struct Exchange {
  uint32_t major, minor;
  const Exchange* previous;
  void *allocate, *from_tensor, *to_tensor;
  int (*read)(void* tensor, nb::dlpack::dltensor* out);
};

// The address, dtype (as a number), bytes per element, shape and strides of a tensor; strides count
// elements.
class View {
 public:
  // Set the access to tensors: the types that are plain tensors, and the capsule with torch's
  // `Exchange`, or None if torch has none.
  static void set_access(nb::typed<nb::tuple, nb::handle, nb::ellipsis> plain, nb::handle api) {
    exchange_ =
        api.is_none()
            ? nullptr
            : static_cast<const Exchange*>(PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api"));
    if (PyErr_Occurred()) throw nb::python_error();
    if (exchange_ && exchange_->major != 1) exchange_ = nullptr;
    plain_.clear();
    for (nb::handle type : plain) plain_.push_back(type.inc_ref());  // never released
  }

  uintptr_t address = 0;
  int64_t dtype = 0;
  size_t item = 0;
  bool complex = true;  // or unknown
  const int64_t *shape = nullptr, *strides = nullptr;
  size_t dimensions = 0;

  // Read the properties of a tensor. False if it is not in this process's memory, as a tensor that
  // stands for others is not, or its elements do not consist of full bytes.
  bool read(nb::handle tensor) {
    if (exchange_) {
      if (exchange_->read(tensor.ptr(), &view_)) {
        clear_only({PyExc_RuntimeError});  // torch's for all that it cannot describe
        return false;
      }
      address = reinterpret_cast<uintptr_t>(view_.data) + view_.byte_offset;
      const size_t bits = size_t{view_.dtype.bits} * view_.dtype.lanes;
      dtype = int64_t{view_.dtype.lanes} << 32 | view_.dtype.code << 16 | view_.dtype.bits;
      item = bits / 8;
      complex = view_.dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Complex);
      shape = view_.shape;
      strides = view_.strides;
      dimensions = static_cast<size_t>(view_.ndim);
      return view_.device.device_type == nb::device::cpu::value && bits % 8 == 0 &&
             (address || !span());
    }
    try {
      if (!nb::cast<bool>(tensor.attr("is_cpu"))) return false;
      address = nb::cast<uintptr_t>(tensor.attr("data_ptr")());
      item = nb::cast<size_t>(tensor.attr("itemsize"));
      dtype = reinterpret_cast<intptr_t>(nb::object(tensor.attr("dtype")).ptr());
      shape_ = nb::cast<std::vector<int64_t>>(tensor.attr("shape"));
      strides_ = nb::cast<std::vector<int64_t>>(tensor.attr("stride")());
      shape = shape_.data();
      strides = strides_.data();
      dimensions = shape_.size();
      return true;
    } catch (nb::python_error& error) {
      error.restore();
      clear_only({PyExc_AttributeError, PyExc_NotImplementedError, PyExc_RuntimeError});
      return false;
    }
  }

  // As `read`; false also for a tensor of another type than the plain ones.
  bool read_plain(nb::handle tensor) {
    for (nb::handle type : plain_)
      if (tensor.type().is(type)) return read(tensor);
    return false;
  }

  // Read a plain tensor and append its layout to `numbers`: dtype, shape and strides, but not its
  // address.
  bool add_layout(nb::handle tensor, std::vector<int64_t>& numbers) {
    if (!read_plain(tensor)) return false;
    numbers.push_back(static_cast<int64_t>(dimensions));
    numbers.push_back(dtype);
    for (const int64_t* all : {shape, strides})
      for (size_t i = 0; i < dimensions; ++i) numbers.push_back(all[i]);
    return true;
  }

  // The same, or an entry for None.
  bool add_layout_or_none(nb::handle tensor, std::vector<int64_t>& numbers) {
    if (tensor.is_none()) numbers.push_back(-1);
    return tensor.is_none() || add_layout(tensor, numbers);
  }

  bool same_shape(const View& other) const {
    return std::equal(shape, shape + dimensions, other.shape, other.shape + other.dimensions);
  }

  // Whether its values are equal to memory: no lazy negation or conjugation (torch's bits).
  bool reads_as_stored(nb::handle tensor) const {
    static PyObject *const negated = PyUnicode_InternFromString("is_neg"),
                           *const conjugated = PyUnicode_InternFromString("is_conj");
    auto is = [&](PyObject* method) {
      PyObject* self = tensor.ptr();
      nb::object found = nb::steal(PyObject_VectorcallMethod(method, &self, 1, nullptr));
      if (!found.is_valid()) throw nb::python_error();
      return found.is(Py_True);
    };
    return !is(negated) && !(complex && is(conjugated));
  }

  // The bytes from the first element to the end of the last one.
  size_t span() const { return span_of(item, dimensions, shape, strides); }

 private:
  static inline std::vector<nb::handle> plain_;
  static inline const Exchange* exchange_ = nullptr;
  nb::dlpack::dltensor view_;
  std::vector<int64_t> shape_, strides_;
};

// Whether autograd records operations on a plain tensor: it requires a gradient, and gradients are
// enabled.
inline bool recorded(nb::handle tensor) {
#ifdef Py_LIMITED_API
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  const nb::object found = nb::steal(PyObject_GetAttr(tensor.ptr(), name));
#else  // without a lookup of the attribute, which takes as long as reading it
  static const PyGetSetDef* const getter = [] {
    nb::object attribute = nb::module_::import_("torch").attr("Tensor").attr("requires_grad");
    return reinterpret_cast<PyGetSetDescrObject*>(attribute.release().ptr())->d_getset;
  }();
  const nb::object found = nb::steal(getter->get(tensor.ptr(), getter->closure));
#endif
  if (!found.is_valid()) throw nb::python_error();
  if (!found.is(Py_True)) return false;
  return nb::cast<bool>(nb::module_::import_("torch").attr("is_grad_enabled")());
}

// The layouts of plain tensors as a key: dtypes, shapes and strides; None if one of the tensors is
// not in this process's memory. An item may be None.
inline nb::object layouts(nb::handle tensors) {
  View view;
  std::vector<int64_t> numbers;
  numbers.reserve(24);
  for (nb::handle tensor : tensors)
    if (!view.add_layout_or_none(tensor, numbers)) return nb::none();
  return nb::bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t));
}

// Copy `count` elements of a matrix, spread over it evenly: the same positions for all matrices of
// a shape, or all elements.
template <size_t item>
void sample(const View& view, size_t count, char* to) {
  const uint64_t rows = view.shape[0], columns = view.shape[1];
  const bool all = count == rows * columns;
  for (uint64_t i = 0; i < count; ++i) {
    // fractional parts of multiples of 0.7548… and 0.5698…, which cover a square evenly (Roberts'
    // sequence)
    const uint64_t down = static_cast<uint32_t>(i * 3242174889u),
                   across = static_cast<uint32_t>(i * 2447445414u);
    const uint64_t row = all ? i / columns : down * rows >> 32,
                   column = all ? i % columns : across * columns >> 32;
    std::memcpy(to + i * item,
                reinterpret_cast<const char*>(view.address) +
                    (row * view.strides[0] + column * view.strides[1]) * item,
                item);
  }
}

// A fingerprint of a tensor in this process's memory, to compare it later: address, layout, and
// `sampled` elements of a matrix, or all if there are fewer. None for any other tensor.
inline nb::object fingerprint(nb::handle tensor, size_t sampled) {
  View view;
  if (!view.read(tensor)) return nb::none();
  const bool matrix =
      view.address && view.dimensions == 2 && (view.item == 2 || view.item == 4 || view.item == 8);
  const size_t count =
      matrix ? std::min(sampled, static_cast<size_t>(view.shape[0] * view.shape[1])) : 0;
  const size_t sizes = view.dimensions * sizeof(int64_t), header = 2 * (sizeof(int64_t) + sizes);
  const nb::object found = nb::steal(
      PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(header + count * view.item)));
  if (!found.is_valid()) throw nb::python_error();
  char* const to = PyBytes_AsString(found.ptr());
  const int64_t start[] = {static_cast<int64_t>(view.address), view.dtype};
  std::memcpy(to, start, sizeof start);
  std::memcpy(to + sizeof start, view.shape, sizes);
  std::memcpy(to + sizeof start + sizes, view.strides, sizes);
  if (count)
    (view.item == 2 ? sample<2> : view.item == 4 ? sample<4> : sample<8>)(view, count, to + header);
  return found;
}

// Detects changes of a tensor since the watch was made: writes that torch counts, unless it counts
// none of this tensor's; another address or layout, also of the tensor that it is a view of; and
// other writes, if they change one of `sampled` elements. The tensor lives as long as the watch.
class Watch {
 public:
  Watch(nb::object tensor, bool counted, size_t sampled)
      : tensor_(std::move(tensor)),
        base_(tensor_.attr("_base")),
        counted_(counted),
        sampled_(sampled),
        version_(version()),
        fingerprint_(fingerprint(tensor_, sampled)),
        fingerprint_of_base_(base_.is_none() ? nb::none() : fingerprint(base_, 0)) {}

  bool changed() const {
    return version() != version_ || !fingerprint_.equal(fingerprint(tensor_, sampled_)) ||
           !(base_.is_none() || fingerprint_of_base_.equal(fingerprint(base_, 0)));
  }

 private:
  int64_t version() const { return counted_ ? nb::cast<int64_t>(tensor_.attr("_version")) : 0; }

  nb::object tensor_, base_;
  bool counted_;
  size_t sampled_;
  int64_t version_;
  nb::object fingerprint_, fingerprint_of_base_;
};

}  // namespace weft
