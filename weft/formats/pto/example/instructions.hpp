// The instructions of a plan in PTO's tile instructions. A plan's wait is a TWAIT, its notify a
// TNOTIFY that adds 1, its copy a TPUT, and its product a loop of TMATMUL and TMATMUL_ACC.
#pragma once

#include <cstdint>

#include <pto/pto-inst.hpp>

#include <pto/comm/pto_comm_inst.hpp>
#include <pto/common/constants.hpp>

#include "plan.hpp"

using Element = half;
using Sum = float;

// The memory of a rank: the caller's tensors, and a part of each rank's window, which has the
// buffers that peers write to and then the counters, by signal and rank that raises it.
struct Memory {
  int rank;
  __gm__ Element* a;
  __gm__ Element* b;
  __gm__ Sum* out;
  __gm__ uint8_t* windows[RANKS];

  AICORE __gm__ Element* rows(int of, int buffer, int row) const {
    __gm__ Element* start =
        buffer == A ? a : reinterpret_cast<__gm__ Element*>(windows[of] + BEGIN[buffer]);
    return start + static_cast<int64_t>(row) * K;
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

// Copy rows of this rank to a rank, tile by tile, by two tiles in turn.
template <int ROWS>
AICORE inline void put(const Memory& memory, int from, int row, int rank, int to, int at) {
  using Rows = pto::GlobalTensor<Element, pto::Shape<1, 1, 1, ROWS, K>,
                                 pto::Stride<ROWS * K, ROWS * K, ROWS * K, K, 1>>;
  using Tile = pto::Tile<pto::TileType::Vec, Element, MOVED_ROWS, MOVED_COLUMNS,
                         pto::BLayout::RowMajor, -1, -1>;
  Tile ping(MOVED_ROWS, MOVED_COLUMNS), pong(MOVED_ROWS, MOVED_COLUMNS);
  TASSIGN(ping, 0x0);
  TASSIGN(pong, MOVED_ROWS * MOVED_COLUMNS * sizeof(Element));
  Rows source(memory.rows(memory.rank, from, row)), target(memory.rows(rank, to, at));
  pto::comm::TPUT(target, source, ping, pong);
}

// Multiply rows by this rank's weight, tile by tile: over K by two tiles of each operand in turn.
template <int ROWS>
AICORE inline void product(const Memory& memory, int from, int row, int at) {
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
        LeftRows leftRows(memory.rows(memory.rank, from, row + m) + k);
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
      OutRows outRows(memory.out + static_cast<int64_t>(at + m) * N + n);
      TSTORE(outRows, sum);
      set_flag(PIPE_FIX, PIPE_M, EVENT_ID0);
      wait_flag(PIPE_FIX, PIPE_M, EVENT_ID0);
    }
  }
  pipe_barrier(PIPE_ALL);
}
