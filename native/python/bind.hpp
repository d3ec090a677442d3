// The bindings of each folder, which `module.cpp` combines in one module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

namespace weft {

namespace nb = nanobind;

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

void bind_kernels(nb::module_& m);
void bind_memory(nb::module_& m);
void bind_execute(nb::module_& m);
void bind_messages(nb::module_& m);
void bind_tensors(nb::module_& m);

}  // namespace weft
