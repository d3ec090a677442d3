#include "copy.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "team.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>
#endif

namespace weft {

#if defined(__x86_64__)
void copy_run(char* dst, const char* src, size_t bytes) {
  // A store to a line that another core has must wait for it, one after the other. `rep movsb` knows that whole lines are written, and
  // takes many at once; processors with fast short ones lose nothing by it from here on.
  constexpr size_t kRepeated = size_t{1} << 10;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr bool fast = false;  // sanitizers do not see what it writes
#else
  static const bool fast = [] {
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & 1u << 4;  // FSRM
  }();
#endif
  if (!fast || bytes < kRepeated) return void(std::memcpy(dst, src, bytes));
  __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes) : : "memory");
}

// This core's share of the last cache: its bytes by how many share it, as the processor says (CPUID, leaves 4 and 0x8000001D).
static size_t cache_share() {
  size_t share = 0;
  for (unsigned leaf : {0x4u, 0x8000001du})
    for (unsigned i = 0, a, b, c, d; __get_cpuid_count(leaf, i, &a, &b, &c, &d) && a & 31; ++i) {
      const size_t lines = size_t{c + 1} * ((b >> 22) + 1) * ((b >> 12 & 0x3ff) + 1);
      share = lines * ((b & 0xfff) + 1) / ((a >> 14 & 0xfff) + 1);
    }
  return share;
}

bool streamed(size_t bytes, size_t run) {
  // From so many written bytes on they do not stay in the caches until somebody looks at them again. Stores past the caches then
  // leave these to others, and save reading what is written over.
  static const size_t kStreamed = std::max(size_t{8} << 20, cache_share()), kPage = 4096;
  return bytes >= kStreamed && run >= kPage;
}

void stream(char* dst, const char* src, size_t bytes) {
  size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(dst) % 64), i = head;
  std::memcpy(dst, src, head);
  for (; i + 64 <= bytes; i += 64) {
    auto from = reinterpret_cast<const __m128i*>(src + i);
    auto to = reinterpret_cast<__m128i*>(dst + i);
    __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b), _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
  }
  std::memcpy(dst + i, src + i, bytes - i);
}

void streams_done() { _mm_sfence(); }
#else
void copy_run(char* dst, const char* src, size_t bytes) { std::memcpy(dst, src, bytes); }
bool streamed(size_t, size_t) { return false; }
void stream(char* dst, const char* src, size_t bytes) { std::memcpy(dst, src, bytes); }
void streams_done() {}
#endif

void copy_rows(const Target* targets, size_t count, const char* src, size_t src_stride, size_t rows, size_t row_bytes) {
#ifdef WEFT_MUTANT_NO_COPY  // a build that moves nothing, to prove that the tests would notice
  return;
#endif
  bool joined = src_stride == row_bytes;
  for (size_t i = 0; i < count; ++i) joined = joined && targets[i].stride == row_bytes;
  if (joined) row_bytes *= rows, rows = row_bytes > 0;
  constexpr size_t kCached = size_t{32} << 10;  // stays in the second-level cache from one target to the next
  const size_t block = count > 1 ? kCached : row_bytes;
  const bool past_caches = std::any_of(targets, targets + count, [&](const Target& to) { return streamed(to.whole, row_bytes); });
  share(rows, row_bytes, 1, [&](size_t first, size_t high, size_t left, size_t wide) {
    for (size_t row = first; row < first + high; ++row)
      for (size_t start = left; start < left + wide; start += block)
        for (const Target* to = targets; to < targets + count; ++to) {
          const char* from = src + row * src_stride + start;
          char* dst = to->base + row * to->stride + start;
          const size_t bytes = std::min(block, left + wide - start);
          if (dst != from) streamed(to->whole, row_bytes) ? stream(dst, from, bytes) : copy_run(dst, from, bytes);
        }
    if (past_caches) streams_done();
  });
}

}  // namespace weft
