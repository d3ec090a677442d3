#include "kernels/stores.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "kernels/clock.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <emmintrin.h>
#endif

namespace weft {

namespace {

// Smaller copies are faster through the caches.
// Measured on a 2-core Zen 4: larger ones, by stores that are chosen, are 1.1 to 6.1 times as fast
// (`weft bench all-gather --sizes 4K:4M:4`).
constexpr size_t kLeast = size_t{8} << 10;
// Shorter runs may have more than an eighth of their bytes in lines that they fill only in part.
constexpr size_t kLeastRun = 1024;

#if defined(__x86_64__)
constexpr bool kStreams = true;

// This core's share of the last cache: its size divided by the number of threads that share it,
// both from CPUID (leaves 4 and 0x8000001D).
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
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
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

// This thread's selection for copies of `bytes` bytes; copies up to the same power of two share
// one.
AdaptiveStores& adaptive_stores(Reader reader, size_t bytes) {
  constexpr size_t kSizes = 12;
  thread_local AdaptiveStores all[3][kSizes];
  AdaptiveStores* sizes = all[static_cast<int>(reader)];
  size_t number = 0;
  while (number + 1 < kSizes && kLeast << number < bytes) ++number;
  return sizes[number];
}

std::atomic<Stores> kind_of_stores{Stores::adaptive};

}  // namespace

Stores stores() { return kind_of_stores.load(std::memory_order_relaxed); }

void set_stores(Stores kind) { kind_of_stores.store(kind, std::memory_order_relaxed); }

Stores stores_named(const std::string& name) {
  for (Stores kind : {Stores::adaptive, Stores::cached, Stores::streaming})
    if (name == name_of(kind)) return kind;
  throw std::invalid_argument("stores are adaptive, cached or streaming; got '" + name + "'");
}

std::string name_of(Stores kind) {
  return kind == Stores::adaptive ? "adaptive" : kind == Stores::cached ? "cached" : "streaming";
}

void copy_run(char* dst, const char* src, size_t bytes) {
#if !defined(__x86_64__) || defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  std::memcpy(dst, src, bytes);  // sanitizers do not see the writes of inline assembly
#else
  // A store to a line that another core owns must wait for the line, one line after the other. `rep
  // movsb` is known to write full lines, and requests many at once. Processors with fast short `rep
  // movsb` (FSRM) lose nothing by it from this size on.
  // Measured on a 2-core Zen 5: 64 KiB over rows that a peer has read take 1.6 us instead of 9.
  constexpr size_t kRepeated = size_t{1} << 10;
  static const bool fast = [] {
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & 1u << 4;  // FSRM
  }();
  if (!fast || bytes < kRepeated) return void(std::memcpy(dst, src, bytes));
  __asm__ volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes) : : "memory");
#endif
}

// How many times as fast the other kind of stores must be, and with it a time that counts as
// changed: ranks, or other processes, have moved to other cores.
constexpr float kFactor = 2;
// After this number of copies all lines are where the selected kind leaves them, and in the average
// of times, to which each adds half, the earlier ones weigh 1/256.
constexpr uint32_t kSettled = 8;
// the fewest copies between trials: a trial in 32 costs at most 3 % of them, if it takes twice as
// long
constexpr size_t kSeldom = 32;

void AdaptiveStores::begin(size_t bytes) {
  // Non-temporal stores must be faster by the factor and by this number of nanoseconds, since the
  // time that the peer loses by them is not measured here: some ten misses of its caches.
  constexpr float kNanoseconds = 700;
  const bool measured = recent_[0] > 0 && recent_[1] > 0;
  const bool faster = kFactor * recent_[1] + kNanoseconds / static_cast<float>(bytes) < recent_[0];
  const bool changed =
      recent_[faster] > kFactor * compared_ || kFactor * recent_[faster] < compared_;
  const bool trying = measured && (copies_ >= next_ || (changed && copies_ >= tried_ + kSettled));
  non_temporal_ = measured ? faster != trying : recent_[0] > 0;
  ++copies_;
  if (!trying) return;
  compared_ = recent_[faster];
  tried_ = copies_;
  next_ = copies_ +
          std::min(copies_, static_cast<uint32_t>(std::max(kSeldom, (size_t{64} << 20) / bytes)));
}

void AdaptiveStores::record(float per_byte) {
  // the first copy after a trial finds the lines where the other kind has left them
  if (copies_ == tried_ + 1) return;
  float& recent = recent_[non_temporal_];
  // confirm a sudden gain soon
  if (recent > kFactor * per_byte) next_ = std::min(next_, copies_ + kSettled);
  if (recent <= 0)
    recent = per_byte;
  else if (per_byte < recent)
    recent = (recent + per_byte) / 2;
  else
    recent = std::min(per_byte, 2 * recent);  // an interrupted copy must not count in full
}

Writer::Writer(const Target* targets, size_t count, size_t bytes, size_t run)
    : run_(run), kind_(stores()) {
  if (!kStreams || bytes < kLeast || run < kLeastRun) return;
  stream_all_ = kind_ == Stores::streaming;
  if (kind_ != Stores::adaptive) return;
  const Target* to = std::find_if(targets, targets + count,
                                  [](const Target& x) { return x.reader != Reader::self; });
  if (to == targets + count) return;
  adaptive_ = &adaptive_stores(to->reader, bytes);
  adaptive_->begin(bytes);  // N3
}

bool Writer::exceeds_caches(size_t total) const {
  // From this number of bytes on, written data does not stay in the caches until it is read.
  // Non-temporal stores then leave the caches to other data, and save reading the overwritten
  // lines.
  // Measured on a 2-core Zen 3: they take a third less time than string copies.
  static const size_t kStreamed = std::max(size_t{8} << 20, cache_share());
  constexpr size_t kPage = 4096;
  return kStreams && kind_ != Stores::cached && total >= kStreamed && run_ >= kPage;
}

void Writer::write(const Target& to, char* dst, const char* src, size_t bytes) {
  const bool streams = non_temporal(to), measures = adapts(to);
  const int64_t start = measures ? now() : 0;
  streams ? stream(dst, src, bytes) : copy_run(dst, src, bytes);
  streamed_ = streamed_ || streams;
  if (measures) {
    nanoseconds_ += now() - start;
    written_ += bytes;
  }
}

void Writer::done(bool first) {
  if (streamed_) streams_done();  // N1
  if (first && written_)          // N3
    adaptive_->record(static_cast<float>(nanoseconds_) / static_cast<float>(written_));
}

}  // namespace weft
