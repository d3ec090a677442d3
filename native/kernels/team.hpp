// Copies and sums of many bytes are shared out among the threads that torch computes with.
#pragma once

#include <algorithm>
#include <cstddef>

namespace weft {

// How many threads share what the calling thread does: as many as torch's operators there would,
// unless it was given a number.
size_t team_size();
// Give the calling thread a number for good, as to a lane that works beside the caller.
void set_team_size(size_t threads);
// Whether threads that were given no number share at all: not where others need the cores, since a
// team waits for its slowest.
void let_teams(bool share);

// Call `run` with `work` and the number of a part, for each of `parts` parts on a thread of its
// own, and return when all have. There may be fewer parts than asked for.
void run_team(size_t parts, void (*run)(const void* work, size_t part, size_t parts),
              const void* work);

// From so many bytes on a copy gains more by a second thread than it takes to begin and to end
// together.
constexpr size_t kShared = size_t{256} << 10;

// Call `work(row, rows, column, columns)` for parts that make up a matrix of `rows` rows of
// `columns` elements of `item` bytes: one after the other for the parts of a thread, and on the
// threads of the team if that pays. Threads are given as many elements as the others, counted over
// all rows; where these lie side by side, no two write to one cache line.
template <class Work>
void share(size_t rows, size_t columns, size_t item, const Work& work) {
#ifdef WEFT_MUTANT_NO_COPY  // a build that moves nothing, to prove that the tests would notice
  return;
#endif
  const size_t threads = rows * columns * item < kShared ? 1 : team_size();
  if (threads < 2) return work(size_t{0}, rows, size_t{0}, columns);
  auto run = [&](size_t part, size_t parts) {
    const size_t all = rows * columns, line = std::max<size_t>(64 / item, 1),
                 lines = (all + line - 1) / line;
    const size_t end = std::min(lines * (part + 1) / parts * line, all);
    // the rest of a row, whole rows, the beginning of one
    for (size_t at = lines * part / parts * line; at < end;) {
      const size_t row = at / columns, column = at % columns;
      const size_t whole = column || end - at < columns ? 0 : (end - at) / columns;
      const size_t wide = whole ? columns : std::min(columns - column, end - at);
      work(row, std::max<size_t>(whole, 1), column, wide);
      at += std::max<size_t>(whole, 1) * wide;
    }
  };
  run_team(
      threads,
      [](const void* all, size_t part, size_t parts) {
        (*static_cast<const decltype(run)*>(all))(part, parts);
      },
      &run);
}

}  // namespace weft
