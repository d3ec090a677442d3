#include "kernels/visits.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace weft::visits {

std::vector<int64_t> find(const experts::Routing& routing, size_t tokens,
                          const std::vector<int64_t>& ends, const std::vector<int64_t>& parts,
                          int64_t* places, int64_t* token_of) {
  std::vector<int64_t> counts(static_cast<size_t>(*std::max_element(parts.begin(), parts.end())) +
                              1);
  const size_t top = routing.top;
  for (size_t token = 0; token < tokens; ++token) {
    int64_t *const visited = places + token * top, *end = visited;
    for (size_t choice = 0; choice < top; ++choice) {
      const int64_t expert = routing.expert(token, choice);
      if (expert < 0 || expert >= ends.back()) continue;
      const auto rank = std::upper_bound(ends.begin(), ends.end(), expert) - ends.begin();
      const int64_t part = parts[static_cast<size_t>(rank)];
      if (std::find(visited, end, part) == end) *end++ = part, ++counts[static_cast<size_t>(part)];
    }
    std::sort(visited, end);
    std::fill(end, visited + top, -1);
  }
  std::vector<int64_t> next(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), next.begin(), int64_t{0});
  for (size_t at = 0; at < tokens * top; ++at) {
    if (places[at] < 0) continue;
    places[at] = next[static_cast<size_t>(places[at])]++;
    token_of[places[at]] = static_cast<int64_t>(at / top);
  }
  return counts;
}

namespace {

// A row of a token, and the host from which it has come.
struct Contribution {
  int64_t host;
  Rows row;
};

}  // namespace

void add_up(const Rows& rows, const int64_t* places, size_t top, size_t tokens, size_t columns,
            const std::vector<int64_t>& ends, const std::vector<int64_t>& hosts, const Target& out,
            Dtype out_dtype) {
  const size_t row_bytes = columns * size_of(out_dtype);
  std::vector<Contribution> found;
  std::vector<Rows> sources, sums;
  std::vector<char> of_hosts(top * row_bytes);
  for (size_t token = 0; token < tokens; ++token) {
    found.clear();
    for (size_t at = token * top; at < (token + 1) * top && places[at] >= 0; ++at) {
      const auto part = std::upper_bound(ends.begin(), ends.end(), places[at]) - ends.begin();
      found.push_back(
          {hosts[static_cast<size_t>(part)],
           {rows.base + static_cast<size_t>(places[at]) * rows.stride, rows.stride, rows.dtype}});
    }
    Target target = out;
    target.base += token * out.stride;
    if (found.empty()) {
      std::memset(target.base, 0, row_bytes);
      continue;
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const Contribution& a, const Contribution& b) { return a.host < b.host; });
    const bool one_host = found.front().host == found.back().host;
    sums.clear();
    for (size_t at = 0; at < found.size();) {
      sources.clear();
      for (const int64_t host = found[at].host; at < found.size() && found[at].host == host; ++at)
        sources.push_back(found[at].row);
      if (one_host || sources.size() == 1) {
        sums.insert(sums.end(), sources.begin(), sources.end());
        continue;
      }
      Target sum{of_hosts.data() + sums.size() * row_bytes, row_bytes, row_bytes};
      reduce_rows(Combine::sum, out_dtype, sources, 1, columns, 1, &sum, 1);
      sums.push_back({sum.base, row_bytes, out_dtype});
    }
    reduce_rows(Combine::sum, out_dtype, sums, 1, columns, 1, &target, 1);
  }
}

}  // namespace weft::visits
