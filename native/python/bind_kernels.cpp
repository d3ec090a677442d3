#include <cstdlib>
#include <system_error>

#include "kernels/clock.hpp"
#include "kernels/copy.hpp"
#include "kernels/half_product.hpp"
#include "kernels/reduce.hpp"
#include "kernels/stores.hpp"
#include "kernels/team.hpp"
#include "kernels/vectors.hpp"
#include "python/bind.hpp"
#include "python/packed_experts.hpp"
#include "python/tensor_view.hpp"
#include "python/visits.hpp"

using namespace nanobind::literals;

namespace weft {

namespace {

// A matrix in this process's memory; throws std::invalid_argument for any other tensor.
struct Matrix {
  char* data;
  size_t rows, columns, row_stride, column_stride;

  explicit Matrix(nb::handle tensor) {
    View view;
    if (!view.read(tensor) || view.dimensions != 2)
      throw std::invalid_argument("a factor of a product is a matrix on the CPU");
    data = reinterpret_cast<char*>(view.address);
    rows = static_cast<size_t>(view.shape[0]), columns = static_cast<size_t>(view.shape[1]);
    // strides that lead to no element are any numbers
    row_stride = rows > 1 ? static_cast<size_t>(view.strides[0]) : columns;
    column_stride = rows && columns > 1 ? static_cast<size_t>(view.strides[1]) : 1;
  }
  half::Matrix halves() const {
    return {reinterpret_cast<const uint16_t*>(data), row_stride, column_stride};
  }
};

void half_product(nb::handle rows, nb::handle weight, nb::handle result, uintptr_t bias,
                  Dtype dtype, Dtype out_dtype, bool packed) {
  const Matrix x(rows), b(weight), out(result);
  if (x.column_stride != 1 || out.column_stride != 1)
    throw std::invalid_argument("rows of a product are contiguous");
  const half::Product product{dtype,
                              out_dtype,
                              reinterpret_cast<const uint16_t*>(x.data),
                              x.row_stride,
                              out.data,
                              out.row_stride,
                              reinterpret_cast<const float*>(bias),
                              b.halves(),
                              packed,
                              x.rows,
                              x.columns,
                              out.columns};
  nb::gil_scoped_release release;
  half::multiply(product);
}

}  // namespace

void bind_kernels(nb::module_& m) {
  nb::enum_<Dtype>(m, "Dtype")
      .value("float16", Dtype::float16)
      .value("bfloat16", Dtype::bfloat16)
      .value("float32", Dtype::float32)
      .value("float64", Dtype::float64)
      .value("int8", Dtype::int8)
      .value("int16", Dtype::int16)
      .value("int32", Dtype::int32)
      .value("int64", Dtype::int64)
      .value("uint8", Dtype::uint8)
      .value("bool", Dtype::boolean);

  nb::enum_<Combine>(m, "Combine")
      .value("sum", Combine::sum)
      .value("avg", Combine::avg)
      .value("max", Combine::max)
      .value("min", Combine::min);

  m.def("read_number", [](int pid, uintptr_t from) {
    // The 8 bytes at an address of a process.
    uint64_t number = 0;
    const int error = read_memory(pid, from, 8, reinterpret_cast<char*>(&number), 8, 1, 8);
    if (error) throw std::system_error(error, std::generic_category());
    return number;
  });

  // `weft/variables.py` has checked it
  if (const char* name = std::getenv("WEFT_STORES"); name && *name) set_stores(stores_named(name));
  m.def("stores", [] { return name_of(stores()); });

  m.def("instructions", [] { return kInstructions[static_cast<int>(instructions)]; });
  m.def("panel_columns", &half::columns);
  m.def(
      "pack_panels",
      [](nb::handle weight, nb::handle panels) {
        const Matrix from(weight), to(panels);
        nb::gil_scoped_release release;
        half::pack_panels(from.halves(), from.rows, from.columns,
                          reinterpret_cast<uint16_t*>(to.data));
      },
      "weight"_a, "panels"_a);
  m.def("half_product", &half_product, "x"_a, "weight"_a, "out"_a, "bias"_a, "dtype"_a,
        "out_dtype"_a, "packed"_a);

  nb::enum_<half::Activation>(m, "Activation")
      .value("silu", half::Activation::silu)
      .value("gelu", half::Activation::gelu)
      .value("gelu_tanh", half::Activation::gelu_tanh)
      .value("relu", half::Activation::relu);
  nb::class_<PackedExperts>(m, "PackedExperts")
      .def(nb::init<nb::handle, nb::handle, Dtype, half::Activation, int64_t>(), "gate_up"_a,
           "down"_a, "dtype"_a, "activation"_a, "first"_a)
      .def("sums", &PackedExperts::sums, "x"_a, "chosen"_a, "scores"_a, "out"_a, "out_dtype"_a);
  m.def("take_rows", &take_rows, "numbers"_a, "sources"_a, "to"_a);
  m.def("find_visits", &find_visits, "chosen"_a, "ends"_a, "parts"_a, "places"_a, "token_of"_a);
  m.def("add_up_visits", &add_up_visits, "rows"_a, "places"_a, "ends"_a, "hosts"_a, "out"_a,
        "dtype"_a);

  m.def("set_team_size", &set_team_size);
  m.def("team_size", &team_size);
  m.def("allow_teams", &allow_teams);
  m.def("cycles", &cycles);
  m.def("now", &now);
}

}  // namespace weft
