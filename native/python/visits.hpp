// The rows by which tokens visit ranks, for Python.
#pragma once

#include <stdexcept>
#include <vector>

#include "kernels/visits.hpp"
#include "python/row_view.hpp"

namespace weft {

// The number of rows for each rank; `places` (tokens, top) and `token_of` (tokens * top, 1), both
// int64 and contiguous, are written as by `visits::find`.
inline std::vector<int64_t> find_visits(nb::handle chosen, const std::vector<int64_t>& ends,
                                        nb::handle places, nb::handle token_of) {
  const RowView choices(chosen), to(places), tokens(token_of);
  const size_t top = choices.columns();
  if (ends.empty() || to.item != 8 || tokens.item != 8 || to.rows() != choices.rows() ||
      to.columns() != top || tokens.rows() != choices.rows() * top)
    throw std::invalid_argument("places and tokens of visits are int64, one for each choice");
  const experts::Routing routing{
      choices.row<const char>(0), choices.stride, choices.item == 8, nullptr, 0, top};
  nb::gil_scoped_release release;
  return visits::find(routing, choices.rows(), ends, to.row<int64_t>(0), tokens.row<int64_t>(0));
}

// out (tokens, columns) = for each token the sum of its rows, as `places` has them.
inline void add_up_visits(nb::handle rows, nb::handle places, nb::handle out, Dtype dtype) {
  const RowView from(rows), of(places), to(out);
  if (of.rows() != to.rows() || from.columns() != to.columns() || from.item != size_of(dtype) ||
      to.item != size_of(dtype))
    throw std::invalid_argument("rows of visits have the columns and the dtype of their sums");
  const Rows source{from.row<const char>(0), from.stride * from.item, dtype};
  const Target target{to.row<char>(0), to.stride * to.item, to.rows() * to.columns() * to.item};
  nb::gil_scoped_release release;
  visits::add_up(source, of.row<const int64_t>(0), of.columns(), to.rows(), to.columns(), target,
                 dtype);
}

}  // namespace weft
