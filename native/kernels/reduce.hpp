// Sums, averages and extremes of rows.
//
// R1  The terms of an element are combined in the order of `sources`, one by one, and rounded once.
//     So results do not depend on the order in which rows arrive, the vector width, or the number
//     of threads.
// R2  An element is written only after it was read from all sources. So a target may be a source,
//     at the same elements.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/stores.hpp"

namespace weft {

enum class Dtype : int {
  float16,
  bfloat16,
  float32,
  float64,
  int8,
  int16,
  int32,
  int64,
  uint8,
  boolean
};

enum class Combine : int { sum, avg, max, min };

size_t size_of(Dtype dtype);

struct Rows {
  const char* base;
  size_t stride;  // bytes between the beginnings of rows
  Dtype dtype;
};

// sources[0] + sources[1] + … for each element, in this order, or their extreme, as `result_dtype`;
// `avg` divides the sum by `ranks`. float16, bfloat16 and float32 are accumulated in float32,
// float64 in float64, and rounded once; integers are exact (modulo their width; an average is
// truncated), a sum of booleans is "or". Floating operands may differ in dtype, except that float64
// is combined with float64 only. The extreme of a NaN and any number is NaN. The result is written
// to each of `count` targets in one pass; they may be sources, too (R2). Large sums are divided
// among the threads of the team.
void reduce_rows(Combine combine, Dtype result_dtype, const std::vector<Rows>& sources, size_t rows,
                 size_t columns, int ranks, const Target* targets, size_t count);

}  // namespace weft
