// The rows by which tokens visit the ranks that have the experts which they chose: one for each
// token and rank, however many of a rank's experts it chose.
//
// V1  Rows are ordered by rank, and in each by token. A token's rows are added up in the order of
//     the ranks, in float32 (float64 for float64), and rounded once: its bits depend on nothing
//     that arrives first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/experts.hpp"
#include "kernels/reduce.hpp"

namespace weft::visits {

// Find the rows of `tokens` tokens: the number for each rank. Experts are numbered rank by rank,
// and `ends` has the number after the last of each; others count as none. Writes the rows of each
// token to `places` (tokens, top), followed by -1, and the token of each row to `token_of`, of
// which there are at most tokens * top.
std::vector<int64_t> find(const experts::Routing& routing, size_t tokens,
                          const std::vector<int64_t>& ends, int64_t* places, int64_t* token_of);

// For each token the sum of its rows, of `columns` elements; zeros for a token without one.
void add_up(const Rows& rows, const int64_t* places, size_t top, size_t tokens, size_t columns,
            const Target& out, Dtype out_dtype);

}  // namespace weft::visits
