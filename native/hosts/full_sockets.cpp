#include "hosts/full_sockets.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <cstdio>
#include <fstream>
#include <string>

namespace weft {

namespace {

// Whether this is the file of that inode; a watched file may be open elsewhere, and its number be
// that of another file by now.
bool is_file(int fd, unsigned long inode) {
  struct stat found;
  return fstat(fd, &found) == 0 && found.st_ino == inode;
}

bool is_full(int fd) {
  pollfd room{fd, POLLOUT, 0};
  return poll(&room, 1, 0) == 0;
}

}  // namespace

void shut_full_sockets(int epoll) {
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(epoll));
  for (std::string line; std::getline(info, line);) {
    int fd;
    unsigned long inode;
    if (std::sscanf(line.c_str(), "tfd: %d events: %*x data: %*x pos:%*d ino:%lx", &fd, &inode) !=
            2 ||
        !is_file(fd, inode))
      continue;
    if (is_full(fd)) shutdown(fd, SHUT_RDWR);  // refused by what is not a socket
    shut_full_sockets(fd);
  }
}

}  // namespace weft
