// Sockets of a library that offers no way to end them.
#pragma once

namespace weft {

// Shut down the sockets that take no more bytes for now, of those that an epoll descriptor watches,
// itself or through other epoll descriptors: who sends by them fails, and does not wait. The
// kernel's /proc/self/fdinfo lists them (proc(5)).
void shut_full_sockets(int epoll);

}  // namespace weft
