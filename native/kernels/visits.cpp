#include "kernels/visits.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace weft::visits {

std::vector<int64_t> find(const experts::Routing& routing, size_t tokens,
                          const std::vector<int64_t>& ends, int64_t* places, int64_t* token_of) {
  std::vector<int64_t> counts(ends.size());
  const size_t top = routing.top;
  for (size_t token = 0; token < tokens; ++token) {
    int64_t *const ranks = places + token * top, *end = ranks;
    for (size_t choice = 0; choice < top; ++choice) {
      const int64_t expert = routing.expert(token, choice);
      if (expert < 0 || expert >= ends.back()) continue;
      const int64_t rank = std::upper_bound(ends.begin(), ends.end(), expert) - ends.begin();
      if (std::find(ranks, end, rank) == end) *end++ = rank, ++counts[static_cast<size_t>(rank)];
    }
    std::sort(ranks, end);
    std::fill(end, ranks + top, -1);
  }
  std::vector<int64_t> next(ends.size());
  std::exclusive_scan(counts.begin(), counts.end(), next.begin(), int64_t{0});
  for (size_t at = 0; at < tokens * top; ++at) {
    if (places[at] < 0) continue;
    places[at] = next[static_cast<size_t>(places[at])]++;
    token_of[places[at]] = static_cast<int64_t>(at / top);
  }
  return counts;
}

void add_up(const Rows& rows, const int64_t* places, size_t top, size_t tokens, size_t columns,
            const Target& out, Dtype out_dtype) {
  std::vector<Rows> sources;
  for (size_t token = 0; token < tokens; ++token) {
    sources.clear();
    for (size_t at = token * top; at < (token + 1) * top && places[at] >= 0; ++at)
      sources.push_back(
          {rows.base + static_cast<size_t>(places[at]) * rows.stride, rows.stride, rows.dtype});
    Target target = out;
    target.base += token * out.stride;
    if (sources.empty())
      std::memset(target.base, 0, columns * size_of(out_dtype));
    else
      reduce_rows(Combine::sum, out_dtype, sources, 1, columns, 1, &target, 1);
  }
}

}  // namespace weft::visits
