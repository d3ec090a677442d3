// How bytes are written: through the caches or past them, whichever is better for who reads them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

// Who reads what is written: this rank alone, peers too, or the peer whose memory it is.
enum class Reader : uint8_t { self, peers, owner };

// Where rows go: the first begins at `base`, the others `stride` bytes apart. They are part of
// `whole` bytes that are written before anybody looks at them again.
struct Target {
  char* base;
  size_t stride;
  size_t whole;
  Reader reader = Reader::self;
};

// Whether what peers read is written past the caches, learnt from how long it takes, for copies of
// about one size.
//
// A store to a line that a peer has read must wait until that core has given it up. This takes
// nothing between threads of one core, and up to 40 ns a line between distant ones. Past the caches
// it never waits, but the peer then reads from memory. So whoever writes times both ways now and
// then; ranks need not agree.
class Learnt {
 public:
  void begin(size_t bytes);
  // The way of the copy that has begun.
  bool past() const { return past_; }
  // It took so many nanoseconds for each byte.
  void took(float each);

 private:
  float took_[2] = {0, 0};  // of late, through the caches and past them
  float compared_ = 0;      // how long the faster way took when the other was last tried
  uint32_t copies_ = 0, tried_ = 0, next_ = 0;
  bool past_ = false;
};

// Writes what is copied or made to its targets. One for all targets of a copy of `bytes` bytes, in
// runs of `run` bytes; the threads of a team each take a copy of it.
class Writer {
 public:
  Writer(const Target* targets, size_t count, size_t bytes, size_t run);

  bool past_caches(const Target& to) const {
    return (learns(to) && learnt_->past()) || streamed(to.whole);
  }
  void write(const Target& to, char* dst, const char* src, size_t bytes);
  // What this thread has written may be published. `first`: it is the one whose time counts.
  void done(bool first);

 private:
  bool streamed(size_t whole) const;
  bool learns(const Target& to) const { return learnt_ && to.reader != Reader::self; }

  size_t run_;
  Learnt* learnt_ = nullptr;  // of the thread that made this; the threads of a team only look at it
  bool streams_ = false;
  int64_t took_ = 0;
  size_t written_ = 0;
};

// Copy bytes that lie side by side through the caches.
void copy_run(char* dst, const char* src, size_t bytes);

}  // namespace weft
