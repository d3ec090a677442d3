// The Python module of the native core. Everything here is internal to weft; the package's modules
// are the public interface.
#include <system_error>

#include "execute/executor.hpp"
#include "python/bind.hpp"
#include "python/execute.hpp"

using namespace weft;

NB_MODULE(_native, m) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {  // an error of the operating system
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    } catch (const InUse& use) {
      const nb::object error = in_use(use);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    }
  });
  // a tensor in a global variable outlives the interpreter, which is no leak
  nb::set_leak_warnings(false);

  bind_kernels(m);
  bind_memory(m);
  bind_execute(m);
  bind_messages(m);
  bind_tensors(m);
}
