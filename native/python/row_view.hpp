// A matrix of a tensor whose rows are contiguous.
#pragma once

#include <stdexcept>

#include "python/tensor_view.hpp"

namespace weft {

// A matrix in this process's memory with contiguous rows; throws for any other tensor.
struct RowView : View {
  size_t stride;  // elements between rows

  explicit RowView(nb::handle tensor) {
    if (!read(tensor) || dimensions != 2 || (shape[1] > 1 && strides[1] != 1))
      throw std::invalid_argument("rows of experts are those of a matrix on the CPU, contiguous");
    stride = static_cast<size_t>(shape[0] > 1 ? strides[0] : shape[1]);
  }
  size_t rows() const { return static_cast<size_t>(shape[0]); }
  size_t columns() const { return static_cast<size_t>(shape[1]); }
  template <class T>
  T* row(size_t number) const {
    return reinterpret_cast<T*>(address + number * stride * item);
  }
};

}  // namespace weft
