// Shared by the functions for Python: they check arrays' shapes, turn arrays into pointers, and run a job without the
// interpreter.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <chrono>
#include <cstdint>
#include <new>
#include <optional>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "dispatch.hpp"

namespace clearhead {

namespace nb = nanobind;
using Input = nb::ndarray<nb::ro, nb::device::cpu>;
using Taken = nb::ndarray<nb::device::cpu, nb::c_contig>;

inline void check(bool fine, const char* what) {
    if (!fine) throw std::invalid_argument(what);
}

inline View view(const Input& x, int64_t bytes, int64_t b, int64_t h, int64_t r, int64_t c, const char* what) {
    check(x.ndim() == 4 && x.itemsize() == size_t(bytes), what);
    check(int64_t(x.shape(0)) == b && int64_t(x.shape(1)) == h && int64_t(x.shape(2)) == r && int64_t(x.shape(3)) == c,
          what);
    return {x.data(), x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
}

template <class T> const T* whole(const std::optional<Input>& x, int64_t count, const char* what) {
    if (!x) return nullptr;
    check(x->size() == size_t(count) && x->itemsize() == sizeof(T), what);
    int64_t expected = 1;
    if (count)
        for (size_t i = x->ndim(); i-- > 0; expected *= int64_t(x->shape(i)))
            check(x->shape(i) == 1 || x->stride(i) == expected, what);
    return static_cast<const T*>(x->data());
}

inline void* room(const std::optional<Taken>& x, int64_t count, int64_t bytes, const char* what) {
    if (!x) return nullptr;
    check(x->size() == size_t(count) && x->itemsize() == size_t(bytes), what);
    return x->data();
}

inline Type checked_type(int type, const char* what) {
    check(type >= 0 && type < 4, what);
    return Type(type);
}

inline void check_labels(const int64_t* labels, int64_t count, int64_t most, const char* what) {
    for (int64_t i = 0; i < count; ++i) check(labels[i] < most, what);
}

// The shapes and the score rules; keeps their arrays alive.
struct Described {
    Problem p{};
    nb::object kept;
    std::vector<LabelSets> span_sets;

    // A job over arrays that were described, v (batch, v_heads, keys, d_v) where it is needed.
    Job job(int threads, const Input& q, const Input& k, const std::optional<Input>& v) const {
        Job job{p, threads};
        Problem& all = job.problem;
        all.q = view(q, bytes_of(p.type), p.batch, p.heads, p.queries, p.d_k, "q");
        all.k = view(k, bytes_of(p.type), p.batch, p.kv_heads, p.keys, p.d_k, "k");
        if (!v) return job;
        check(v->ndim() == 4, "v");
        all.v_heads = int64_t(v->shape(1));
        all.d_v = int64_t(v->shape(3));
        check(all.v_heads > 0 ? p.heads % all.v_heads == 0 : p.heads == 0, "v's heads");
        all.v = view(*v, bytes_of(p.type), p.batch, all.v_heads, p.keys, all.d_v, "v");
        return job;
    }
};

// Releases the interpreter for as long as it lives. Once the interpreter is ending, CPython ends a thread that asks for
// it by unwinding its stack, which nanobind's functions do not allow; so such a thread sleeps until the process exits.
class Released {
  public:
    Released() : outer(std::exchange(innermost, this)), state(PyEval_SaveThread()) {}
    ~Released() {
        take_back();
        innermost = outer;
    }
    Released(const Released&) = delete;
    Released& operator=(const Released&) = delete;

    // Runs signal handlers: has one raised an error? Called by the thread that made the innermost Released.
    static bool signalled() {
        innermost->take_back();
        const bool raised = PyErr_CheckSignals() != 0;
        innermost->state = PyEval_SaveThread();
        return raised;
    }

  private:
    void take_back() {
        try {
            PyEval_RestoreThread(state);
        } catch (...) {
            for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }

    inline static thread_local Released* innermost = nullptr;  // a signal's handler may call the kernel again
    Released* outer;
    PyThreadState* state;
};

// Looks for Ctrl-C, some twenty times a second, without holding the interpreter in between.
inline thread_local std::chrono::steady_clock::time_point last_look;

inline bool interrupted() {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_look < std::chrono::milliseconds(50)) return false;
    last_look = now;
    return Released::signalled();
}

// Indices and byte counts are 64 bits wide. A broadcast axis may claim any size, more than any memory holds.
inline void check_job(const Job& job) {
    const Problem& p = job.problem;
    check(job.threads > 0, "threads");
    const double heads = double(p.batch) * double(p.heads), queries = double(p.queries), keys = double(p.keys);
    const double width = double(p.d_k) + double(p.d_v) + 64;
    if (heads * (queries + keys) * width > 0x1p52 || heads * queries * keys > 0x1p61) throw std::bad_alloc();
}

// Runs a pass over a job, or over several, without the interpreter.
template <class Jobs> void work(bool (*pass)(Jobs, bool (*)()), Jobs jobs) {
    if constexpr (std::is_base_of_v<Job, Jobs>)
        check_job(jobs);
    else
        for (const Job& job : jobs) check_job(job);
    bool done;
    last_look = std::chrono::steady_clock::now();
    {
        Released released;
        done = pass(std::move(jobs), interrupted);
    }
    if (!done) throw nb::python_error();
}

}  // namespace clearhead
