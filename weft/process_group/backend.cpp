// weft as a backend of torch's own process groups: each call goes on to `Operations`, in Python.
//
// Each torch needs a library of its own, since its classes have no stable binary interface: wheels
// bring some, and any other is compiled where weft is used (compiled.py).
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "message_calls.h"

namespace weft {

using at::Tensor;
using c10d::OpType;
using std::chrono::milliseconds;
using Tensors = std::vector<Tensor>;
using WorkOfTorch = c10::intrusive_ptr<c10d::Work>;

// An object of Python that is released under Python's lock, on any thread.
class Held {
 public:
  Held() = default;
  explicit Held(py::object object) : object_(std::move(object)) {}
  Held(const Held&) = delete;
  ~Held() {
    if (!object_) return;
    if (!Py_IsInitialized()) {
      object_.release();
      return;
    }
    py::gil_scoped_acquire gil;
    object_ = py::object();
  }
  const py::object& operator*() const { return object_; }

 private:
  py::object object_;
};

double seconds(milliseconds time) { return std::chrono::duration<double>(time).count(); }

// A time limit in seconds; None for the group's.
py::object limit(milliseconds timeout) {
  if (timeout.count() <= 0) return py::none();
  return py::float_(seconds(timeout));
}

// An exception of Python, which C++ raises as itself; null for None.
std::exception_ptr failure(const py::object& error) {
  if (error.is_none()) return nullptr;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  return std::make_exception_ptr(py::error_already_set());
}

// An asynchronous operation, which runs as `work_queue.Work`, and the tensors that it fills.
class Work : public c10d::Work {
 public:
  Work(OpType kind, uint64_t number, Tensors tensors = {}, py::object work = {})
      : c10d::Work(-1, kind),
        number_(number),
        tensors_(std::move(tensors)),
        work_(std::move(work)) {}

  bool isCompleted() override { return get<bool>("is_completed"); }
  bool isSuccess() const override { return get<bool>("is_completed") && !exception(); }
  int sourceRank() const override { return get<int>("source_rank"); }
  Tensors result() override { return tensors_; }
  void synchronize() override { wait(kNoTimeout); }
  uint64_t getSequencenumber() const override { return number_; }

  std::exception_ptr exception() const override {
    py::gil_scoped_acquire gil;
    return failure(work().attr("exception")());
  }

  bool wait(milliseconds timeout) override {
    py::gil_scoped_acquire gil;
    work().attr("wait")(limit(timeout));
    return true;
  }

  // A future of the tensors, completed by a thread for callbacks.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    const auto complete = [future, tensors = result()](const py::object& error) {
      const std::exception_ptr failed = failure(error);
      py::gil_scoped_release without_gil;  // its callbacks may take locks of others
      if (failed)
        future->setError(failed);
      else
        future->markCompleted(tensors);
    };
    py::gil_scoped_acquire gil;
    work().attr("complete")(py::cpp_function(complete));
    return future;
  }

  // The operation as Python knows it; under Python's lock.
  virtual py::object work() const { return *work_; }

 private:
  template <class Value>
  Value get(const char* name) const {
    py::gil_scoped_acquire gil;
    return work().attr(name)().template cast<Value>();
  }

  const uint64_t number_;
  const Tensors tensors_;
  const Held work_;
};

// The operation of a call that is complete when it returns.
py::object done() { return py::module_::import("weft.process_group.work_queue").attr("DONE"); }

// The messages of a group: `messages.Messages`, and the calls of its native part.
struct Messages {
  explicit Messages(const py::object& made)
      : python(made),
        native(reinterpret_cast<void*>(made.attr("native").attr("address").cast<uintptr_t>())),
        calls(*static_cast<const WeftMessageCalls*>(py::module_::import("weft._native")
                                                        .attr("message_calls")()
                                                        .cast<py::capsule>()
                                                        .get_pointer())) {}

  const Held python;
  void* const native;
  const WeftMessageCalls& calls;
};

// A message that native code moves, without Python as long as nothing is wrong with it.
class Message : public Work {
 public:
  // `message` is the new one's; without a limit a wait takes `seconds` at most.
  Message(std::shared_ptr<const Messages> messages, void* message, const Tensor& tensor,
          OpType kind, uint64_t number, double seconds)
      : Work(kind, number),
        messages_(std::move(messages)),
        message_(message),
        tensor_(tensor),
        seconds_(seconds) {}
  ~Message() override { messages_->calls.release(message_); }

  bool isCompleted() override { return state() != kOpen; }
  bool isSuccess() const override { return state() == kDone; }
  int sourceRank() const override { return messages_->calls.source(message_); }
  Tensors result() override { return {tensor_}; }

  bool wait(milliseconds timeout) override {
    const double most = timeout.count() > 0 ? seconds(timeout) : seconds_;
    const int status = state() == kDone ? 0 : messages_->calls.wait(message_, most);
    if (!status) return true;
    py::gil_scoped_acquire gil;
    if (PyErr_Occurred()) {
      py::error_already_set raised;
      (*messages_->python).attr("interrupted")(raised.value());
      throw raised;
    }
    (*messages_->python).attr("settle")(object(), status, limit(timeout));
    return true;
  }

  py::object work() const override { return (*messages_->python).attr("work")(object()); }

 private:
  enum State { kOpen, kDone, kFailed };
  State state() const { return static_cast<State>(messages_->calls.state(message_)); }

  py::object object() const {
    void* const made = messages_->calls.object(message_);
    return py::reinterpret_steal<py::object>(static_cast<PyObject*>(made));
  }

  const std::shared_ptr<const Messages> messages_;
  void* const message_;
  const Tensor tensor_;
  const double seconds_;
};

// A call of a function of Python.
template <class... Args>
py::object call(const py::object& function, const Args&... args) {
  PyObject* const passed[] = {args.ptr()...};
  PyObject* const result = PyObject_Vectorcall(function.ptr(), passed, sizeof...(args), nullptr);
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// An all_reduce that was made before, again: as `collectives.all_reduce` in `WorkQueue.run`, but
// with no frame of Python.
class Repeat {
 public:
  explicit Repeat(const py::object& operations)
      : world_(operations.attr("world")),
        queue_(operations.attr("queue")),
        issued_(queue_.attr("issued")),
        acquire_(queue_.attr("lock").attr("acquire")),
        release_(queue_.attr("lock").attr("release")),
        all_reduce_(py::module_::import("weft.process_group.collectives").attr("all_reduce")),
        check_(py::module_::import("weft.ops.all_reduce").attr("check")),
        repeat_(py::module_::import("weft._native").attr("repeat")) {
    for (const char* kind : {"sum", "avg", "product", "min", "max"})
      options_.push_back(py::make_tuple(kind, "auto"));
  }

  // Whether it was made: not if it is no repetition, or other calls come first.
  bool operator()(const Tensor& tensor, size_t op, const py::object& limit) const {
    const py::handle none = Py_None, no = Py_False;
    if (op >= options_.size() || PyObject_Size(issued_.ptr()) ||
        !py::getattr(queue_, running_).is_none() || !call(acquire_, no).is(py::bool_(true)))
      return false;
    py::setattr(queue_, running_, all_reduce_);
    const auto end = [&] {
      py::setattr(queue_, running_, none);
      call(release_);
    };
    try {
      const py::object same = py::cast(tensor);
      const bool made =
          !call(repeat_, check_, options_[op], same, same, none, none, world_, limit).is_none();
      end();
      return made;
    } catch (py::error_already_set& error) {
      end();
      if (error.matches(PyExc_RuntimeError) || error.matches(PyExc_ValueError) ||
          error.matches(PyExc_TypeError))
        world_.attr("failure").attr("reject")(error.value());
      throw;
    }
  }

 private:
  const py::object world_, queue_, issued_, acquire_, release_, all_reduce_, check_, repeat_;
  const py::str running_{"running"};
  std::vector<py::object> options_;  // by the numbers of torch's reductions
};

// The operations of a group whose ranks are connected, and what each call looks up in them.
struct Connection {
  explicit Connection(const py::object& made)
      : operations(made),
        queue_run(made.attr("queue").attr("run")),
        queue_issue(made.attr("queue").attr("issue")),
        world(made.attr("world")),
        repeat(made),
        messages(std::make_shared<const Messages>(made.attr("messages"))) {}

  const py::object operations, queue_run, queue_issue, world;
  const Repeat repeat;
  const std::shared_ptr<const Messages> messages;
  std::atomic<bool> named = false;
};

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
// Makes `memory`, contiguous bytes, the storage of `tensor`, with the values of that and its views.
void move_storage(const Tensor& tensor, const Tensor& memory) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  std::memcpy(memory.mutable_data_ptr(), storage->data(), storage->nbytes());
  const auto forget = [](void* kept) { delete static_cast<Tensor*>(kept); };
  storage->set_data_ptr(
      at::DataPtr(memory.mutable_data_ptr(), new Tensor(memory), forget, at::Device(at::kCPU)));
}

// A window, which is a `windows.Window`.
class Window : public c10d::Window {
 public:
  explicit Window(py::object window) : window_(std::move(window)) {}

  void tensor_register(const Tensor& tensor, bool owning) override {
    run(false, "register", tensor, owning);
  }
  void tensor_deregister() override { run(false, "deregister"); }

  WorkOfTorch put(const Tensor& tensor, int64_t to, int64_t offset, bool async,
                  const c10d::PutOptions&) override {
    return run(async, "put", tensor, to, offset);
  }
  WorkOfTorch signal(int64_t to, bool async, const c10d::SignalOptions&) override {
    return run(async, "signal", to);
  }
  WorkOfTorch wait_signal(int64_t from, bool async, const c10d::WaitSignalOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(async, "wait_signal", async, from, limit(opts.timeout));
  }

  Tensor map_remote_tensor(int64_t rank) override {
    py::gil_scoped_acquire gil;
    return (*window_).attr("map")(rank).cast<Tensor>();
  }
  c10d::WindowAttr get_attr(int64_t) override { return {}; }  // one memory, of all ranks

 private:
  // The work of an operation, if it is asynchronous: most are done at once, and return none.
  template <class... Args>
  WorkOfTorch run(bool async, const char* name, const Args&... args) {
    py::gil_scoped_acquire gil;
    py::object work = (*window_).attr(name)(args...);
    if (!async) return nullptr;
    if (work.is_none()) work = done();
    return c10::make_intrusive<Work>(OpType::UNKNOWN, 0, Tensors(), work);
  }

  const Held window_;
};
#endif

class Backend : public c10d::Backend {
 public:
  // `operations` is None until `reconfigure` connects the ranks, by `elastic`, which is None for a
  // group that is connected from the start.
  Backend(const py::object& operations, py::object elastic, int rank, int size,
          milliseconds timeout)
      : c10d::Backend(rank, size),
        elastic_(std::move(elastic)),
        hooks_(py::dict()),
        collectives_(py::module_::import("weft.process_group.collectives")),
        queue_(py::module_::import("weft.process_group.work_queue")),
        options_(c10::make_intrusive<Options>("weft", timeout)) {
    if (!operations.is_none()) connect(operations);
  }
  ~Backend() override {
    if (!Py_IsInitialized()) {
      new std::shared_ptr<Connection>(std::move(connection_));  // its objects ended with Python
      return;
    }
    py::gil_scoped_acquire gil;
    connection_.reset();
  }

  py::object operations() const { return connection_ ? connection_->operations : py::none(); }

  // Reductions

  WorkOfTorch allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    const Tensor& tensor = one(tensors);
    if (tensor.is_sparse()) return allreduce_sparse(tensors, opts);
    py::gil_scoped_acquire gil;
    if (!opts.asyncOp && !coalescing_ &&
        connection()->repeat(tensor, opts.reduceOp.op_, limit(opts.timeout))) {
      ++calls_;
      return nullptr;
    }
    return run(OpType::ALLREDUCE, "all_reduce", opts, tensor, opts.reduceOp);
  }

  WorkOfTorch allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return run(OpType::_ALLREDUCE_SPARSE, "all_reduce_sparse", opts, one(tensors), opts.reduceOp);
  }

  WorkOfTorch allreduce_coalesced(Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& opts) override {
    return run(OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", opts, tensors, opts.reduceOp);
  }

  WorkOfTorch reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return run(OpType::REDUCE, "reduce", opts, one(tensors), opts.reduceOp, opts.rootRank);
  }

  WorkOfTorch reduce_scatter(Tensors& outs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& opts) override {
    return run(OpType::REDUCE_SCATTER, "reduce_scatter", opts, one(outs), list(inputs),
               opts.reduceOp);
  }

  WorkOfTorch _reduce_scatter_base(Tensor& out, Tensor& input,
                                   const c10d::ReduceScatterOptions& opts) override {
    return run(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_single", opts, out, input,
               opts.reduceOp);
  }

  WorkOfTorch reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& opts) override {
    return run(OpType::COALESCED, "reduce_scatter_single_coalesced", opts, outs, inputs,
               opts.reduceOp);
  }

  // Gathers, scatters and exchanges

  WorkOfTorch broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return run(OpType::BROADCAST, "broadcast", opts, one(tensors), opts.rootRank);
  }

  WorkOfTorch allgather(std::vector<Tensors>& outs, Tensors& inputs,
                        const c10d::AllgatherOptions& opts) override {
    return run(OpType::ALLGATHER, "all_gather", opts, list(outs), one(inputs));
  }

  WorkOfTorch allgather_coalesced(std::vector<Tensors>& outs, Tensors& inputs,
                                  const c10d::AllgatherOptions& opts) override {
    return run(OpType::ALLGATHER_COALESCED, "all_gather_coalesced", opts, outs, inputs);
  }

  WorkOfTorch _allgather_base(Tensor& out, Tensor& input,
                              const c10d::AllgatherOptions& opts) override {
    return run(OpType::_ALLGATHER_BASE, "all_gather_single", opts, out, input);
  }

  WorkOfTorch allgather_into_tensor_coalesced(Tensors& outs, Tensors& inputs,
                                              const c10d::AllgatherOptions& opts) override {
    return run(OpType::COALESCED, "all_gather_single_coalesced", opts, outs, inputs);
  }

  WorkOfTorch gather(std::vector<Tensors>& outs, Tensors& inputs,
                     const c10d::GatherOptions& opts) override {
    return run(OpType::GATHER, "gather", opts, list(outs), one(inputs), opts.rootRank);
  }

  WorkOfTorch scatter(Tensors& outs, std::vector<Tensors>& inputs,
                      const c10d::ScatterOptions& opts) override {
    return run(OpType::SCATTER, "scatter", opts, one(outs), list(inputs), opts.rootRank);
  }

  WorkOfTorch alltoall(Tensors& outs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return run(OpType::ALLTOALL, "all_to_all", opts, outs, inputs);
  }

  WorkOfTorch alltoall_base(Tensor& out, Tensor& input, std::vector<int64_t>& out_sizes,
                            std::vector<int64_t>& input_sizes,
                            const c10d::AllToAllOptions& opts) override {
    return run(OpType::ALLTOALL_BASE, "all_to_all_single", opts, out, input, out_sizes,
               input_sizes);
  }

  // Messages

  WorkOfTorch send(Tensors& tensors, int to, int tag) override {
    return message(OpType::SEND, one(tensors), to, tag);
  }
  WorkOfTorch recv(Tensors& tensors, int from, int tag) override {
    return message(OpType::RECV, one(tensors), from, tag);
  }
  WorkOfTorch recvAnysource(Tensors& tensors, int tag) override {
    return message(OpType::RECVANYSOURCE, one(tensors), std::nullopt, tag);
  }

  // Barriers, coalescing and the group's end

  WorkOfTorch barrier(const c10d::BarrierOptions& opts) override {
    return run(OpType::BARRIER, "barrier", opts);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    std::optional<double> most;
    if (opts.timeout.count() >= 0) most = seconds(opts.timeout);
    invoke("monitored_barrier", most, wait_all_ranks);
  }
  void startCoalescing() override {
    connection();
    coalescing_ = true;
  }
  WorkOfTorch endCoalescing() override {
    coalescing_ = false;
    py::gil_scoped_acquire gil;
    py::list works;
    Tensors tensors;
    for (const auto& each : std::exchange(coalesced_, {})) {
      works.append(each->work());
      for (const Tensor& tensor : each->result()) tensors.push_back(tensor);
    }
    return issued(OpType::COALESCED, calls_, tensors, (*queue_).attr("CombinedWork")(works));
  }
  void shutdown() override {
    py::gil_scoped_acquire gil;
    if (connection_) invoke("shutdown");
    if (!(*elastic_).is_none()) (*elastic_).attr("close")();
  }
  void abort() override {
    py::gil_scoped_acquire gil;
    if (connection_) invoke("abort");
  }
  c10d::ErrorType getError() override {
    py::gil_scoped_acquire gil;
    if (!connection_) return c10d::ErrorType::SUCCESS;
    return connection_->operations.attr("error_type")().cast<c10d::ErrorType>();
  }

  // Properties

  const std::string getBackendName() const override { return "weft"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}  // they start at 0 on every rank
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  void setTimeout(milliseconds timeout) override {
    options_->timeout = timeout;
    py::gil_scoped_acquire gil;
    if (connection_)
      connection_->world.attr("timeout") = seconds(timeout);  // of each wait from now
  }

  // Methods of torch 2.14 and later

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  WorkOfTorch gather_single(Tensor& out, Tensor& input, const c10d::GatherOptions& opts) override {
    return run(OpType::GATHER, "gather_single", opts, out, input, opts.rootRank);
  }

  void setGroupUid(const std::string& uid) override {
    c10d::Backend::setGroupUid(uid);
    py::gil_scoped_acquire gil;
    if (connection_) connection_->operations.attr("record")();
  }

  // Membership

  bool supportsReconfigure() const override {
    py::gil_scoped_acquire gil;
    return !(*elastic_).is_none();
  }
  c10d::ReconfigureHandle get_reconfigure_handle() const override {
    py::gil_scoped_acquire gil;
    return elastic().attr("handle")().cast<std::string>();
  }
  WorkOfTorch reconfigure(const c10d::ReconfigureOptions& opts) override {
    py::gil_scoped_acquire gil;
    const milliseconds own = options_->timeout;
    connect(elastic().attr("connect")(opts.uuid, opts.handles, seconds(opts.timeout.value_or(own)),
                                      seconds(own), operations()));
    rank_ = operations().attr("rank").cast<int>();
    size_ = operations().attr("ranks").cast<int>();
    return issued(OpType::UNKNOWN, calls_, {}, done());
  }

  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& excluded, int flags,
                                           const c10::intrusive_ptr<Options>& opts) override {
    const milliseconds timeout = (opts ? opts : options_)->timeout;
    py::gil_scoped_acquire gil;
    return part(named().attr("without")(excluded, flags != 0, seconds(timeout)), timeout);
  }

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override {
    if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) return nullptr;
    const milliseconds timeout = (opts ? opts : options_)->timeout;
    py::gil_scoped_acquire gil;
    return part(named().attr("part")(store, ranks, seconds(timeout)), timeout);
  }

  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<Tensor>& tensor) override {
    py::gil_scoped_acquire gil;
    const auto make = py::module_::import("weft.process_group.windows").attr("Window");
    auto window = c10::make_intrusive<Window>(make(named(), py::cpp_function(&move_storage)));
    if (tensor) window->tensor_register(*tensor, true);
    return window;
  }

  void registerAbortHook(int64_t number, c10d::AbortHook hook) override {
    py::gil_scoped_acquire gil;
    const auto call = [hook = std::move(hook)] {
      py::gil_scoped_release without_gil;
      hook();
    };
    (*hooks_)[py::int_(number)] = py::cpp_function(call);
  }
  void unregisterAbortHook(int64_t number) override {
    py::gil_scoped_acquire gil;
    (*hooks_).attr("pop")(number, py::none());
  }
#endif

 private:
  // torch has one backend for all devices if it knows no other of a group's backends itself.
  static void check(const Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.is_cpu(), "the tensor is on ", tensor.device(),
                      ", but weft's backend takes CPU tensors only: torch combines it with its "
                      "own backends, as in \"cpu:weft,cuda:nccl\", but not with those of others");
  }

  // The only tensor of an argument.
  static const Tensor& one(const Tensors& tensors) {
    TORCH_CHECK_VALUE(!tensors.empty(),
                      "a collective needs at least one tensor; got an empty list");
    return tensors[0];
  }

  // The only list of tensors of an argument; ranks that are no root pass none.
  static const Tensors& list(const std::vector<Tensors>& lists) {
    static const Tensors none;
    return lists.empty() ? none : lists[0];
  }

  // An argument as Python has it: reductions without a factor are made once.
  template <class Value>
  static const Value& in_python(const Value& value) {
    return value;
  }
  static py::object in_python(const c10d::ReduceOp& op) {
    if (op.op_ == c10d::ReduceOp::PREMUL_SUM) return py::cast(op);
    static PyObject* made[c10d::ReduceOp::UNUSED + 1] = {};
    PyObject*& one = made[op.op_];
    if (!one) one = py::cast(op.op_).release().ptr();
    return py::reinterpret_borrow<py::object>(one);
  }

  // The tensors that a collective with these arguments fills: the first ones.
  static Tensors filled() { return {}; }
  template <class... Others>
  static Tensors filled(const Tensor& out, const Others&...) {
    return {out};
  }
  template <class... Others>
  static Tensors filled(const Tensors& outs, const Others&...) {
    return outs;
  }
  template <class... Others>
  static Tensors filled(const std::vector<Tensors>& outs, const Others&...) {
    Tensors all;
    for (const Tensors& some : outs) all.insert(all.end(), some.begin(), some.end());
    return all;
  }

  // Run a collective of collectives.py.
  template <class Options, class... Args>
  WorkOfTorch run(OpType kind, const char* name, const Options& opts, const Args&... args) {
    Tensors outs = filled(args...);
    for (const Tensor& out : outs) check(out);
    py::gil_scoped_acquire gil;
    const uint64_t number = ++calls_;
    named();
    const std::shared_ptr<Connection> own = connection_;
    const auto by = [&](const py::object& call) {
      return call((*collectives_).attr(name), own->world, in_python(args)..., limit(opts.timeout));
    };
    if (opts.asyncOp || coalescing_)
      return issued(kind, number, std::move(outs), by(own->queue_issue));
    by(own->queue_run);
    return nullptr;
  }

  // Begin a message: natively if it can be, else in Python, which says why it cannot.
  WorkOfTorch message(OpType kind, const Tensor& tensor, std::optional<int> peer, int tag) {
    const std::shared_ptr<Connection> own = connection();
    const bool sends = kind == OpType::SEND;
    if (own->named && !coalescing_ && tensor.is_cpu() && tensor.layout() == c10::kStrided &&
        tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
      const auto& [python, native, calls] = *own->messages;
      void* const begun =
          sends ? calls.send(native, tensor.const_data_ptr(), tensor.nbytes(), *peer, tag)
                : calls.receive(native, tensor.data_ptr(), tensor.nbytes(), peer.value_or(-1), tag);
      if (begun)
        return c10::make_intrusive<Message>(own->messages, begun, tensor, kind, calls_.load(),
                                            seconds(options_->timeout));
    }
    check(tensor);
    py::gil_scoped_acquire gil;
    const py::object begin = named().attr("messages").attr(sends ? "send" : "receive");
    return issued(kind, calls_, {tensor}, begin(tensor, peer, tag));
  }

  // The work of a call, which endCoalescing makes a part of another.
  WorkOfTorch issued(OpType kind, uint64_t number, Tensors tensors, py::object work) {
    auto made = c10::make_intrusive<Work>(kind, number, std::move(tensors), std::move(work));
    if (coalescing_) coalesced_.push_back(made);
    return made;
  }

  template <class... Args>
  void invoke(const char* name, const Args&... args) {
    py::gil_scoped_acquire gil;
    named().attr(name)(args...);
  }

  // The connection, which another thread may replace during a call.
  std::shared_ptr<Connection> connection() const {
    TORCH_CHECK_WITH(DistBackendError, connection_,
                     "the ranks of this group are not connected, since it was made with "
                     "enable_reconfigure=True: call torch.distributed._reconfigure first");
    return connection_;
  }

  void connect(const py::object& operations) {
    operations.attr("abort_hooks").attr("hooks") = *hooks_;
    connection_ = std::make_shared<Connection>(operations);
  }

  // The operations, with the name that torch gave this group after it was made.
  const py::object& named() {
    const std::shared_ptr<Connection> own = connection();
    if (!own->named.exchange(true)) own->operations.attr("set_name")(pg_uid_, pg_desc_);
    return own->operations;
  }

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  const py::object& elastic() const {
    TORCH_CHECK_WITH(DistBackendError, !(*elastic_).is_none(),
                     "this group was connected when it was made: only one made with "
                     "enable_reconfigure=True can be reconfigured");
    return *elastic_;
  }

  // The backend of a group of some of this one's ranks.
  static c10::intrusive_ptr<c10d::Backend> part(const py::object& operations,
                                                milliseconds timeout) {
    return c10::make_intrusive<Backend>(operations, py::none(), operations.attr("rank").cast<int>(),
                                        operations.attr("ranks").cast<int>(), timeout);
  }
#endif

  const Held elastic_, hooks_, collectives_, queue_;
  const c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Connection> connection_;
  std::atomic<uint64_t> calls_ = 0;  // collectives
  bool coalescing_ = false;
  std::vector<c10::intrusive_ptr<Work>> coalesced_;  // since startCoalescing
};

c10::intrusive_ptr<c10d::Backend> make(py::object operations, py::object elastic, int rank,
                                       int size, double timeout) {
  return c10::make_intrusive<Backend>(
      operations, std::move(elastic), rank, size,
      std::chrono::duration_cast<milliseconds>(std::chrono::duration<double>(timeout)));
}

// The operations of a backend; None of one that is not weft's.
py::object operations_of(const c10::intrusive_ptr<c10d::Backend>& backend) {
  const auto* own = dynamic_cast<const Backend*>(backend.get());
  return own ? own->operations() : py::none();
}

}  // namespace weft

PYBIND11_MODULE(weft_backend, module) {
  module.def("make", &weft::make);
  module.def("operations_of", &weft::operations_of);
}
