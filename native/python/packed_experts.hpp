// Packed experts of a rank for Python.
#pragma once

#include <memory>
#include <new>
#include <stdexcept>

#include "kernels/experts.hpp"
#include "python/row_view.hpp"

namespace weft {

class PackedExperts {
  // Matrices in this process's memory, one for each expert.
  struct Stack : View {
    explicit Stack(nb::handle tensor) {
      if (!read(tensor) || dimensions != 3)
        throw std::invalid_argument("weights of experts have three dimensions, on the CPU");
    }
    experts::Stack native() const {
      return {reinterpret_cast<const char*>(address), static_cast<size_t>(strides[0]),
              static_cast<size_t>(strides[1]), static_cast<size_t>(strides[2])};
    }
  };

 public:
  // Packs gate and up (experts, 2 * inner, width), and down (experts, width, inner).
  PackedExperts(nb::handle gate_up, nb::handle down, Dtype dtype, half::Activation activation,
                int64_t first) {
    const Stack from(gate_up), back(down);
    product_.shape = {dtype, static_cast<size_t>(from.shape[0]), static_cast<size_t>(from.shape[2]),
                      static_cast<size_t>(back.shape[2])};
    const auto& shape = product_.shape;
    if (back.shape[0] != from.shape[0] || back.shape[1] != from.shape[2] ||
        from.shape[1] != 2 * back.shape[2] || from.item != size_of(dtype) ||
        back.item != size_of(dtype))
      throw std::invalid_argument("the shapes or dtypes of gate_up and down do not fit");
    if (!half::columns())
      throw std::invalid_argument("this processor lacks the instructions for packed experts");
    gate_up_ = allocate(shape.count * shape.gate_up_elements() * from.item);
    down_ = allocate(shape.count * shape.down_elements() * from.item);
    product_.gate_up = gate_up_.get(), product_.down = down_.get();
    product_.activation = activation, product_.first = first;
    nb::gil_scoped_release release;
    experts::pack(shape, from.native(), back.native(), gate_up_.get(), down_.get());
  }

  // Each token's weighted sum of the experts that it chose: x (tokens, width), chosen and scores
  // (tokens, top), out (tokens, width).
  void sums(nb::handle x, nb::handle chosen, nb::handle scores, nb::handle out,
            Dtype out_dtype) const {
    const RowView choices(chosen), factors(scores);
    const experts::Routing routing{choices.row<const char>(0),  choices.stride, choices.item == 8,
                                   factors.row<const float>(0), factors.stride, choices.columns()};
    multiply(RowView(x), routing, RowView(out), out_dtype);
  }

 private:
  struct Free {
    void operator()(char* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
  };
  using Memory = std::unique_ptr<char[], Free>;

  static Memory allocate(size_t bytes) {
    return Memory(static_cast<char*>(::operator new[](bytes, std::align_val_t{64})));
  }

  void multiply(const RowView& x, const experts::Routing& routing, const RowView& out,
                Dtype out_dtype) const {
    experts::Product product = product_;
    product.routing = routing;
    product.out_dtype = out_dtype;
    product.x = x.row<const char>(0), product.x_stride = x.stride;
    product.out = out.row<char>(0), product.out_stride = out.stride;
    product.tokens = x.rows();
    nb::gil_scoped_release release;
    experts::multiply(product);
  }

  experts::Product product_{};
  Memory gate_up_, down_;
};

}  // namespace weft
