// Copies of rows: to several targets in one pass, and from another process's memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/stores.hpp"

namespace weft {

// Copy `rows` rows of `row_bytes` bytes, `src_stride` bytes apart, to each of `count` targets,
// reading them from memory once. A target may be the source itself; otherwise there is no overlap.
// Large copies are divided among the threads of the team.
void copy_rows(const Target* targets, size_t count, const char* src, size_t src_stride, size_t rows,
               size_t row_bytes);

// Copy rows from the memory of a process through the kernel, where it is not mapped here; large
// copies are divided in the same manner. Returns 0, or the number of the error if the kernel does
// not allow it or the process has ended.
int read_memory(int pid, uintptr_t from, size_t stride, char* to, size_t to_stride, size_t rows,
                size_t row_bytes);

}  // namespace weft
