#include "hosts/ucp.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <regex>
#include <stdexcept>

namespace weft::ucp {

namespace {

void* opened() {
  // UCX would handle SIGSEGV and other signals of the process, which belong to its user.
  constexpr const char* kHandle = "UCX_HANDLE_ERRORS";
  const bool chosen = std::getenv(kHandle);
  if (!chosen) setenv(kHandle, "none", 1);
  void* const found = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
  if (!chosen) unsetenv(kHandle);
  if (!found) throw std::runtime_error(dlerror());
  return found;
}

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("libucp.so.0 lacks ") + name);
}

Library loaded() {
  void* const from = opened();
  Library found{};
  find(from, "ucp_get_version", found.get_version);
  find(from, "ucp_get_version_string", found.get_version_string);
  find(from, "ucp_init_version", found.init_version);
  find(from, "ucp_cleanup", found.cleanup);
  find(from, "ucp_context_print_info", found.context_print_info);
  find(from, "ucp_worker_create", found.worker_create);
  find(from, "ucp_worker_destroy", found.worker_destroy);
  find(from, "ucp_worker_query", found.worker_query);
  find(from, "ucp_worker_release_address", found.worker_release_address);
  find(from, "ucp_worker_get_efd", found.worker_get_efd);
  find(from, "ucp_worker_arm", found.worker_arm);
  find(from, "ucp_worker_progress", found.worker_progress);
  find(from, "ucp_worker_set_am_recv_handler", found.worker_set_am_recv_handler);
  find(from, "ucp_ep_create", found.ep_create);
  find(from, "ucp_ep_close_nbx", found.ep_close_nbx);
  find(from, "ucp_ep_flush_nbx", found.ep_flush_nbx);
  find(from, "ucp_am_send_nbx", found.am_send_nbx);
  find(from, "ucp_am_recv_data_nbx", found.am_recv_data_nbx);
  find(from, "ucp_am_data_release", found.am_data_release);
  find(from, "ucp_request_free", found.request_free);
  find(from, "ucs_status_string", found.status_string);
  unsigned major = 0, minor = 0, release = 0;
  found.get_version(&major, &minor, &release);
  if (major != kMajor || minor < kMinor)
    throw std::runtime_error("libucp.so.0 is of UCX " + std::string(found.get_version_string()) +
                             ", which may crash when a peer dies; " + std::to_string(kMajor) + "." +
                             std::to_string(kMinor) + " or later is needed");
  return found;
}

}  // namespace

const Library& library() {
  static const Library found = loaded();
  return found;
}

Context context(size_t peers) {
  const Library& ucp = library();
  Params params{};
  params.mask = Params::kFeatures | Params::kEstimatedEndpoints;
  params.features = Params::kWakeup | Params::kMessages;
  params.estimated_endpoints = peers;
  Context made = nullptr;
  if (const Status status = ucp.init_version(kMajor, kMinor, &params, nullptr, &made);
      status != kOk)
    throw std::runtime_error(std::string("UCX ") + ucp.get_version_string() +
                             " cannot begin: " + ucp.status_string(status));
  return made;
}

std::vector<std::string> resources() {
  const Context made = context(1);
  char* text = nullptr;
  size_t size = 0;
  if (FILE* const stream = open_memstream(&text, &size)) {
    library().context_print_info(made, stream);
    std::fclose(stream);
  }
  library().cleanup(made);
  const std::string printed(text ? text : "", size);
  std::free(text);
  static const std::regex resource(R"(resource \d+ .*-- (\S+))");
  std::vector<std::string> found;
  for (std::sregex_iterator each(printed.begin(), printed.end(), resource), end; each != end;
       ++each)
    found.push_back((*each)[1]);
  return found;
}

}  // namespace weft::ucp
