// The part of UCX's C interface, UCP, that weft uses, and the library at run time.
//
// UCX is not needed to build weft: what is declared here is its stable interface, as
// the UCX API standard (openucx.readthedocs.io) and the documentation of `ucp_def.h` and `ucp.h`
// give it. A structure begins with a mask of the fields that are set, so that it may end after the
// last one that weft sets. `tests/engines/test_ucp_layout.py` compares all of it with UCX's
// headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace weft::ucp {

// The earliest version that weft takes, and was tested with. 1.13.1 uses freed memory, or fails an
// assertion, in one of about ten runs where a peer dies while long rows are under way (over TCP).
constexpr unsigned kMajor = 1, kMinor = 17;

enum Status : int8_t {
  kOk = 0,
  kInProgress = 1,
  kUnreachable = -6,
  kBusy = -15,
  kCanceled = -16,
  kConnectionReset = -25,
  kLast = -100
};

// A request, an error, or null if an operation is complete.
using StatusPointer = void*;
inline bool failed(StatusPointer pointer) {
  return reinterpret_cast<uintptr_t>(pointer) >= static_cast<uintptr_t>(intptr_t{kLast});
}
inline Status status(StatusPointer pointer) {
  return static_cast<Status>(reinterpret_cast<intptr_t>(pointer));
}

using Context = struct OpaqueContext*;
using Worker = struct OpaqueWorker*;
using Endpoint = struct OpaqueEndpoint*;
using Address = struct OpaqueAddress;

struct Params {
  enum : uint64_t { kFeatures = 1 << 0, kEstimatedEndpoints = 1 << 6 };
  enum Feature : uint64_t { kWakeup = 1 << 4, kMessages = 1 << 6 };
  uint64_t mask, features;
  size_t request_size;
  void (*request_init)(void*);
  void (*request_cleanup)(void*);
  uint64_t tag_sender_mask;
  int workers_shared;
  size_t estimated_endpoints;
};

struct WorkerParams {
  enum : uint64_t { kThreadMode = 1 << 0, kFlags = 1 << 5 };
  enum : int { kSerialized = 1 };
  enum : uint64_t { kIgnoreRequestLeak = 1 << 0 };
  uint64_t mask;
  int thread_mode;
  unsigned long cpus[1024 / (8 * sizeof(unsigned long))];
  unsigned events;
  void* user_data;
  int event_descriptor;
  uint64_t flags;
};

struct WorkerAttributes {
  enum : uint64_t { kAddress = 1 << 1, kAddressFlags = 1 << 2 };
  enum : uint32_t { kNetworkOnly = 1 << 0 };
  uint64_t mask;
  int thread_mode;
  uint32_t address_flags;
  Address* address;
  size_t address_length;
};

struct EndpointParams {
  enum : uint64_t { kAddress = 1 << 0, kErrorMode = 1 << 1, kErrorHandler = 1 << 2 };
  enum : int { kPeerErrors = 1 };
  uint64_t mask;
  const Address* address;
  int error_mode;
  struct {
    void (*call)(void* argument, Endpoint endpoint, Status status);
    void* argument;
  } error_handler;
};

struct RequestParams {
  enum : uint32_t { kCallback = 1 << 1, kUserData = 1 << 2, kFlags = 1 << 4 };
  enum : uint32_t { kCloseByForce = 1 << 0 };  // of `flags`, to close an endpoint
  uint32_t mask, flags;
  void* request;
  union {
    void (*sent)(void* request, Status status, void* user_data);
    void (*received)(void* request, Status status, size_t length, void* user_data);
  } callback;
  uint64_t datatype;
  void* user_data;
  void* reply_buffer;
  int memory_type;
  size_t* received_length;
  void* memory;
};

struct ReceiveParams {
  enum : uint64_t { kData = 1 << 16, kRendezvous = 1 << 17 };
  uint64_t attributes;
  Endpoint reply;
};

struct HandlerParams {
  enum : uint64_t { kId = 1 << 0, kFlags = 1 << 1, kCallback = 1 << 2, kArgument = 1 << 3 };
  enum : uint32_t { kWholeMessage = 1 << 0, kPersistentData = 1 << 1 };
  uint64_t mask;
  unsigned id;
  uint32_t flags;
  Status (*callback)(void* argument, const void* header, size_t header_length, void* data,
                     size_t length, const ReceiveParams* params);
  void* argument;
};

// The functions of the library `libucp.so.0`.
struct Library {
  void (*get_version)(unsigned* major, unsigned* minor, unsigned* release);
  const char* (*get_version_string)();
  Status (*init_version)(unsigned major, unsigned minor, const Params*, const void* config,
                         Context*);
  void (*cleanup)(Context);
  void (*context_print_info)(Context, void* stream);
  Status (*worker_create)(Context, const WorkerParams*, Worker*);
  void (*worker_destroy)(Worker);
  Status (*worker_query)(Worker, WorkerAttributes*);
  void (*worker_release_address)(Worker, Address*);
  Status (*worker_get_efd)(Worker, int* descriptor);
  Status (*worker_arm)(Worker);
  unsigned (*worker_progress)(Worker);
  Status (*worker_set_am_recv_handler)(Worker, const HandlerParams*);
  Status (*ep_create)(Worker, const EndpointParams*, Endpoint*);
  StatusPointer (*ep_close_nbx)(Endpoint, const RequestParams*);
  StatusPointer (*ep_flush_nbx)(Endpoint, const RequestParams*);
  StatusPointer (*am_send_nbx)(Endpoint, unsigned id, const void* header, size_t header_length,
                               const void* buffer, size_t count, const RequestParams*);
  StatusPointer (*am_recv_data_nbx)(Worker, void* descriptor, void* buffer, size_t count,
                                    const RequestParams*);
  void (*am_data_release)(Worker, void* data);
  void (*request_free)(void* request);
  const char* (*status_string)(Status);
};

// The library, loaded once; throws std::runtime_error if it is not there, or lacks something.
const Library& library();

// A context for active messages to about so many peers; throws std::runtime_error.
Context context(size_t peers);

// The transports and devices that UCX would use here, as "rc_mlx5/mlx5_0:1"; throws
// std::runtime_error.
std::vector<std::string> resources();

}  // namespace weft::ucp
