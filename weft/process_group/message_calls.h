/* The calls of `Messages` for other native code, in C: weft's backend is compiled for one version
   of torch, and this core for all. The capsule `_native.message_calls()` has the address of these.
 */
#ifndef WEFT_MESSAGE_CALLS_H
#define WEFT_MESSAGE_CALLS_H

#include <stdint.h>

struct WeftMessageCalls {
  /* Begin to send or receive `bytes` bytes by `messages`, the address of a `Messages`: a message,
     which the caller releases, or null if Python is to make the call, or to say why it cannot be
     made. A `peer` of -1 is any. */
  void* (*send)(void* messages, const void* data, uint64_t bytes, int peer, int tag);
  void* (*receive)(void* messages, void* data, uint64_t bytes, int peer, int tag);
  /* Wait, without Python's lock, until a message is done; a `WaitStatus`, 0 if it is, and has not
     failed. */
  int (*wait)(void* message, double seconds);
  /* 0: not done, 1: done, 2: failed. */
  int (*state)(const void* message);
  /* The rank that a received message is from. */
  int (*source)(const void* message);
  /* A new reference to the object of Python; needs Python's lock. */
  void* (*object)(void* message);
  void (*release)(void* message);
};

#endif
