// Reads of another process's memory through the kernel, where it is not mapped here.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

// Copy `rows` rows of `row_bytes` bytes, `stride` bytes apart, from the memory of a process; many are shared out among the threads of
// the team. False, with `errno`, if the kernel does not allow it, or the process is gone.
bool read_memory(int pid, uintptr_t from, size_t stride, char* to, size_t to_stride, size_t rows, size_t row_bytes);

}  // namespace weft
