#include "peer_memory.hpp"

#include <sys/uio.h>

#include <atomic>

#include "team.hpp"

namespace weft {

bool read_memory(int pid, uintptr_t from, size_t stride, char* to, size_t to_stride, size_t rows, size_t row_bytes) {
  if (stride == row_bytes && to_stride == row_bytes) row_bytes *= rows, rows = 1;
  std::atomic<bool> good{true};
  share(rows, row_bytes, 1, [&](size_t first, size_t high, size_t left, size_t wide) {
    for (size_t row = first; row < first + high; ++row)
      for (size_t done = 0; done < wide && good.load(std::memory_order_relaxed);) {
        const iovec here{to + row * to_stride + left + done, wide - done};
        const iovec there{reinterpret_cast<void*>(from + row * stride + left + done), wide - done};
        const ssize_t read = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (read <= 0) good.store(false, std::memory_order_relaxed);
        else done += static_cast<size_t>(read);
      }
  });
  return good.load(std::memory_order_relaxed);
}

}  // namespace weft
