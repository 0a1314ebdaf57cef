// A small pool of threads: tasks are taken from one counter, the caller takes part, and nobody keeps spinning for long.
#pragma once

#include <cstdint>

namespace clearhead {

struct Tasks {
    int64_t count;
    int threads;  // at most, the calling one included
    void (*body)(const void* context, int64_t task, void* scratch);
    const void* context;
    int64_t scratch_bytes;  // for each thread, on its own cache line
    bool (*stop)();         // asked now and then by the calling thread only; true ends the work early. May be null
};

// Runs all tasks; false when `stop` ended them early. A pool that another caller holds is not waited for: this caller
// then does its tasks alone. Throws std::bad_alloc.
bool run(const Tasks& tasks);

// Returns once *turn is `mine`. The tasks that bring it there must have started earlier, so that some thread has them.
void await(const int32_t* turn, int32_t mine);

}  // namespace clearhead
