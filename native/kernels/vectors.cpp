#include "kernels/vectors.hpp"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace weft {

namespace {

Instructions of_processor() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  __builtin_cpu_init();
  const bool converts = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
  if (!converts || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
    return Instructions::baseline;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq"))
    return Instructions::avx2;
  const bool pairs = __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1u << 5;
  return pairs ? Instructions::avx512_bf16 : Instructions::avx512;
#else
  return Instructions::baseline;
#endif
}

}  // namespace

Instructions find_instructions() {
  Instructions found = of_processor();
  // `weft/variables.py` has checked it
  if (const char* name = std::getenv("WEFT_INSTRUCTIONS"))
    for (int i = 0; i < static_cast<int>(found); ++i)
      if (!std::strcmp(name, kInstructions[i])) return static_cast<Instructions>(i);
  return found;
}

}  // namespace weft
