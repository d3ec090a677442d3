// Copies between mapped memory: contiguous, rows with strides, to several places at once, and past the caches for large ones.
#pragma once

#include <cstddef>

namespace weft {

// Where rows go: the first begins at `base`, the others `stride` bytes apart. They are part of `whole` bytes that are written before
// anybody looks at them again.
struct Target {
  char* base;
  size_t stride;
  size_t whole;
};

// Copy `rows` rows of `row_bytes` bytes, `src_stride` bytes apart, to each of `count` targets, reading them from memory once. A
// target may be the source itself; else there is no overlap. Many bytes are shared out among the threads of the team.
void copy_rows(const Target* targets, size_t count, const char* src, size_t src_stride, size_t rows, size_t row_bytes);

// Copy them to one target.
inline void copy_rows(char* dst, size_t dst_stride, const char* src, size_t src_stride, size_t rows, size_t row_bytes) {
  Target target{dst, dst_stride, rows * row_bytes};
  copy_rows(&target, 1, src, src_stride, rows, row_bytes);
}

// Copy bytes that lie side by side; fast, too, where another core has read what is written over and still has its lines.
void copy_run(char* dst, const char* src, size_t bytes);

// Are so many bytes better written past the caches, in runs of `run` bytes?
bool streamed(size_t bytes, size_t run);
// Copy past the caches; what was written may be published after `streams_done`.
void stream(char* dst, const char* src, size_t bytes);
void streams_done();

}  // namespace weft
