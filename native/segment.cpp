#include "segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace weft {

namespace {
[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }
}  // namespace

std::shared_ptr<Mapping> Mapping::create(size_t bytes, int& fd) {
  fd = memfd_create("weft", MFD_CLOEXEC);
  if (fd < 0) fail("memfd_create");
  // fallocate takes the pages now, so that a lack of memory is an error here and not a SIGBUS at the first write.
  int error = bytes ? posix_fallocate(fd, 0, static_cast<off_t>(bytes)) : 0;
  if (error) {
    close(fd);
    errno = error;
    fail("fallocate");
  }
  return std::shared_ptr<Mapping>(new Mapping(fd, bytes));
}

std::shared_ptr<Mapping> Mapping::attach(int fd, size_t bytes) { return std::shared_ptr<Mapping>(new Mapping(fd, bytes)); }

Mapping::Mapping(int fd, size_t bytes) : bytes_(bytes) {
  size_t length = bytes ? bytes : 1;
  void* base = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (base == MAP_FAILED) fail("mmap");
  base_ = static_cast<char*>(base);
}

Mapping::~Mapping() { munmap(base_, bytes_ ? bytes_ : 1); }

}  // namespace weft
