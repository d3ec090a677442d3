// Division of large copies and sums among the threads that torch computes with.
//
// T1  The parts of a matrix contain each element exactly once, and no element depends on another.
//     So no result depends on the number of threads.
// T2  Parts are cut at multiples of a cache line, counted over all elements. So no two threads
//     write to one line of a contiguous matrix that begins at a line.
// T3  A part is never divided again: its thread has a team of one meanwhile.
// T4  A forked child has no team: its parent's threads are not there.
#pragma once

#include <algorithm>
#include <cstddef>

namespace weft {

// Number of threads that share a copy of the calling thread: the number of torch's operators there,
// unless `set_team_size` has fixed it.
size_t team_size();
// Fix the number for the calling thread, for instance for a lane that runs concurrently with the
// caller; 0 ends that.
void set_team_size(size_t threads);
// Set whether threads without a fixed number use teams at all, and return whether they did. They do
// not where other threads need the cores, since a team waits for its slowest thread.
bool allow_teams(bool allowed);

// Call `run` with `work` and the number of a part, for each of `parts` parts on its own thread, and
// return when all have returned. There may be fewer parts than requested.
void run_team(size_t parts, void (*run)(const void* work, size_t part, size_t parts),
              const void* work);

// From this number of bytes on a second thread saves more time than starting and joining it takes.
// Measured on a 2-core Zen 5: two threads put 1 MiB 1.95 times as fast, and less than 256 KiB no
// faster (`python benchmarks/threads.py`).
constexpr size_t kShared = size_t{256} << 10;

// Call `work(part, parts)` for each part, on the threads of the team if `bytes` bytes are worth it:
// else there is one part, on this thread.
template <class Work>
void on_team(size_t bytes, const Work& work) {
  const size_t threads = bytes < kShared ? 1 : team_size();
  if (threads < 2) return work(size_t{0}, size_t{1});
  run_team(
      threads,
      [](const void* all, size_t part, size_t parts) {
        (*static_cast<const Work*>(all))(part, parts);
      },
      &work);
}

// Call `work(row, rows, column, columns)` for parts that make up a matrix of `rows` rows of
// `columns` elements of `item` bytes: one after the other for the parts of a thread, and on the
// threads of the team if that pays. All threads get equal numbers of lines of elements (T1, T2).
template <class Work>
void share(size_t rows, size_t columns, size_t item, const Work& work) {
#ifdef WEFT_MUTANT_NO_COPY  // a build that moves nothing, to prove that the tests notice
  return;
#endif
  on_team(rows * columns * item, [&](size_t part, size_t parts) {
    if (parts == 1) return work(size_t{0}, rows, size_t{0}, columns);
    const size_t all = rows * columns, line = std::max<size_t>(64 / item, 1),
                 lines = (all + line - 1) / line;
    const size_t end = std::min(lines * (part + 1) / parts * line, all);  // T2
    // the rest of a row, full rows, the beginning of a row
    for (size_t at = lines * part / parts * line; at < end;) {
      const size_t row = at / columns, column = at % columns;
      const size_t full = column || end - at < columns ? 0 : (end - at) / columns;
      const size_t wide = full ? columns : std::min(columns - column, end - at);
      work(row, std::max<size_t>(full, 1), column, wide);
      at += std::max<size_t>(full, 1) * wide;
    }
  });
}

}  // namespace weft
