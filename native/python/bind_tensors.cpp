#include "memory/segment.hpp"
#include "python/alike.hpp"
#include "python/bind.hpp"
#include "python/repeats.hpp"
#include "python/tensor_view.hpp"

using namespace nanobind::literals;

namespace weft {

void bind_tensors(nb::module_& m) {
  m.def("look_by", &View::look_by, "plain"_a, "exchange"_a.none());
  m.def("layouts", &layouts, "tensors"_a);
  m.def("seen", &seen, "tensor"_a, "sampled"_a);
  m.def(
      "lies",
      [](nb::handle tensor) -> std::optional<uint64_t> {
        View view;
        if (!view.look_plain(tensor) || !view.contiguous()) return {};
        const Segment* within = Segment::around(view.address);
        return within ? within->world : 0;
      },
      "tensor"_a.none());

  nb::class_<Repeats>(m, "Repeats", nb::type_slots(Repeats::slots))
      .def(nb::init<Executor&>(), "executor"_a, nb::keep_alive<1, 2>())
      .def("add", &Repeats::add, "what"_a, "a"_a, "out"_a, "options"_a, "program"_a, "binding"_a,
           "tensors"_a)
      .def("call", &Repeats::call, "what"_a, "a"_a.none(), "out"_a, "options"_a, "timeout"_a)
      .def("clear", &Repeats::clear)
      .def("__len__", &Repeats::size);

  nb::class_<Alike>(m, "Alike", nb::type_slots(Alike::slots))
      .def(nb::init<nb::object, uint64_t>(), "packed"_a, "world"_a)
      .def("add", &Alike::add, "options"_a, "a"_a, "weights"_a, "biases"_a, "made"_a)
      .def("find", &Alike::find, "options"_a, "a"_a.none(), "weights"_a, "biases"_a)
      .def("clear", &Alike::clear)
      .def("__len__", &Alike::size);
}

}  // namespace weft
