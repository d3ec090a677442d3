// The rows by which tokens visit ranks, for Python.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "kernels/visits.hpp"
#include "python/row_view.hpp"

namespace weft {

// The number of rows for each part of `parts`; `places` (tokens, top) and `token_of` (tokens * top,
// 1), both int64 and contiguous, are written as by `visits::find`.
inline std::vector<int64_t> find_visits(nb::handle chosen, const std::vector<int64_t>& ends,
                                        const std::vector<int64_t>& parts, nb::handle places,
                                        nb::handle token_of) {
  const RowView choices(chosen), to(places), tokens(token_of);
  const size_t top = choices.columns();
  if (ends.empty() || parts.size() != ends.size() ||
      *std::min_element(parts.begin(), parts.end()) < 0)
    throw std::invalid_argument("each rank of visits is in a part");
  if (to.item != 8 || tokens.item != 8 || to.rows() != choices.rows() || to.columns() != top ||
      tokens.rows() != choices.rows() * top)
    throw std::invalid_argument("places and tokens of visits are int64, one for each choice");
  const experts::Routing routing{
      choices.row<const char>(0), choices.stride, choices.item == 8, nullptr, 0, top};
  nb::gil_scoped_release release;
  return visits::find(routing, choices.rows(), ends, parts, to.row<int64_t>(0),
                      tokens.row<int64_t>(0));
}

// Write the rows of these `numbers`, (rows, 1) of int64, of each matrix of `from` to that of `to`.
inline void take_rows(nb::handle numbers, const std::vector<nb::object>& from,
                      const std::vector<nb::object>& to) {
  const RowView wanted(numbers);
  const std::vector<RowView> sources(from.begin(), from.end()), targets(to.begin(), to.end());
  if (wanted.item != 8 || sources.size() != targets.size())
    throw std::invalid_argument("numbers of rows are int64, and each matrix has a target");
  for (size_t at = 0; at < sources.size(); ++at)
    if (sources[at].columns() != targets[at].columns() || sources[at].item != targets[at].item ||
        targets[at].rows() != wanted.rows())
      throw std::invalid_argument(
          "a target has the columns of its matrix, and a row of each number");
  nb::gil_scoped_release release;
  for (size_t at = 0; at < sources.size(); ++at) {
    const RowView &source = sources[at], &target = targets[at];
    for (size_t row = 0; row < wanted.rows(); ++row) {
      const auto number = static_cast<size_t>(*wanted.row<const int64_t>(row));
      if (number >= source.rows()) throw std::out_of_range("there is no row of this number");
      std::memcpy(target.row<char>(row), source.row<const char>(number),
                  source.columns() * source.item);
    }
  }
}

// out (tokens, columns) = for each token the sum of its rows, as `places` has them, of which those
// up to each of `ends` are from a part on the host of `hosts`.
inline void add_up_visits(nb::handle rows, nb::handle places, const std::vector<int64_t>& ends,
                          const std::vector<int64_t>& hosts, nb::handle out, Dtype dtype) {
  const RowView from(rows), of(places), to(out);
  if (of.rows() != to.rows() || from.columns() != to.columns() || from.item != size_of(dtype) ||
      to.item != size_of(dtype))
    throw std::invalid_argument("rows of visits have the columns and the dtype of their sums");
  if (hosts.size() != ends.size() || ends.empty() ||
      static_cast<size_t>(ends.back()) != from.rows())
    throw std::invalid_argument("each row of visits is from a part on a host");
  const Rows source{from.row<const char>(0), from.stride * from.item, dtype};
  const Target target{to.row<char>(0), to.stride * to.item, to.rows() * to.columns() * to.item};
  nb::gil_scoped_release release;
  visits::add_up(source, of.row<const int64_t>(0), of.columns(), to.rows(), to.columns(), ends,
                 hosts, target, dtype);
}

}  // namespace weft
