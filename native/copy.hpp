// Copies between mapped memory: contiguous, rows with strides, to several places at once.
#pragma once

#include <cstddef>

#include "stores.hpp"

namespace weft {

// Copy `rows` rows of `row_bytes` bytes, `src_stride` bytes apart, to each of `count` targets, reading them from memory once. A
// target may be the source itself; else there is no overlap. Many bytes are shared out among the threads of the team.
void copy_rows(const Target* targets, size_t count, const char* src, size_t src_stride, size_t rows, size_t row_bytes);

}  // namespace weft
