#include "memory/segment.hpp"
#include "python/bind.hpp"
#include "python/call_cache.hpp"
#include "python/repeat.hpp"
#include "python/tensor_view.hpp"

using namespace nanobind::literals;

namespace weft {

void bind_tensors(nb::module_& m) {
  m.def("set_tensor_access", &View::set_access, "plain"_a, "exchange"_a.none());
  m.def("layouts", &layouts, "tensors"_a);

  nb::class_<Watch>(m, "Watch")
      .def(nb::init<nb::object, bool, size_t>(), "tensor"_a, "counted"_a, "sampled"_a)
      .def("changed", &Watch::changed);

  nb::class_<CallsLeft>(m, "CallsLeft")
      .def(nb::init<uint64_t>(), "left"_a)
      .def("take", &CallsLeft::take)
      .def_ro("left", &CallsLeft::left);

  nb::class_<CallCache>(m, "CallCache", nb::type_slots(CallCache::slots))
      .def(nb::init<Executor&, nb::object, nb::typed<nb::list, nb::any>>(), "executor"_a,
           "prepared"_a, "pending"_a, nb::keep_alive<1, 2>())
      .def("add", &CallCache::add, "function"_a, "options"_a, "a"_a.none(), "out"_a.none(),
           "weights"_a.none(), "biases"_a.none(), "program"_a, "binding"_a, "tensors"_a,
           "results"_a, "prepare"_a.none(), "left"_a = nb::none())
      .def("clear", &CallCache::clear)
      .def("__len__", &CallCache::size)
      .def_ro_static("most", &CallCache::kMost);

  m.def("set_default_world", &set_default_world, "world"_a, "of_thread"_a);
  m.def("set_first_call", &set_first_call, "run"_a);
  m.def("run", &run, "check"_a, "a"_a.none(), "out"_a.none(), "options"_a, "world"_a.none(),
        "timeout"_a.none());
  m.def("repeat", &repeat, "function"_a, "options"_a, "a"_a.none(), "out"_a.none(),
        "weights"_a.none(), "biases"_a.none(), "world"_a.none(), "timeout"_a.none());
}

}  // namespace weft
