// The rows by which tokens visit the ranks that have the experts which they chose, or their hosts:
// one for each token and rank, or host, however many of its experts it chose.
//
// V1  Rows are ordered by rank, or host, and in each by token.
// V2  A token's rows are added up in the order of the ranks within each host, and then these sums
//     in the order of the hosts, both in float32 (float64 for float64) and rounded once: its bits
//     depend on nothing that arrives first, nor on whether its host added up the rows of its ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/experts.hpp"
#include "kernels/reduce.hpp"

namespace weft::visits {

// Find the rows of `tokens` tokens: the number for each part, which is a rank or a host. Experts
// are numbered rank by rank, and `ends` has the number after the last of each; others count as
// none. `parts` has the part of each rank. Writes the rows of each token to `places` (tokens, top),
// followed by -1, and the token of each row to `token_of`, of which there are at most tokens * top.
std::vector<int64_t> find(const experts::Routing& routing, size_t tokens,
                          const std::vector<int64_t>& ends, const std::vector<int64_t>& parts,
                          int64_t* places, int64_t* token_of);

// For each token the sum of its rows, of `columns` elements; zeros for a token without one. The
// rows before `ends[p]` that are not before `ends[p - 1]` have come from part p, on `hosts[p]`.
void add_up(const Rows& rows, const int64_t* places, size_t top, size_t tokens, size_t columns,
            const std::vector<int64_t>& ends, const std::vector<int64_t>& hosts, const Target& out,
            Dtype out_dtype);

}  // namespace weft::visits
