// The instructions of a plan in PTO's tile instructions. A plan's wait is a TWAIT, its notify a
// TNOTIFY that adds 1, its copy a TPUT or a TGET, its product a loop of TMATMUL and TMATMUL_ACC,
// and its sum one of TADD.
#pragma once

#include <cstdint>
#include <type_traits>

#include <pto/pto-inst.hpp>

#include <pto/comm/pto_comm_inst.hpp>
#include <pto/common/constants.hpp>

#include "plan.hpp"

using Element = half;
using Sum = float;
using Result = std::conditional_t<MULTIPLIES, Sum, Element>;
using Moved = std::conditional_t<SUMS, Sum, Element>;
constexpr int MOVED_WIDTH = SUMS ? N : K;

// The first of some rows of a buffer of a rank.
struct Place {
  int rank;
  int buffer;
  int row;
};

// The memory of a rank: the caller's tensors, and a part of each rank's window, which has the
// buffers that peers reach and then the counters, by signal and rank that raises it.
struct Memory {
  int rank;
  __gm__ Element* a;
  __gm__ Element* b;
  __gm__ Result* out;
  __gm__ uint8_t* windows[RANKS];

  template <typename T, int WIDTH>
  AICORE __gm__ T* rows(Place place) const {
    __gm__ uint8_t* start = place.buffer == A     ? reinterpret_cast<__gm__ uint8_t*>(a)
                            : place.buffer == OUT ? reinterpret_cast<__gm__ uint8_t*>(out)
                                                  : windows[place.rank] + BEGIN[place.buffer];
    return reinterpret_cast<__gm__ T*>(start) + static_cast<int64_t>(place.row) * WIDTH;
  }

  AICORE __gm__ int32_t* counter(int of, int signal, int source) const {
    return reinterpret_cast<__gm__ int32_t*>(windows[of] + COUNTERS) + signal * RANKS + source;
  }
};

// Wait until a counter of this rank has grown by `count` in this execution. It grows by `promised`
// in each, and executions are numbered from 1 on.
AICORE inline void wait(const Memory& memory, int signal, int source, int promised, int count,
                        int execution) {
  pto::comm::Signal counter(memory.counter(memory.rank, signal, source));
  pto::comm::TWAIT(counter, (execution - 1) * promised + count, pto::comm::WaitCmp::GE);
}

// Add 1 to a counter of a rank after everything before is visible there.
AICORE inline void notify(const Memory& memory, int rank, int signal) {
  pipe_barrier(PIPE_ALL);
  dsb(DSB_DDR);
  pto::comm::Signal counter(memory.counter(rank, signal, memory.rank));
  pto::comm::TNOTIFY(counter, 1, pto::comm::NotifyOp::AtomicAdd);
}

using MovedTile =
    pto::Tile<pto::TileType::Vec, Moved, MOVED_ROWS, MOVED_COLUMNS, pto::BLayout::RowMajor, -1, -1>;
constexpr int MOVED_BYTES = MOVED_ROWS * MOVED_COLUMNS * sizeof(Moved);

template <int ROWS>
using MovedRows = pto::GlobalTensor<
    Moved, pto::Shape<1, 1, 1, ROWS, MOVED_WIDTH>,
    pto::Stride<ROWS * MOVED_WIDTH, ROWS * MOVED_WIDTH, ROWS * MOVED_WIDTH, MOVED_WIDTH, 1>>;

// Copy rows tile by tile, by two tiles in turn.
template <int ROWS, bool GETS>
AICORE inline void copy(const Memory& memory, Place from, Place to) {
  MovedTile ping(MOVED_ROWS, MOVED_COLUMNS), pong(MOVED_ROWS, MOVED_COLUMNS);
  TASSIGN(ping, 0x0);
  TASSIGN(pong, MOVED_BYTES);
  MovedRows<ROWS> source(memory.rows<Moved, MOVED_WIDTH>(from));
  MovedRows<ROWS> target(memory.rows<Moved, MOVED_WIDTH>(to));
  if constexpr (GETS) {
    pto::comm::TGET(target, source, ping, pong);
  } else {
    pto::comm::TPUT(target, source, ping, pong);
  }
}

// Copy rows of this rank.
template <int ROWS>
AICORE inline void put(const Memory& memory, Place from, Place to) {
  copy<ROWS, false>(memory, from, to);
}

// Copy rows of a peer to this rank.
template <int ROWS>
AICORE inline void get(const Memory& memory, Place from, Place to) {
  copy<ROWS, true>(memory, from, to);
}

// Add rows, tile by tile, in the order of `from`.
template <int ROWS, int COUNT>
AICORE inline void sum(const Memory& memory, const Place (&from)[COUNT], Place to) {
  using Rows = pto::GlobalTensor<Moved, pto::Shape<1, 1, 1, MOVED_ROWS, MOVED_COLUMNS>,
                                 pto::Stride<MOVED_ROWS * MOVED_WIDTH, MOVED_ROWS * MOVED_WIDTH,
                                             MOVED_ROWS * MOVED_WIDTH, MOVED_WIDTH, 1>>;
  MovedTile total(MOVED_ROWS, MOVED_COLUMNS), next(MOVED_ROWS, MOVED_COLUMNS);
  TASSIGN(total, 0x0);
  TASSIGN(next, MOVED_BYTES);
  for (int row = 0; row < ROWS; row += MOVED_ROWS) {
    for (int column = 0; column < MOVED_WIDTH; column += MOVED_COLUMNS) {
      const auto tile = [&](Place place) {
        place.row += row;
        return Rows(memory.rows<Moved, MOVED_WIDTH>(place) + column);
      };
      Rows first = tile(from[0]);
      TLOAD(total, first);
      for (int number = 1; number < COUNT; ++number) {
        Rows other = tile(from[number]);
        TLOAD(next, other);
        set_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);
        wait_flag(PIPE_MTE2, PIPE_V, EVENT_ID0);
        TADD(total, total, next);
        set_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);
        wait_flag(PIPE_V, PIPE_MTE2, EVENT_ID0);
      }
      set_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);
      wait_flag(PIPE_V, PIPE_MTE3, EVENT_ID0);
      Rows target = tile(to);
      TSTORE(target, total);
      set_flag(PIPE_MTE3, PIPE_MTE2, EVENT_ID0);
      wait_flag(PIPE_MTE3, PIPE_MTE2, EVENT_ID0);
    }
  }
  pipe_barrier(PIPE_ALL);
}

// Multiply rows by this rank's weight, tile by tile: over K by two tiles of each operand in turn.
template <int ROWS>
AICORE inline void product(const Memory& memory, Place from, Place to) {
  using namespace pto;
  using LeftRows = GlobalTensor<Element, pto::Shape<1, 1, 1, BASE_M, BASE_K>,
                                pto::Stride<BASE_M * K, BASE_M * K, BASE_M * K, K, 1>>;
  using RightRows = GlobalTensor<Element, pto::Shape<1, 1, 1, BASE_K, BASE_N>,
                                 pto::Stride<BASE_K * N, BASE_K * N, BASE_K * N, N, 1>>;
  using OutRows = GlobalTensor<Sum, pto::Shape<1, 1, 1, BASE_M, BASE_N>,
                               pto::Stride<BASE_M * N, BASE_M * N, BASE_M * N, N, 1>>;
  using LeftMat = Tile<TileType::Mat, Element, BASE_M, BASE_K, BLayout::ColMajor, BASE_M, BASE_K,
                       SLayout::RowMajor, 512>;
  using RightMat = Tile<TileType::Mat, Element, BASE_K, BASE_N, BLayout::ColMajor, BASE_K, BASE_N,
                        SLayout::RowMajor, 512>;
  constexpr int LEFT_BYTES = BASE_M * BASE_K * sizeof(Element);
  constexpr int RIGHT_BYTES = BASE_K * BASE_N * sizeof(Element);
  LeftMat leftMat[2];
  RightMat rightMat[2];
  TileLeft<Element, BASE_M, BASE_K, BASE_M, BASE_K> left[2];
  TileRight<Element, BASE_K, BASE_N, BASE_K, BASE_N> right[2];
  TileAcc<Sum, BASE_M, BASE_N, BASE_M, BASE_N> sum;
  TASSIGN(leftMat[0], 0x0);
  TASSIGN(leftMat[1], LEFT_BYTES);
  TASSIGN(rightMat[0], 2 * LEFT_BYTES);
  TASSIGN(rightMat[1], 2 * LEFT_BYTES + RIGHT_BYTES);
  TASSIGN(left[0], 0x0);
  TASSIGN(left[1], LEFT_BYTES);
  TASSIGN(right[0], 0x0);
  TASSIGN(right[1], RIGHT_BYTES);
  TASSIGN(sum, 0x0);
  for (int m = 0; m < ROWS; m += BASE_M) {
    for (int n = 0; n < N; n += BASE_N) {
      for (int turn = 0; turn < 2; ++turn) {  // both tiles of each operand are free
        set_flag(PIPE_MTE1, PIPE_MTE2, (event_t)turn);
        set_flag(PIPE_M, PIPE_MTE1, (event_t)turn);
      }
      for (int k = 0; k < K; k += BASE_K) {
        const int turn = k / BASE_K % 2;
        LeftRows leftRows(memory.rows<Element, K>(from) + static_cast<int64_t>(m) * K + k);
        RightRows rightRows(memory.b + static_cast<int64_t>(k) * N + n);
        wait_flag(PIPE_MTE1, PIPE_MTE2, (event_t)turn);
        TLOAD(leftMat[turn], leftRows);
        TLOAD(rightMat[turn], rightRows);
        set_flag(PIPE_MTE2, PIPE_MTE1, (event_t)turn);
        wait_flag(PIPE_MTE2, PIPE_MTE1, (event_t)turn);
        wait_flag(PIPE_M, PIPE_MTE1, (event_t)turn);
        TMOV(left[turn], leftMat[turn]);
        TMOV(right[turn], rightMat[turn]);
        set_flag(PIPE_MTE1, PIPE_MTE2, (event_t)turn);
        set_flag(PIPE_MTE1, PIPE_M, (event_t)turn);
        wait_flag(PIPE_MTE1, PIPE_M, (event_t)turn);
        if (k == 0) {
          TMATMUL(sum, left[turn], right[turn]);
        } else {
          TMATMUL_ACC(sum, sum, left[turn], right[turn]);
        }
        set_flag(PIPE_M, PIPE_MTE1, (event_t)turn);
      }
      for (int turn = 0; turn < 2; ++turn) {
        wait_flag(PIPE_MTE1, PIPE_MTE2, (event_t)turn);
        wait_flag(PIPE_M, PIPE_MTE1, (event_t)turn);
      }
      set_flag(PIPE_M, PIPE_FIX, EVENT_ID0);
      wait_flag(PIPE_M, PIPE_FIX, EVENT_ID0);
      OutRows outRows(memory.rows<Sum, N>(to) + static_cast<int64_t>(m) * N + n);
      TSTORE(outRows, sum);
      set_flag(PIPE_FIX, PIPE_M, EVENT_ID0);
      wait_flag(PIPE_FIX, PIPE_M, EVENT_ID0);
    }
  }
  pipe_barrier(PIPE_ALL);
}
