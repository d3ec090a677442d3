#include "memory/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <stdexcept>
#include <system_error>

// since Linux 5.14; older C libraries do not define it, and older kernels refuse it
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace weft {

namespace {
[[noreturn]] void fail(const char* action) {
  throw std::system_error(errno, std::generic_category(), action);
}

// Bytes of one system call: older kernels undo one that a signal interrupts, as a profiler's timer
// does again and again.
constexpr size_t kAllocated = 16 << 20;

// Allocate all pages of a file at once (G1), on this rank's node.
void allocate(char* base, size_t bytes, int fd) {
  if (!bytes) return;
  // With plenty of free memory the mapping allocates pages, huge ones if the kernel provides them.
  // Otherwise fallocate does, which fails if memory is short.
  struct sysinfo memory;
  madvise(base, bytes, MADV_HUGEPAGE);
  const bool plenty = !sysinfo(&memory) && bytes < memory.freeram / 2 * memory.mem_unit;
  if (plenty) madvise(base, bytes, MADV_POPULATE_WRITE);
  for (size_t done = 0; done < bytes; done += kAllocated) {
    const size_t size = std::min(kAllocated, bytes - done);
    do errno = posix_fallocate(fd, static_cast<off_t>(done), static_cast<off_t>(size));
    while (errno == EINTR);
    if (errno) fail("fallocate");
  }
  if (!plenty) madvise(base, bytes, MADV_POPULATE_WRITE);
}

// All segments of this process, by the addresses of their own parts. The registry is never
// destroyed, since static objects of Python may refer to segments until the process ends.
struct Registry {
  std::mutex mutex;
  std::map<uintptr_t, const Segment*> segments;
  // bounds of all segments so far: most tensors are outside, and need no lock
  std::atomic<uintptr_t> lowest{~uintptr_t{0}}, highest{0};
};
Registry& registry() {
  static auto* all = new Registry;
  return *all;
}
}  // namespace

File::~File() {
  if (fd >= 0) close(fd);
}

std::pair<std::shared_ptr<Mapping>, std::shared_ptr<File>> Mapping::create(size_t bytes) {
  const int fd = memfd_create("weft", MFD_CLOEXEC);
  if (fd < 0) fail("memfd_create");
  auto file = std::make_shared<File>(fd);
  if (ftruncate(fd, static_cast<off_t>(bytes))) fail("ftruncate");
  std::shared_ptr<Mapping> mapping(new Mapping(fd, bytes));
  allocate(mapping->base_, bytes, fd);
  return {std::move(mapping), std::move(file)};
}

// Peers' pages are mapped at their first use: with many ranks, page tables of all pages would be
// larger than the memory that they map.
std::shared_ptr<Mapping> Mapping::attach(const File& file, size_t bytes) {
  struct stat found;
  if (fstat(file.fd, &found)) fail("fstat");
  if (static_cast<size_t>(found.st_size) != bytes) {  // G2: an access behind its end is a SIGBUS
    errno = EPROTO;
    fail("its part has another size than this rank's: is it another version of weft?");
  }
  return std::shared_ptr<Mapping>(new Mapping(file.fd, bytes));
}

Mapping::Mapping(int fd, size_t bytes) : bytes_(bytes) {
  void* base = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail("mmap");
  base_ = static_cast<char*>(base);
}

Mapping::Mapping(std::shared_ptr<Mapping> whole, size_t offset, size_t bytes)
    : base_(whole->base_ + offset), bytes_(bytes), whole_(std::move(whole)) {}

std::shared_ptr<Mapping> Mapping::part(std::shared_ptr<Mapping> whole, size_t offset,
                                       size_t bytes) {
  if (offset > whole->bytes_ || bytes > whole->bytes_ - offset)
    throw std::out_of_range("a part behind the end of a mapping");
  return std::shared_ptr<Mapping>(new Mapping(std::move(whole), offset, bytes));
}

Mapping::~Mapping() {
  if (!whole_) munmap(base_, bytes_ ? bytes_ : 1);
}

Segment::Segment(std::vector<std::shared_ptr<Mapping>> all, int of_rank, uint64_t of_world,
                 uint64_t of_call)
    : parts(std::move(all)), rank(of_rank), world(of_world), number(of_call) {
  auto& [mutex, segments, lowest, highest] = registry();
  std::lock_guard lock(mutex);
  segments[own().address()] = this;
  lowest = std::min(lowest.load(), own().address());
  highest = std::max(highest.load(), own().address() + own().bytes());
}

Segment::~Segment() {
  std::lock_guard lock(registry().mutex);
  registry().segments.erase(own().address());
}

const Segment* Segment::containing(uintptr_t address) {
  if (address < registry().lowest.load(std::memory_order_relaxed) ||
      address >= registry().highest.load(std::memory_order_relaxed))
    return nullptr;
  std::lock_guard lock(registry().mutex);
  const auto& segments = registry().segments;
  auto after = segments.upper_bound(address);
  if (after == segments.begin()) return nullptr;
  const Segment& found = *(--after)->second;
  return address < after->first + found.own().bytes() ? &found : nullptr;
}

}  // namespace weft
