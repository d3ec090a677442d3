// weft as a backend of torch's own process groups: each call goes on to `Operations`, in Python.
//
// weft compiles this file against the torch that is installed, since classes of torch have no
// stable binary interface (compiled.py).
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

namespace weft {

using at::Tensor;
using c10d::OpType;
using std::chrono::milliseconds;
using Tensors = std::vector<Tensor>;
using WorkOfTorch = c10::intrusive_ptr<c10d::Work>;

// An object of Python that is released under Python's lock, on any thread.
class Held {
 public:
  explicit Held(py::object object) : object_(std::move(object)) {}
  Held(const Held&) = delete;
  ~Held() {
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

// A time limit in seconds; None for the group's.
py::object limit(milliseconds timeout) {
  if (timeout.count() <= 0) return py::none();
  return py::float_(std::chrono::duration<double>(timeout).count());
}

// Raises an exception of Python in C++ as itself.
py::error_already_set raised(const py::object& error) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  return {};
}

// An asynchronous operation, which runs as `work_queue.Work`.
class Work : public c10d::Work {
 public:
  Work(py::object work, OpType kind, uint64_t number)
      : c10d::Work(-1, kind), work_(std::move(work)), number_(number) {}

  bool isCompleted() override { return get<bool>("is_completed"); }
  bool isSuccess() const override { return get<bool>("is_success"); }
  int sourceRank() const override { return get<int>("source_rank"); }
  Tensors result() override { return get<Tensors>("result"); }
  void synchronize() override { wait(kNoTimeout); }
  uint64_t getSequencenumber() const override { return number_; }

  std::exception_ptr exception() const override {
    py::gil_scoped_acquire gil;
    const py::object error = (*work_).attr("error");
    return error.is_none() ? nullptr : std::make_exception_ptr(raised(error));
  }

  bool wait(milliseconds timeout) override {
    py::gil_scoped_acquire gil;
    (*work_).attr("wait_for")(limit(timeout));
    return true;
  }

  // A future of the tensors, completed by a thread for callbacks.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    const auto complete = [future](const py::object& error, const Tensors& tensors) {
      const std::exception_ptr failed =
          error.is_none() ? nullptr : std::make_exception_ptr(raised(error));
      py::gil_scoped_release without_gil;  // its callbacks may take locks of others
      if (failed)
        future->setError(failed);
      else
        future->markCompleted(tensors);
    };
    py::gil_scoped_acquire gil;
    (*work_).attr("complete")(py::cpp_function(complete));
    return future;
  }

 private:
  template <class Value>
  Value get(const char* name) const {
    py::gil_scoped_acquire gil;
    return (*work_).attr(name)().template cast<Value>();
  }

  const Held work_;
  const uint64_t number_;
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
        world_.attr("refuse")(error.value());
      throw;
    }
  }

 private:
  const py::object world_, queue_, issued_, acquire_, release_, all_reduce_, check_, repeat_;
  const py::str running_{"running"};
  std::vector<py::object> options_;  // by the numbers of torch's reductions
};

class Backend : public c10d::Backend {
 public:
  Backend(py::object operations, int rank, int size, milliseconds timeout)
      : c10d::Backend(rank, size),
        operations_(std::move(operations)),
        queue_run_((*operations_).attr("queue").attr("run")),
        queue_issue_((*operations_).attr("queue").attr("issue")),
        world_((*operations_).attr("world")),
        collectives_(py::module_::import("weft.process_group.collectives")),
        options_(c10::make_intrusive<Options>("weft", timeout)),
        repeat_(new Repeat(*operations_)) {}
  ~Backend() override {
    if (!Py_IsInitialized()) {
      repeat_.release();
      return;
    }
    py::gil_scoped_acquire gil;
    repeat_.reset();
  }

  const py::object& operations() const { return *operations_; }

  // Reductions

  WorkOfTorch allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    const Tensor& tensor = one(tensors);
    if (tensor.is_sparse()) return allreduce_sparse(tensors, opts);
    py::gil_scoped_acquire gil;
    if (!opts.asyncOp && !coalescing_ &&
        (*repeat_)(tensor, opts.reduceOp.op_, limit(opts.timeout))) {
      ++calls_;
      return nullptr;
    }
    return run(OpType::ALLREDUCE, "all_reduce", tensors, opts, tensor, op(opts.reduceOp));
  }

  WorkOfTorch allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    py::gil_scoped_acquire gil;
    const py::object work =
        (*operations_).attr("all_reduce_sparse")(one(tensors), op(opts.reduceOp));
    return issued(OpType::_ALLREDUCE_SPARSE, work, ++calls_);
  }

  WorkOfTorch allreduce_coalesced(Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced", tensors, opts, tensors,
               op(opts.reduceOp));
  }

  WorkOfTorch reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::REDUCE, "reduce", tensors, opts, one(tensors), op(opts.reduceOp),
               opts.rootRank);
  }

  WorkOfTorch reduce_scatter(Tensors& outs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::REDUCE_SCATTER, "reduce_scatter", outs, opts, one(outs), list(inputs),
               op(opts.reduceOp));
  }

  WorkOfTorch _reduce_scatter_base(Tensor& out, Tensor& input,
                                   const c10d::ReduceScatterOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_single", {out}, opts, out, input,
               op(opts.reduceOp));
  }

  WorkOfTorch reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::COALESCED, "reduce_scatter_single_coalesced", outs, opts, outs, inputs,
               op(opts.reduceOp));
  }

  // Gathers, scatters and exchanges

  WorkOfTorch broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::BROADCAST, "broadcast", tensors, opts, one(tensors), opts.rootRank);
  }

  WorkOfTorch allgather(std::vector<Tensors>& outs, Tensors& inputs,
                        const c10d::AllgatherOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::ALLGATHER, "all_gather", list(outs), opts, list(outs), one(inputs));
  }

  WorkOfTorch allgather_coalesced(std::vector<Tensors>& outs, Tensors& inputs,
                                  const c10d::AllgatherOptions& opts) override {
    Tensors all;
    for (const Tensors& some : outs) all.insert(all.end(), some.begin(), some.end());
    py::gil_scoped_acquire gil;
    return run(OpType::ALLGATHER_COALESCED, "all_gather_coalesced", all, opts, outs, inputs);
  }

  WorkOfTorch _allgather_base(Tensor& out, Tensor& input,
                              const c10d::AllgatherOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::_ALLGATHER_BASE, "all_gather_single", {out}, opts, out, input);
  }

  WorkOfTorch allgather_into_tensor_coalesced(Tensors& outs, Tensors& inputs,
                                              const c10d::AllgatherOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::COALESCED, "all_gather_single_coalesced", outs, opts, outs, inputs);
  }

  WorkOfTorch gather(std::vector<Tensors>& outs, Tensors& inputs,
                     const c10d::GatherOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::GATHER, "gather", list(outs), opts, list(outs), one(inputs), opts.rootRank);
  }

  WorkOfTorch scatter(Tensors& outs, std::vector<Tensors>& inputs,
                      const c10d::ScatterOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::SCATTER, "scatter", outs, opts, one(outs), list(inputs), opts.rootRank);
  }

  WorkOfTorch alltoall(Tensors& outs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::ALLTOALL, "all_to_all", outs, opts, outs, inputs);
  }

  WorkOfTorch alltoall_base(Tensor& out, Tensor& input, std::vector<int64_t>& out_sizes,
                            std::vector<int64_t>& input_sizes,
                            const c10d::AllToAllOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::ALLTOALL_BASE, "all_to_all_single", {out}, opts, out, input, out_sizes,
               input_sizes);
  }

  // Messages

  WorkOfTorch send(Tensors& tensors, int to, int tag) override {
    return message(OpType::SEND, "send", one(tensors), to, tag);
  }
  WorkOfTorch recv(Tensors& tensors, int from, int tag) override {
    return message(OpType::RECV, "receive", one(tensors), from, tag);
  }
  WorkOfTorch recvAnysource(Tensors& tensors, int tag) override {
    return message(OpType::RECVANYSOURCE, "receive", one(tensors), std::nullopt, tag);
  }

  // Barriers, coalescing and the group's end

  WorkOfTorch barrier(const c10d::BarrierOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::BARRIER, "barrier", {}, opts);
  }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    tell(
        "monitored_barrier",
        opts.timeout.count() < 0 ? std::nullopt : std::optional<double>(opts.timeout.count() / 1e3),
        wait_all_ranks);
  }
  void startCoalescing() override {
    coalescing_ = true;
    tell("start_coalescing");
  }
  WorkOfTorch endCoalescing() override {
    coalescing_ = false;
    py::gil_scoped_acquire gil;
    return issued(OpType::COALESCED, (*operations_).attr("end_coalescing")(), calls_);
  }
  void shutdown() override { tell("shutdown"); }
  void abort() override { tell("abort"); }

  // Properties

  const std::string getBackendName() const override { return "weft"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}  // they start at 0 on every rank
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  void setTimeout(milliseconds timeout) override {
    options_->timeout = timeout;
    tell("set_timeout", std::chrono::duration<double>(timeout).count());
  }

  // Methods of torch 2.14 and later

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  WorkOfTorch gather_single(Tensor& out, Tensor& input, const c10d::GatherOptions& opts) override {
    py::gil_scoped_acquire gil;
    return run(OpType::GATHER, "gather_single", {out}, opts, out, input, opts.rootRank);
  }

  void setGroupUid(const std::string& uid) override {
    c10d::Backend::setGroupUid(uid);
    py::gil_scoped_acquire gil;
    (*operations_).attr("record")();
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

  // A reduction as Python has it: those without a factor are made once.
  static py::object op(const c10d::ReduceOp& op) {
    if (op.op_ == c10d::ReduceOp::PREMUL_SUM) return py::cast(op);
    static PyObject* made[c10d::ReduceOp::UNUSED + 1] = {};
    PyObject*& one = made[op.op_];
    if (!one) one = py::cast(op.op_).release().ptr();
    return py::reinterpret_borrow<py::object>(one);
  }

  // Run a collective of collectives.py that fills the tensors `filled`; under Python's lock.
  template <class Options, class... Args>
  WorkOfTorch run(OpType kind, const char* name, const Tensors& filled, const Options& opts,
                  const Args&... args) {
    for (const Tensor& tensor : filled) check(tensor);
    const uint64_t number = ++calls_;
    const py::object collective = (*collectives_).attr(name);
    if (!opts.asyncOp && !coalescing_) {
      named();
      (*queue_run_)(collective, *world_, args..., limit(opts.timeout));
      return nullptr;
    }
    if (coalescing_)
      return issued(kind, named().attr("issue")(collective, filled, args..., limit(opts.timeout)),
                    number);
    named();
    return issued(kind, (*queue_issue_)(filled, collective, *world_, args..., limit(opts.timeout)),
                  number);
  }

  WorkOfTorch message(OpType kind, const char* name, const Tensor& tensor, std::optional<int> peer,
                      int tag) {
    check(tensor);
    py::gil_scoped_acquire gil;
    return issued(kind, named().attr(name)(tensor, peer, tag), calls_);
  }

  // The work of a call; null, as of NCCL, after a synchronous one.
  static WorkOfTorch issued(OpType kind, const py::object& work, uint64_t number) {
    if (work.is_none()) return nullptr;
    return c10::make_intrusive<Work>(work, kind, number);
  }

  template <class... Args>
  void tell(const char* name, const Args&... args) {
    py::gil_scoped_acquire gil;
    named().attr(name)(args...);
  }

  // The operations, with the name that torch gave this group after it was made.
  const py::object& named() {
    if (!std::exchange(named_, true)) (*operations_).attr("set_name")(pg_uid_, pg_desc_);
    return *operations_;
  }

  const Held operations_, queue_run_, queue_issue_, world_, collectives_;
  const c10::intrusive_ptr<Options> options_;
  std::unique_ptr<Repeat> repeat_;
  std::atomic<uint64_t> calls_ = 0;  // collectives
  bool named_ = false, coalescing_ = false;
};

c10::intrusive_ptr<c10d::Backend> make(py::object operations, int rank, int size, double timeout) {
  return c10::make_intrusive<Backend>(
      std::move(operations), rank, size,
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
