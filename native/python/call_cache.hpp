// The programs and bindings of earlier calls, found by the layouts of the operands: a repeated call
// is one native call.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory/segment.hpp"
#include "python/execute.hpp"
#include "python/gil.hpp"
#include "python/modes.hpp"
#include "python/tensor_view.hpp"
#include "python/weak.hpp"

namespace weft {

// The operands of a call: the caller's input (a tuple if its rows have companions, which follow it)
// and output (None for a new one), and each weight of its products with its bias. Operators without
// some of these operands leave them out.
struct Operands {
  nb::handle a, out, weights, biases;

  // The input, and the companions of its rows.
  nb::handle rows() const { return PyTuple_Check(a.ptr()) ? PyTuple_GET_ITEM(a.ptr(), 0) : a; }
  Py_ssize_t companions() const {
    return PyTuple_Check(a.ptr()) ? PyTuple_GET_SIZE(a.ptr()) - 1 : 0;
  }
  nb::handle companion(Py_ssize_t at) const { return PyTuple_GET_ITEM(a.ptr(), at + 1); }
};

// A computation with operands of known layouts, as `Computes.prepare` makes it:
// run(*sources, weight, result, bias).
struct Computation {
  static constexpr size_t kMost = 16;  // arguments
  // The caller's tensor of this number, 0 for `a`, then the results, then companions; or `make`
  // makes it of them.
  struct Operand {
    Py_ssize_t number;
    nb::object make;
  };

  explicit Computation(const nb::object& made)
      : run(made[0]), weight(made[3].is_none() ? -1 : nb::cast<Py_ssize_t>(made[3])) {
    biased = nb::cast<bool>(made[4]);
    for (nb::handle source : nb::object(made[1])) add(source);
    add(nb::object(made[2]));
    if (operands.size() + 2 > kMost) throw std::invalid_argument("a kernel has too many sources");
  }
  void add(nb::handle operand) {
    const bool number = PyLong_Check(operand.ptr());
    operands.push_back(
        {number ? nb::cast<Py_ssize_t>(operand) : 0, number ? nb::object() : nb::borrow(operand)});
  }

  nb::object run;
  std::vector<Operand> operands;  // sources, then the result
  Py_ssize_t weight;              // -1 for none
  bool biased;
};

// The number of calls after which calls that share it are checked anew, as if they were not cached.
// All calls of one kind, cached or not, take one each, so ranks agree on it.
struct CallsLeft {
  uint64_t left;
  bool take() { return left && left--; }
};

// An earlier call.
//
// C1  `layouts` has all properties of the operands on which the program and the binding depend:
//     dtype, shape and strides, and the address in symmetric memory, where peers access them.
// C2  The operands themselves are not retained: they may be freed, and other tensors may get their
//     memory. So each call sets the addresses of the binding anew.
// C3  A repeated call makes the checks that depend on values and not on layouts: gradients, lazy
//     negation, changed weights.
// C4  An entry outlives its call, although Python code that runs meanwhile may clear the cache.
// C5  Another thread may make a call while Python code compares or hashes. So an entry changes only
//     once the world is reserved, and if there was such a call the operands are read again then.
struct CachedCall {
  // A new result, as `torch.empty_strided` makes it.
  struct Result {
    nb::object shape, strides, dtype;
  };
  // A buffer of the program inside an operand: in `a` (0), in a result, numbered from 1, or in a
  // companion of `a`, numbered after them.
  struct Placed {
    uint32_t buffer;
    size_t operand;
    uintptr_t offset;
  };

  nb::object function, options;  // of the key
  std::vector<int64_t> layouts;
  nb::object program, binding;
  Binding& bound;
  nb::object prepare;  // (instruction, operands, weights): its Computation
  std::shared_ptr<CallsLeft> left;
  std::vector<Placed> placed;
  std::vector<Result> results;
  std::map<int, Computation> computations = {};  // by instruction, made by the first call
  std::vector<uintptr_t> addresses = {};         // of the operands of the latest call
  // weak references to the tensors of the latest call: their flags need not be read again
  std::vector<nb::object> latest = {};
};

class CallCache {
 public:
  static constexpr size_t kMost = 2048;  // calls; the next one clears the cache first

  // `prepared` is the type of weights that are no tensors, with the attributes `layout`, a number,
  // `tensors`, and `source`, a tensor or None, and the method `check_unchanged`.
  // `pending` lists the calls that have begun and not ended: meanwhile none is repeated.
  CallCache(Executor& executor, nb::object prepared, nb::typed<nb::list, nb::any> pending)
      : executor_(executor), prepared_(std::move(prepared)), pending_(std::move(pending)) {}

  // Cache a call of `function` that executed `program` with `binding`. `tensors` are the tensors of
  // the program's buffers; the call is not cached unless each of them is inside `a` or a result.
  // `left` limits its repetitions.
  void add(nb::object function, nb::object options, nb::handle a, nb::handle out,
           nb::handle weights, nb::handle biases, nb::object program, nb::object binding,
           nb::typed<nb::dict, nb::str, nb::any> tensors, nb::typed<nb::list, nb::any> results,
           nb::object prepare, std::shared_ptr<CallsLeft> left) {
    const Operands operands{a, out, weights, biases};
    if (!read(function, operands, !a.is_none() && deterministic())) return;
    const uint64_t key = hashed(options);
    auto& bound = nb::cast<Binding&>(binding);
    CachedCall made{function, options, layouts_,        program, binding,
                    bound,    prepare, std::move(left), {},      {}};
    std::vector<Place> within(1, a_);  // in the order of `CachedCall::addresses`
    for (nb::handle result : results) {
      if (!view_.read(result)) return;
      within.push_back({view_.address, view_.span()});
      made.results.push_back({result.attr("shape"), result.attr("stride")(), result.attr("dtype")});
    }
    within.insert(within.end(), companions_.begin(), companions_.end());
    for (auto [name, tensor] : tensors) {
      if (!view_.read(tensor)) return;
      if (!view_.span()) continue;
      // of a call in place, a buffer is inside `a` and inside a result: the result decides
      size_t operand = within.size();
      while (operand-- && view_.address - within[operand].address >= within[operand].bytes) {
      }
      if (operand >= within.size()) return;
      made.placed.push_back({bound.program().number(nb::cast<std::string_view>(name)), operand,
                             view_.address - within[operand].address});
    }
    if (size() >= kMost) clear();
    const auto one = std::make_shared<CachedCall>(std::move(made));
    // what they replace lives until the end, since its destructor may run Python code
    const auto before = std::exchange(calls_[key], one),
               recently = std::exchange(recent(one->layouts), one);
  }

  // Repeat a cached call: its result (a list if there are several; true if there is none), or None,
  // with nothing done, if no call of this key is cached.
  nb::object call(nb::handle function, nb::handle options, nb::handle a, nb::handle out,
                  nb::handle weights, nb::handle biases, double timeout) {
    const Operands operands{a, out, weights, biases};
    const bool any = !a.is_none(), exact = any && deterministic();
    if (!executor_.repeats() || pending_.size() || (any && checked_modes()) ||
        !read(function, operands, exact))
      return nb::none();
    const uint64_t latest = reads_;
    const std::shared_ptr<CachedCall> retained = find(options);  // C4
    if (!retained) return nb::none();
    CachedCall& cached = *retained;
    nb::object made = nb::none();
    exclusively(executor_, cached.program, [&] {
      if (reads_ != latest && (!read(function, operands, exact) || cached.layouts != layouts_))
        return;  // C5
      cached.addresses = {a_.address, out_.address};
      if (!plain(cached, operands)) return;  // C3
      nb::object results = out.is_none() ? new_results(cached) : nb::borrow(out);
      if (results.is_none() || (cached.left && !cached.left->take())) return;
      made = std::move(results);
      for (const Place& companion : companions_) cached.addresses.push_back(companion.address);
      for (const CachedCall::Placed& one : cached.placed)
        cached.bound.move(one.buffer, cached.addresses[one.operand] + one.offset);  // C2
      execute(executor_, cached.program, cached.bound, timeout,
              [&](int at) { compute(cached, at, operands, made); });
    });
    return made;
  }

  // destructors of objects may run Python code that calls this class again
  void clear() {
    std::exchange(recent_, {});
    std::exchange(calls_, {});
  }
  size_t size() const { return calls_.size(); }

 private:
  struct Place {
    uintptr_t address = 0;
    size_t bytes = 0;
  };
  static constexpr int64_t kNone = -1, kPrepared = -2,
                           kSeparate = std::numeric_limits<int64_t>::min();

  // Write the key of a call without its options to `layouts_`; false if the operands must be
  // checked. `exact`: whether algorithms are deterministic.
  bool read(nb::handle function, const Operands& operands, bool exact) {
    ++reads_;
    layouts_.assign(1, reinterpret_cast<intptr_t>(function.ptr()));
    layouts_.push_back(exact);
    a_ = out_ = {};
    companions_.clear();
    if (operands.a.is_none()) return true;
    const nb::handle a = operands.rows();
    if (!add_layout(a, a_)) return false;
    if (operands.out.is_none()) {
      layouts_.push_back(kNone);
    } else {
      if (operands.out.is(a))
        out_ = a_;
      else if (!add_layout(operands.out, out_))
        return false;
      layouts_.push_back(overlap(a_, out_) ? static_cast<int64_t>(out_.address - a_.address)
                                           : kSeparate);
    }
    const auto separate = [&] { return !overlap({view_.address, view_.span()}, out_); };
    for (Py_ssize_t at = 0; at < operands.companions(); ++at)
      if (!add_layout(operands.companion(at), companions_.emplace_back()) || !separate())
        return false;
    return all(operands.weights,
               [&](nb::handle weight) {
                 if (!prepared(weight)) return view_.add_layout(weight, layouts_) && separate();
                 layouts_.push_back(kPrepared);
                 layouts_.push_back(nb::cast<int64_t>(attribute(weight, layout_)));
                 return !out_.bytes || all(attribute(weight, tensors_), [&](nb::handle tensor) {
                   return view_.read(tensor) && separate();
                 });
               }) &&
           all(operands.biases, [&](nb::handle bias) {
             return view_.add_layout_or_none(bias, layouts_) && (bias.is_none() || separate());
           });
  }

  // Whether `fine` holds for all items of a sequence; None has no items.
  template <class Fine>
  static bool all(nb::handle sequence, Fine fine) {
    const Py_ssize_t count = sequence.is_none() ? 0 : PySequence_Size(sequence.ptr());
    if (count < 0) throw nb::python_error();
    for (Py_ssize_t at = 0; at < count; ++at)
      if (!fine(item(sequence, at))) return false;
    return true;
  }

  static nb::object item(nb::handle sequence, Py_ssize_t at) {
    nb::object found = nb::steal(PySequence_GetItem(sequence.ptr(), at));
    if (!found.is_valid()) throw nb::python_error();
    return found;
  }

  bool add_layout(nb::handle tensor, Place& place) {
    if (!view_.add_layout(tensor, layouts_)) return false;
    place = {view_.address, view_.span()};
    if (const Segment* within = Segment::containing(place.address))
      for (uint64_t each : {within->world, within->number, uint64_t{place.address}})
        layouts_.push_back(static_cast<int64_t>(each));
    return place.bytes > 0;
  }

  bool prepared(nb::handle weight) const {
    return PyType_IsSubtype(Py_TYPE(weight.ptr()),
                            reinterpret_cast<PyTypeObject*>(prepared_.ptr()));
  }

  static bool overlap(const Place& one, const Place& other) {
    return one.address - other.address < other.bytes || other.address - one.address < one.bytes;
  }

  // Whether autograd does not record the call, and the values of its tensors are equal to memory.
  // Raises the error of a weight that has changed.
  bool plain(CachedCall& cached, const Operands& operands) {
    size_t number = 0;
    const auto fine = [&](nb::handle tensor) {
      if (recorded(tensor)) return false;
      if (number == cached.latest.size()) cached.latest.emplace_back();
      nb::object& latest = cached.latest[number++];
      if (latest.is_valid() && referent(latest).is(tensor)) return true;
      if (!view_.read(tensor) || !view_.reads_as_stored(tensor)) return false;
      latest = weak_reference(tensor);
      return true;
    };
    if (operands.a.is_none()) return true;
    const nb::handle a = operands.rows();
    if (!fine(a)) return false;
    for (Py_ssize_t at = 0; at < operands.companions(); ++at)
      if (!fine(operands.companion(at))) return false;
    if (!operands.out.is_none() && !operands.out.is(a) && !fine(operands.out)) return false;
    return all(operands.weights,
               [&](nb::handle weight) {
                 if (!prepared(weight)) return fine(weight);
                 const nb::object source = attribute(weight, source_);
                 return source.is_none() || !recorded(source);
               }) &&
           all(operands.biases, [&](nb::handle bias) { return bias.is_none() || fine(bias); }) &&
           all(operands.weights, [&](nb::handle weight) {
             if (prepared(weight)) attribute(weight, check_unchanged_)();
             return true;
           });
  }

  // Run the computation of an instruction.
  static void compute(CachedCall& cached, int at, const Operands& operands,
                      const nb::object& made) {
    const auto results = static_cast<Py_ssize_t>(cached.results.size());
    const bool several = results > 1;
    nb::object all;  // the tensors, in the order of `addresses`
    const auto tensors = [&] {
      return all.is_valid() ? all : all = all_of(operands, made, several);
    };
    auto found = cached.computations.find(at);
    if (found == cached.computations.end())
      found = cached.computations
                  .emplace(at, Computation(cached.prepare(at, tensors(), operands.weights)))
                  .first;
    const Computation& one = found->second;
    nb::object kept[Computation::kMost];
    PyObject* arguments[Computation::kMost];
    const auto pass = [&](size_t number, nb::object object) {
      kept[number] = std::move(object);
      arguments[number] = kept[number].ptr();
    };
    const size_t sources = one.operands.size() - 1;
    for (size_t i = 0; i <= sources; ++i) {
      const Computation::Operand& operand = one.operands[i];
      const size_t number = i < sources ? i : sources + 1;  // the weight comes before the result
      if (operand.make.is_valid())
        pass(number, operand.make(tensors()));
      else if (!operand.number)
        arguments[number] = operands.rows().ptr();
      else if (operand.number > results)
        arguments[number] = operands.companion(operand.number - results - 1).ptr();
      else if (several)
        pass(number, item(made, operand.number - 1));
      else
        arguments[number] = made.ptr();
    }
    arguments[sources] = arguments[sources + 2] = Py_None;
    if (one.weight >= 0) {
      pass(sources, item(operands.weights, one.weight));
      if (one.biased) pass(sources + 2, item(operands.biases, one.weight));
    }
    if (!nb::steal(PyObject_Vectorcall(one.run.ptr(), arguments, sources + 3, nullptr)).is_valid())
      throw nb::python_error();
  }

  // New results of a call: one, or a list if there are several; true if there is none. None if
  // torch makes other tensors than plain ones here; to name the device would take longer than to
  // look.
  nb::object new_results(CachedCall& cached) {
    // takes half the time of `torch.empty`; not released, since Python ends before static objects
    static PyObject* const empty_strided =
        nb::object(nb::module_::import_("torch").attr("empty_strided")).release().ptr();
    static PyObject* const keywords = nb::make_tuple("dtype").release().ptr();
    const bool several = cached.results.size() > 1;
    nb::object made = nb::bool_(true), all = several ? nb::list() : nb::object();
    cached.addresses.resize(1);
    for (const CachedCall::Result& one : cached.results) {
      PyObject* arguments[] = {one.shape.ptr(), one.strides.ptr(), one.dtype.ptr()};
      made = nb::steal(PyObject_Vectorcall(empty_strided, arguments, 2, keywords));
      if (!made.is_valid()) throw nb::python_error();
      if (!view_.read_plain(made)) return nb::none();  // of another default device, or of a mode
      cached.addresses.push_back(view_.address);
      if (several) nb::borrow<nb::list>(all).append(made);
    }
    return several ? all : made;
  }

  // The operands as a list: `a`, the results, then the companions of `a`.
  static nb::list all_of(const Operands& operands, const nb::object& made, bool several) {
    nb::list all;
    all.append(operands.rows());
    if (several)
      all.extend(made);
    else
      all.append(made);
    for (Py_ssize_t at = 0; at < operands.companions(); ++at) all.append(operands.companion(at));
    return all;
  }

  // The cached call of the layouts that `read` has written, with these options (C1); null if there
  // is none. Comparing with a recent one takes half the time of hashing the options.
  std::shared_ptr<CachedCall> find(nb::handle options) {
    const auto is = [&](const std::shared_ptr<CachedCall>& one) {
      return one && one->layouts == layouts_ && equal(one->options, options);
    };
    if (std::shared_ptr<CachedCall> one = recent(layouts_); is(one)) return one;
    const auto found = calls_.find(hashed(options));
    if (found == calls_.end()) return nullptr;
    std::shared_ptr<CachedCall> one = found->second;
    if (!is(one)) return nullptr;
    const auto recently = std::exchange(recent(layouts_), one);
    return one;
  }

  // The latest call of these layouts, or of others with about the same sum.
  std::shared_ptr<CachedCall>& recent(const std::vector<int64_t>& layouts) {
    uint64_t sum = 0;
    for (int64_t number : layouts) sum += static_cast<uint64_t>(number);
    return recent_[(sum >> 4) % recent_.size()];
  }

  // Options that cannot be compared or hashed are not found, and the check of the call reports the
  // error.
  static bool equal(nb::handle one, nb::handle other) {
    const int found = PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ);
    if (found < 0) clear_only({PyExc_TypeError, PyExc_ValueError, PyExc_RuntimeError});
    return found > 0;
  }

  uint64_t hashed(nb::handle options) const {
    uint64_t hash = static_cast<uint64_t>(PyObject_Hash(options.ptr()));
    clear_only({PyExc_TypeError});
    for (int64_t number : layouts_) {
      hash = (hash ^ static_cast<uint64_t>(number)) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 32;
    }
    return hash;
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    Py_VISIT(nb::inst_ptr<CallCache>(self)->pending_.ptr());
    for (auto& [hash, cached] : nb::inst_ptr<CallCache>(self)->calls_) {
      Py_VISIT(cached->program.ptr());
      Py_VISIT(cached->prepare.ptr());
      for (const auto& [at, one] : cached->computations) {
        Py_VISIT(one.run.ptr());
        for (const Computation::Operand& operand : one.operands) Py_VISIT(operand.make.ptr());
      }
    }
    return 0;
  }
  static int release(PyObject* self) {
    nb::inst_ptr<CallCache>(self)->clear();
    return 0;
  }

  static nb::object attribute(nb::handle object, nb::handle name) {
    nb::object found = nb::steal(PyObject_GetAttr(object.ptr(), name.ptr()));
    if (!found.is_valid()) throw nb::python_error();
    return found;
  }

  Executor& executor_;
  nb::object prepared_;
  nb::list pending_;
  nb::str layout_{"layout"}, tensors_{"tensors"}, source_{"source"},
      check_unchanged_{"check_unchanged"};
  std::unordered_map<uint64_t, std::shared_ptr<CachedCall>> calls_;
  std::array<std::shared_ptr<CachedCall>, 16> recent_;  // some of them
  View view_;
  uint64_t reads_ = 0;            // calls of `read`
  std::vector<int64_t> layouts_;  // of the latest call; a member, so that its memory is reused
  Place a_, out_;                 // of the latest call
  std::vector<Place> companions_;

 public:
  // let the garbage collector find the objects that the cache retains
  static inline PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                       {Py_tp_clear, reinterpret_cast<void*>(release)},
                                       {0, nullptr}};
};

}  // namespace weft
