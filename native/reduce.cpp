#include "reduce.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weft {

namespace {

struct BFloat16 {
  uint16_t bits;
};

float widen(BFloat16 x) {
  uint32_t bits = uint32_t{x.bits} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

BFloat16 narrow(float x) {  // to nearest, ties to even; a NaN stays a NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(x != x ? 0x7fc0 : rounded)};
}

template <class Wide, class T>
Wide load(T x) {
  if constexpr (std::is_same_v<T, BFloat16>) return widen(x);
  else return static_cast<Wide>(x);
}

template <class T, class Wide>
T store(Wide x) {
  if constexpr (std::is_same_v<T, BFloat16>) return narrow(x);
  else return static_cast<T>(x);
}

// Versions for wider vectors are chosen when the library is loaded, which is too early for what sanitizers add to functions.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define WEFT_WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WEFT_WIDE
#endif

template <class Wide, class T>
WEFT_WIDE void begin(Wide* total, const T* src, size_t n) {
  for (size_t i = 0; i < n; ++i) total[i] = load<Wide>(src[i]);
}

template <class Wide, class T>
WEFT_WIDE void add(Wide* total, const T* src, size_t n) {
  for (size_t i = 0; i < n; ++i) total[i] += load<Wide>(src[i]);
}

template <class Wide, class T>
WEFT_WIDE void raise(Wide* total, const T* src, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    Wide x = load<Wide>(src[i]);
    total[i] = total[i] < x || x != x ? x : total[i];
  }
}

template <class Wide, class T>
WEFT_WIDE void lower(Wide* total, const T* src, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    Wide x = load<Wide>(src[i]);
    total[i] = x < total[i] || x != x ? x : total[i];
  }
}

template <class Wide, class T>
WEFT_WIDE void end(T* dst, const Wide* total, size_t n) {
  for (size_t i = 0; i < n; ++i) dst[i] = store<T>(total[i]);
}

template <class Wide>
WEFT_WIDE void divide(Wide* total, size_t n, Wide by) {
  for (size_t i = 0; i < n; ++i) total[i] /= by;
}

size_t item_of(const Rows& rows, size_t) { return size_of(rows.dtype); }
size_t item_of(const Target&, size_t item) { return item; }

// One block at a time, so that the accumulator stays in the first-level cache while the sources stream through.
constexpr size_t kBlock = 1024;

// Compilers do not vectorise conversions from and to float16, so they are written out.
#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) size_t widen_eights(float* dst, const _Float16* src, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
  return i;
}

__attribute__((target("avx,f16c"))) size_t narrow_eights(_Float16* dst, const float* src, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
  return i;
}

bool has_f16c() { return __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c"); }
#else
size_t widen_eights(float*, const _Float16*, size_t) { return 0; }
size_t narrow_eights(_Float16*, const float*, size_t) { return 0; }
bool has_f16c() { return false; }
#endif

void widen_all(float* dst, const _Float16* src, size_t n) {
  for (size_t i = has_f16c() ? widen_eights(dst, src, n) : 0; i < n; ++i) dst[i] = static_cast<float>(src[i]);
}

void narrow_all(_Float16* dst, const float* src, size_t n) {
  for (size_t i = has_f16c() ? narrow_eights(dst, src, n) : 0; i < n; ++i) dst[i] = static_cast<_Float16>(src[i]);
}

// Call `work` with the `n` elements of `dtype` at `at`, which may be accumulated in Wide.
template <class Wide, class Work>
void read(Dtype dtype, const char* at, size_t n, Work work) {
  if constexpr (std::is_same_v<Wide, float>) {
    float wide[kBlock];
    if (dtype == Dtype::float16) widen_all(wide, reinterpret_cast<const _Float16*>(at), n), work(wide);
    else if (dtype == Dtype::bfloat16) work(reinterpret_cast<const BFloat16*>(at));
    else work(reinterpret_cast<const float*>(at));
  } else {
    work(reinterpret_cast<const Wide*>(at));
  }
}

// Round `n` results to elements of `dtype`.
template <class Wide>
void write(Dtype dtype, char* at, const Wide* total, size_t n) {
  if constexpr (std::is_same_v<Wide, float>) {
    if (dtype == Dtype::float16) return narrow_all(reinterpret_cast<_Float16*>(at), total, n);
    if (dtype == Dtype::bfloat16) return end(reinterpret_cast<BFloat16*>(at), total, n);
  }
  end(reinterpret_cast<Wide*>(at), total, n);
}

template <class Wide>
void reduce_all(Combine combine, const std::vector<Rows>& operands, size_t rows, size_t columns, int ranks, size_t whole,
                const Target* copies, size_t count) {
  alignas(64) Wide total[kBlock];
  alignas(64) char rounded[kBlock * sizeof(Wide)];
  const size_t item = size_of(operands[0].dtype);
  const size_t run = columns * item;
  const bool past_caches = streamed(whole, run);
  for (size_t row = 0; row < rows; ++row)
    for (size_t start = 0; start < columns; start += kBlock) {
      size_t n = std::min(kBlock, columns - start);
      auto at = [&](const auto& x) { return x.base + row * x.stride + start * item_of(x, item); };
      read<Wide>(operands[1].dtype, at(operands[1]), n, [&](const auto* src) { begin(total, src, n); });
      for (size_t s = 2; s < operands.size(); ++s)
        read<Wide>(operands[s].dtype, at(operands[s]), n, [&](const auto* src) {
          if (combine == Combine::max) raise(total, src, n);
          else if (combine == Combine::min) lower(total, src, n);
          else add(total, src, n);
        });
      if (combine == Combine::avg) divide(total, n, static_cast<Wide>(ranks));
      char* first = at(operands[0]);
      char* made = past_caches ? rounded : first;
      write(operands[0].dtype, made, total, n);
      if (past_caches) stream(first, made, n * item);
      for (const Target* copy = copies; copy < copies + count; ++copy)
        streamed(copy->whole, run) ? stream(at(*copy), made, n * item) : void(std::memcpy(at(*copy), made, n * item));
    }
  if (past_caches || std::any_of(copies, copies + count, [&](const Target& x) { return streamed(x.whole, run); })) streams_done();
}

// Rows without gaps are one long row.
bool joined(const std::vector<Rows>& operands, const Target* copies, size_t count, size_t columns) {
  const size_t row = columns * size_of(operands[0].dtype);
  return std::all_of(operands.begin(), operands.end(), [&](const Rows& x) { return x.stride == columns * size_of(x.dtype); }) &&
         std::all_of(copies, copies + count, [&](const Target& x) { return x.stride == row; });
}

}  // namespace

size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float16: case Dtype::bfloat16: case Dtype::int16: return 2;
    case Dtype::float32: case Dtype::int32: return 4;
    case Dtype::float64: case Dtype::int64: return 8;
    case Dtype::int8: case Dtype::uint8: case Dtype::boolean: return 1;
  }
  return 0;
}

void reduce_rows(Combine combine, const std::vector<Rows>& operands, size_t rows, size_t columns, int ranks, size_t whole,
                 const Target* copies, size_t count) {
#ifdef WEFT_MUTANT_NO_COPY  // a build that moves nothing, to prove that the tests would notice
  return;
#endif
  if (joined(operands, copies, count, columns)) columns *= rows, rows = columns > 0;
  switch (operands[0].dtype) {
    case Dtype::float16: case Dtype::bfloat16: case Dtype::float32:
      return reduce_all<float>(combine, operands, rows, columns, ranks, whole, copies, count);
    case Dtype::float64: return reduce_all<double>(combine, operands, rows, columns, ranks, whole, copies, count);
    case Dtype::int8: return reduce_all<int8_t>(combine, operands, rows, columns, ranks, whole, copies, count);
    case Dtype::int16: return reduce_all<int16_t>(combine, operands, rows, columns, ranks, whole, copies, count);
    case Dtype::int32: return reduce_all<int32_t>(combine, operands, rows, columns, ranks, whole, copies, count);
    case Dtype::int64: return reduce_all<int64_t>(combine, operands, rows, columns, ranks, whole, copies, count);
    case Dtype::uint8: return reduce_all<uint8_t>(combine, operands, rows, columns, ranks, whole, copies, count);
    case Dtype::boolean: return reduce_all<bool>(combine, operands, rows, columns, ranks, whole, copies, count);
  }
}

}  // namespace weft
