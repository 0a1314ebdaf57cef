// Threads that share the tasks of a call: a small pool of our own, or the OpenMP team that PyTorch computes with. Tasks
// are taken from one counter, the calling thread works too, and no thread of ours spins for long.
#pragma once

#include <cstdint>

namespace clearhead {

struct Tasks {
    int64_t count;
    int threads;  // at most, the calling one included
    void (*body)(const void* context, int64_t task, void* scratch);
    const void* context;
    int64_t scratch_bytes;  // for each thread, on its own cache line
    bool (*stop)();         // called by the calling thread only, after each task; true ends the work early. May be null
    bool team = false;      // run on the team of `use_team`, where it has as many threads
};

// PyTorch's threads go on spinning for milliseconds after each of its operations, on the processors that our pool would
// need, and can run our tasks without being woken. `parallel` is the OpenMP library's GOMP_parallel, `size` its
// omp_get_max_threads.
void use_team(void (*parallel)(void (*)(void*), void*, unsigned, unsigned), int (*size)());

// Runs all tasks; false when `stop` ended them early. While another caller uses the pool, the calling thread runs its
// tasks alone instead of waiting. Throws std::bad_alloc.
bool run(const Tasks& tasks);

// A task's turn, while this lives: *turn has been counted up to `number`, and counts on afterwards. The tasks that
// count it up to there must have been started before, or this waits forever.
class Turn {
  public:
    Turn(int32_t* turn, int64_t number);
    ~Turn() { __atomic_store_n(turn, number + 1, __ATOMIC_RELEASE); }

  private:
    int32_t *turn, number;
};

}  // namespace clearhead
