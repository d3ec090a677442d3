// Copies between mapped memory: contiguous, rows with strides, and past the caches for large ones.
#pragma once

#include <cstddef>

namespace weft {

// Copy `rows` rows of `row_bytes` bytes; rows begin `dst_stride` and `src_stride` bytes apart. No overlap.
void copy_rows(char* dst, size_t dst_stride, const char* src, size_t src_stride, size_t rows, size_t row_bytes);

}  // namespace weft
