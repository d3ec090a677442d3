#include <cstdlib>
#include <system_error>

#include "kernels/clock.hpp"
#include "kernels/copy.hpp"
#include "kernels/reduce.hpp"
#include "kernels/stores.hpp"
#include "kernels/team.hpp"
#include "python/bind.hpp"

using namespace nanobind::literals;

namespace weft {

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

  m.def("set_team_size", &set_team_size);
  m.def("team_size", &team_size);
  m.def("allow_teams", &allow_teams);
  m.def("cycles", &cycles);
  m.def("now", &now);
}

}  // namespace weft
