// Stores to memory, temporal or non-temporal, depending on the rank that reads the data next.
//
// N1  Non-temporal stores are outside x86's order of memory. Each thread calls Writer::done after
//     its last store of a copy, which puts them back into the order; so a notify after a copy
//     publishes all its bytes.
// N2  The kind of stores changes the time of a copy, never its result. So ranks, and threads,
//     select it independently.
// N3  An AdaptiveStores is changed only by its own thread. `begin` fixes the kind before a team
//     starts, and the other threads of the team only read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace weft {

// Kinds of stores of this process. `adaptive`: non-temporal for data that peers read if they are
// faster by measured time, and for more data than the caches hold. `cached`: never non-temporal.
// `streaming`: non-temporal for all copies that are not too small for it. The last two do not
// depend on earlier copies, so a measurement with them can be repeated.
enum class Stores : int { adaptive, cached, streaming };

Stores stores();
void set_stores(Stores kind);
// Throws std::invalid_argument for another name than that of a kind.
Stores stores_named(const std::string& name);
std::string name_of(Stores kind);

// Reader of written data: this rank alone, its peers as well, or only the peer that owns the
// memory.
enum class Reader : uint8_t { self, peers, owner };

// Destination of rows: the first row is at `base`, the next ones `stride` bytes apart. `total` is
// the number of bytes that are written, in these rows and elsewhere, before any of them is read.
struct Target {
  char* base;
  size_t stride;
  size_t total;
  Reader reader = Reader::self;
};

// Selection of temporal or non-temporal stores for data that peers read, by measured time, for
// copies of about one size.
//
// A temporal store to a line that a peer has read must wait until that core gives the line up. The
// delay is nothing between threads of one core, and up to 40 ns a line between distant cores. A
// non-temporal store never waits, but then the peer reads from memory. So the writing thread
// measures both kinds from time to time; ranks need not agree.
class AdaptiveStores {
 public:
  void begin(size_t bytes);
  // The kind selected for the copy that `begin` has announced.
  bool non_temporal() const { return non_temporal_; }
  // Record the duration of that copy, in nanoseconds per byte.
  void record(float per_byte);

 private:
  float recent_[2] = {0, 0};  // nanoseconds per byte of recent copies: temporal, non-temporal
  float compared_ = 0;        // `recent_` of the faster kind when the slower one was last tried
  uint32_t copies_ = 0, tried_ = 0, next_ = 0;
  bool non_temporal_ = false;
};

// Writes the bytes of one copy or reduction to its targets. One object serves all targets of a copy
// of `bytes` bytes, in runs of `run` bytes; each thread of a team uses its own copy of it.
class Writer {
 public:
  Writer(const Target* targets, size_t count, size_t bytes, size_t run);

  bool non_temporal(const Target& to) const {
    return stream_all_ || (adapts(to) && adaptive_->non_temporal()) || exceeds_caches(to.total);
  }
  void write(const Target& to, char* dst, const char* src, size_t bytes);
  // Order this thread's writes before its next signal (N1). `first`: this part's time is recorded;
  // it is a part of the thread that made the Writer (N3).
  void done(bool first);

 private:
  bool exceeds_caches(size_t total) const;
  bool adapts(const Target& to) const { return adaptive_ && to.reader != Reader::self; }

  size_t run_;
  Stores kind_;
  bool stream_all_ = false;             // all targets are written by non-temporal stores
  AdaptiveStores* adaptive_ = nullptr;  // of the thread that made this object (N3)
  bool streamed_ = false;
  int64_t nanoseconds_ = 0;
  size_t written_ = 0;
};

// Copy contiguous bytes by temporal stores.
void copy_run(char* dst, const char* src, size_t bytes);

}  // namespace weft
