#include "kernels/reduce.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/float16.hpp"
#include "kernels/team.hpp"
#include "kernels/vectors.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace weft {

namespace {

template <class Wide, class T>
Wide load(T x) {
  if constexpr (std::is_same_v<T, BFloat16>)
    return widen(x);
  else
    return static_cast<Wide>(x);
}

template <class T, class Wide>
T store(Wide x) {
  if constexpr (std::is_same_v<T, BFloat16>)
    return narrow<T>(x);
  else
    return static_cast<T>(x);
}

// Operations on two numbers.
struct Sum {
  template <class Wide>
  WEFT_INLINE Wide operator()(Wide total, Wide x) const {
    // overflow of signed integers is undefined, that of unsigned ones wraps
    if constexpr (std::is_integral_v<Wide> && std::is_signed_v<Wide>) {
      using Wrapping = std::make_unsigned_t<Wide>;
      return static_cast<Wide>(static_cast<Wrapping>(total) + static_cast<Wrapping>(x));
    } else {
      return static_cast<Wide>(total + x);
    }
  }
};
struct Max {
  template <class Wide>
  WEFT_INLINE Wide operator()(Wide total, Wide x) const {
    return total < x || x != x ? x : total;
  }
};
struct Min {
  template <class Wide>
  WEFT_INLINE Wide operator()(Wide total, Wide x) const {
    return x < total || x != x ? x : total;
  }
};

template <class Wide, class T>
void load_all(Wide* total, const T* src, size_t n) {
  vectorised(
      [](Wide* total, const T* src, size_t n) WEFT_INLINE {
        for (size_t i = 0; i < n; ++i) total[i] = load<Wide>(src[i]);
      },
      total, src, n);
}

template <class Operation, class Wide, class T, class U>
void load_all(Wide* total, const T* one, const U* other, size_t n) {
  vectorised(
      [](Wide* total, const T* one, const U* other, size_t n) WEFT_INLINE {
        for (size_t i = 0; i < n; ++i)
          total[i] = Operation()(load<Wide>(one[i]), load<Wide>(other[i]));
      },
      total, one, other, n);
}

template <class Operation, class Wide, class T>
void accumulate(Wide* total, const T* src, size_t n) {
  vectorised(
      [](Wide* total, const T* src, size_t n) WEFT_INLINE {
        for (size_t i = 0; i < n; ++i) total[i] = Operation()(total[i], load<Wide>(src[i]));
      },
      total, src, n);
}

template <class Wide, class T>
void store_all(T* dst, const Wide* total, size_t n) {
  vectorised(
      [](T* dst, const Wide* total, size_t n) WEFT_INLINE {
        for (size_t i = 0; i < n; ++i) dst[i] = store<T>(total[i]);
      },
      dst, total, n);
}

template <class Wide>
void divide(Wide* total, size_t n, int by) {
  if constexpr (std::is_same_v<Wide, bool>) return;
  // numbers of ranks may be beyond an integer of 8 bits, which C++ divides as an int
  using By = std::conditional_t<std::is_integral_v<Wide>, int, Wide>;
  vectorised(
      [](Wide* total, size_t n, By by) WEFT_INLINE {
        for (size_t i = 0; i < n; ++i) total[i] = static_cast<Wide>(total[i] / by);
      },
      total, n, static_cast<By>(by));
}

// One block at a time, so that the accumulator stays in the first-level cache while the sources
// stream through.
// Measured on a 2-core Zen 4: in blocks of 16384 elements, which are beyond that cache, all-reduces
// of 4 MiB in bfloat16 take 1.6 times as long, in float32 as long.
constexpr size_t kBlock = 1024;
// Bytes of results that are computed before they are copied: few enough to be still in the cache,
// and enough for a long copy, which is faster than several short ones.
// Measured on a 2-core Zen 5: with `kRepeated`, sums of 64 KiB to 1 MiB take 0.5 to 0.9 of the time
// (`weft bench reduce-scatter --sizes 64K:16M:4`).
constexpr size_t kRun = size_t{16} << 10;

// Compilers do not vectorise conversions from and to float16, so vector instructions are written
// out here. They convert the elements that fill vectors, and return the number of these elements.
#if defined(__x86_64__)
const bool converts = instructions >= Instructions::avx2;

__attribute__((target("avx2,f16c"))) size_t widen_vectors(float* dst, const Float16* src,
                                                          size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(dst + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
  return i;
}

__attribute__((target("avx2,f16c"))) size_t narrow_vectors(Float16* dst, const float* src,
                                                           size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
  return i;
}
#elif defined(__aarch64__)
constexpr bool converts = true;

size_t widen_vectors(float* dst, const Float16* src, size_t n) {
  size_t i = 0;
  for (; i + 4 <= n; i += 4)
    vst1q_f32(dst + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&src[i].bits))));
  return i;
}

size_t narrow_vectors(Float16* dst, const float* src, size_t n) {
  size_t i = 0;
  for (; i + 4 <= n; i += 4)
    vst1_u16(&dst[i].bits, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(src + i))));
  return i;
}
#else
constexpr bool converts = false;
size_t widen_vectors(float*, const Float16*, size_t) { return 0; }
size_t narrow_vectors(Float16*, const float*, size_t) { return 0; }
#endif

void widen_all(float* dst, const Float16* src, size_t n) {
  for (size_t i = converts ? widen_vectors(dst, src, n) : 0; i < n; ++i) dst[i] = widen(src[i]);
}

void narrow_all(Float16* dst, const float* src, size_t n) {
  for (size_t i = converts ? narrow_vectors(dst, src, n) : 0; i < n; ++i)
    dst[i] = narrow<Float16>(src[i]);
}

// Call `work` with the `n` elements of `dtype` at `at`, which may be accumulated in Wide.
template <class Wide, class Work>
void read(Dtype dtype, const char* at, size_t n, Work work) {
  if constexpr (std::is_same_v<Wide, float>) {
    float wide[kBlock];
    if (dtype == Dtype::float16) {
      widen_all(wide, reinterpret_cast<const Float16*>(at), n);
      work(wide);
    } else if (dtype == Dtype::bfloat16) {
      work(reinterpret_cast<const BFloat16*>(at));
    } else {
      work(reinterpret_cast<const float*>(at));
    }
  } else {
    work(reinterpret_cast<const Wide*>(at));
  }
}

// Round `n` results to elements of `dtype`.
template <class Wide>
void write(Dtype dtype, char* at, const Wide* total, size_t n) {
  if constexpr (std::is_same_v<Wide, float>) {
    if (dtype == Dtype::float16) return narrow_all(reinterpret_cast<Float16*>(at), total, n);
    if (dtype == Dtype::bfloat16) return store_all(reinterpret_cast<BFloat16*>(at), total, n);
  }
  store_all(reinterpret_cast<Wide*>(at), total, n);
}

template <class Operation, class Wide>
void reduce_all(Combine combine, Dtype result_dtype, const std::vector<Rows>& sources, size_t rows,
                size_t columns, int ranks, const Target* targets, size_t count) {
  const size_t item = size_of(result_dtype);
  const Writer shared(targets, count, rows * columns * item, columns * item);
  const bool buffered = shared.non_temporal(targets[0]);
  // Two rows of the result's dtype need no accumulator, unless the sum overwrites one of them (R2).
  const bool direct = sources.size() == 2 && combine != Combine::avg && sizeof(Wide) == item &&
                      sources[0].dtype == result_dtype && sources[1].dtype == result_dtype &&
                      sources[0].base != targets[0].base && sources[1].base != targets[0].base;
  share(rows, columns, item, [&](size_t top_row, size_t high, size_t left, size_t wide) {
    Writer writer = shared;
    alignas(64) Wide total[kBlock];
    alignas(64) char block[kRun];
    for (size_t row = top_row; row < top_row + high; ++row)
      for (size_t column = left; column < left + wide; column += kRun / item) {
        const size_t all = std::min(kRun / item, left + wide - column);
        auto there = [&](const Target& to) { return to.base + row * to.stride + column * item; };
        char* const result = buffered ? block : there(targets[0]);
        for (size_t start = column; start < column + all; start += kBlock) {
          const size_t n = std::min(kBlock, column + all - start);
          auto from = [&](const Rows& x, auto use) {
            read<Wide>(x.dtype, x.base + row * x.stride + start * size_of(x.dtype), n, use);
          };
          char* const sum = result + (start - column) * item;
          from(sources[0], [&](const auto* one) {
            if (sources.size() == 1) return load_all(total, one, n);
            Wide* const into = direct ? reinterpret_cast<Wide*>(sum) : total;
            from(sources[1], [&](const auto* other) { load_all<Operation>(into, one, other, n); });
          });
          if (direct) continue;
          for (size_t source = 2; source < sources.size(); ++source)  // R1
            from(sources[source], [&](const auto* more) { accumulate<Operation>(total, more, n); });
          if (combine == Combine::avg) divide(total, n, ranks);
          write(result_dtype, sum, total, n);
        }
        for (size_t target = buffered ? 0 : 1; target < count; ++target)
          writer.write(targets[target], there(targets[target]), result, all * item);
      }
    writer.done(!top_row && !left);
  });
}

template <class Operation, class... Args>
void reduce_by(Combine combine, Dtype result_dtype, const Args&... args) {
  switch (result_dtype) {
    case Dtype::float16:
    case Dtype::bfloat16:
    case Dtype::float32:
      return reduce_all<Operation, float>(combine, result_dtype, args...);
    case Dtype::float64:
      return reduce_all<Operation, double>(combine, result_dtype, args...);
    case Dtype::int8:
      return reduce_all<Operation, int8_t>(combine, result_dtype, args...);
    case Dtype::int16:
      return reduce_all<Operation, int16_t>(combine, result_dtype, args...);
    case Dtype::int32:
      return reduce_all<Operation, int32_t>(combine, result_dtype, args...);
    case Dtype::int64:
      return reduce_all<Operation, int64_t>(combine, result_dtype, args...);
    case Dtype::uint8:
      return reduce_all<Operation, uint8_t>(combine, result_dtype, args...);
    case Dtype::boolean:
      return reduce_all<Operation, bool>(combine, result_dtype, args...);
  }
}

}  // namespace

size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float16:
    case Dtype::bfloat16:
    case Dtype::int16:
      return 2;
    case Dtype::float32:
    case Dtype::int32:
      return 4;
    case Dtype::float64:
    case Dtype::int64:
      return 8;
    case Dtype::int8:
    case Dtype::uint8:
    case Dtype::boolean:
      return 1;
  }
  return 0;
}

void reduce_rows(Combine combine, Dtype result_dtype, const std::vector<Rows>& sources, size_t rows,
                 size_t columns, int ranks, const Target* targets, size_t count) {
  const size_t row = columns * size_of(result_dtype);
  bool contiguous = true;  // rows without gaps are one long row
  for (const Rows& x : sources) contiguous = contiguous && x.stride == columns * size_of(x.dtype);
  for (size_t i = 0; i < count; ++i) contiguous = contiguous && targets[i].stride == row;
  if (contiguous) {
    columns *= rows;
    rows = columns > 0;
  }
  auto by = [&](auto operation) {
    reduce_by<decltype(operation)>(combine, result_dtype, sources, rows, columns, ranks, targets,
                                   count);
  };
  if (combine == Combine::max)
    by(Max());
  else if (combine == Combine::min)
    by(Min());
  else
    by(Sum());
}

}  // namespace weft
