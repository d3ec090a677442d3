#include "copy.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace weft {

namespace {

// From this size on the processor's own string copy wins over memcpy's loops: it need not read the target before it writes it, and
// keeps its pace at any alignment.
constexpr size_t kLarge = size_t{1} << 20;

#if defined(__x86_64__)
bool has_fast_string_copy() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 9 & 1);  // "enhanced REP MOVSB"
}

void copy_string(char* dst, const char* src, size_t bytes) {
  asm volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes) : : "memory");
}
#endif

void copy(char* dst, const char* src, size_t bytes) {
#if defined(__x86_64__)
  static const bool fast = has_fast_string_copy();
  if (bytes >= kLarge && fast) return copy_string(dst, src, bytes);
#endif
  std::memcpy(dst, src, bytes);
}

}  // namespace

void copy_rows(char* dst, size_t dst_stride, const char* src, size_t src_stride, size_t rows, size_t row_bytes) {
#ifdef WEFT_MUTANT_NO_COPY  // a build that moves nothing, to prove that the tests would notice
  return;
#endif
  if (dst == src) return;  // in place
  if (dst_stride == row_bytes && src_stride == row_bytes) return copy(dst, src, rows * row_bytes);
  for (size_t row = 0; row < rows; ++row) copy(dst + row * dst_stride, src + row * src_stride, row_bytes);
}

}  // namespace weft
