#include "kernels/stores.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/clock.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>
#endif

namespace weft {

namespace {

// smaller copies are faster through the cache
constexpr size_t kLeast = size_t{8} << 10;
// shorter runs have much of their bytes in lines that they do not fill
constexpr size_t kLeastRun = 1024;

#if defined(__x86_64__)
constexpr bool kStreams = true;

// This core's share of the last cache: its bytes by how many share it, as the processor says
// (CPUID, leaves 4 and 0x8000001D).
size_t cache_share() {
  size_t share = 0;
  for (unsigned leaf : {0x4u, 0x8000001du})
    for (unsigned i = 0, a, b, c, d; __get_cpuid_count(leaf, i, &a, &b, &c, &d) && a & 31; ++i) {
      const size_t lines = size_t{c + 1} * ((b >> 22) + 1) * ((b >> 12 & 0x3ff) + 1);
      share = lines * ((b & 0xfff) + 1) / ((a >> 14 & 0xfff) + 1);
    }
  return share;
}

void stream(char* dst, const char* src, size_t bytes) {
  size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(dst) % 64), i = head;
  std::memcpy(dst, src, head);
  for (; i + 64 <= bytes; i += 64) {
    auto from = reinterpret_cast<const __m128i*>(src + i);
    auto to = reinterpret_cast<__m128i*>(dst + i);
    __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2),
            d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b), _mm_stream_si128(to + 2, c),
        _mm_stream_si128(to + 3, d);
  }
  std::memcpy(dst + i, src + i, bytes - i);
}

void streams_done() { _mm_sfence(); }
#else
constexpr bool kStreams = false;
size_t cache_share() { return 0; }
void stream(char* dst, const char* src, size_t bytes) { std::memcpy(dst, src, bytes); }
void streams_done() {}
#endif

// What this thread has learnt of copies of up to so many bytes, a power of two each.
Learnt& learnt(Reader reader, size_t bytes) {
  constexpr size_t kSizes = 12;
  thread_local Learnt all[3][kSizes];
  Learnt* sizes = all[static_cast<int>(reader)];
  size_t number = 0;
  while (number + 1 < kSizes && kLeast << number < bytes) ++number;
  return sizes[number];
}

}  // namespace

void copy_run(char* dst, const char* src, size_t bytes) {
#if !defined(__x86_64__) || defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  std::memcpy(dst, src, bytes);  // sanitizers do not see what an instruction of ours writes
#else
  // A store to a line that another core has must wait for it, one after the other. `rep movsb`
  // knows that whole lines are written, and takes many at once; processors with fast short ones
  // lose nothing by it from here on.
  constexpr size_t kRepeated = size_t{1} << 10;
  static const bool fast = [] {
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & 1u << 4;  // FSRM
  }();
  if (!fast || bytes < kRepeated) return void(std::memcpy(dst, src, bytes));
  __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes) : : "memory");
#endif
}

// times as long, or as short, as it was: ranks are on other cores, or others beside them
constexpr float kOther = 2;
constexpr uint32_t kSettled = 8;  // copies after which lines are where the present way leaves them

void Learnt::begin(size_t bytes) {
  // Past the caches it must be so much faster, and by so many nanoseconds: what the peer loses is
  // not seen here.
  constexpr float kFaster = 2, kSooner = 700;
  const bool known = took_[0] > 0 && took_[1] > 0;
  const bool faster = kFaster * took_[1] + kSooner / static_cast<float>(bytes) < took_[0];
  const bool changed = took_[faster] > kOther * compared_ || kOther * took_[faster] < compared_;
  const bool trying = known && (copies_ >= next_ || (changed && copies_ >= tried_ + kSettled));
  past_ = known ? faster != trying : took_[0] > 0;
  ++copies_;
  if (!trying) return;
  compared_ = took_[faster], tried_ = copies_;
  next_ =
      copies_ +
      std::min(copies_, static_cast<uint32_t>(std::max<size_t>(32, (size_t{64} << 20) / bytes)));
}

void Learnt::took(float each) {
  // of a copy that found lines where the other way had left them
  if (copies_ == tried_ + 1) return;
  float& known = took_[past_];
  if (known > kOther * each) next_ = std::min(next_, copies_ + kSettled);  // to be seen again soon
  if (known <= 0) known = each;
  // what was held up says little
  else
    known = each < known ? (known + each) / 2 : std::min(each, 2 * known);
}

Writer::Writer(const Target* targets, size_t count, size_t bytes, size_t run) : run_(run) {
  if (!kStreams || bytes < kLeast || run < kLeastRun) return;
  const Target* to = std::find_if(targets, targets + count,
                                  [](const Target& x) { return x.reader != Reader::self; });
  if (to == targets + count) return;
  learnt_ = &learnt(to->reader, bytes);
  learnt_->begin(bytes);
}

bool Writer::streamed(size_t whole) const {
  // From so many written bytes on they do not stay in the caches until somebody looks at them
  // again. Stores past the caches then leave these to others, and save reading what is written
  // over.
  static const size_t kStreamed = std::max(size_t{8} << 20, cache_share()), kPage = 4096;
  return kStreams && whole >= kStreamed && run_ >= kPage;
}

void Writer::write(const Target& to, char* dst, const char* src, size_t bytes) {
  const bool past = past_caches(to), clocked = learns(to);
  const int64_t start = clocked ? now() : 0;
  past ? stream(dst, src, bytes) : copy_run(dst, src, bytes);
  streams_ = streams_ || past;
  if (clocked) took_ += now() - start, written_ += bytes;
}

void Writer::done(bool first) {
  if (streams_) streams_done();
  if (first && written_) learnt_->took(static_cast<float>(took_) / static_cast<float>(written_));
}

}  // namespace weft
