// Rows that travel packed (`kernels/block_int8.hpp`).
#pragma once

#include <vector>

#include "hosts/transport.hpp"
#include "kernels/block_int8.hpp"

namespace weft {

inline size_t packed_bytes(Dtype dtype, const Strided& rows) {
  return packed_bytes(rows.rows, rows.row_bytes / size_of(dtype));
}

// Pack rows into `memory`, and return where they are.
inline Strided pack(Dtype dtype, const Strided& rows, std::vector<char>& memory) {
  memory.resize(packed_bytes(dtype, rows));
  pack_rows(dtype, rows.base, rows.stride, rows.rows, rows.row_bytes / size_of(dtype),
            memory.data());
  return {memory.data(), 1, memory.size(), memory.size()};
}

inline void unpack(Dtype dtype, const char* packed, const Strided& rows) {
  unpack_rows(dtype, packed, rows.base, rows.stride, rows.rows, rows.row_bytes / size_of(dtype));
}

}  // namespace weft
