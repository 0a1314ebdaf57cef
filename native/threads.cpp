#include "threads.hpp"

#if !defined(_WIN32)
#include <pthread.h>
#endif

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "memory.hpp"

namespace clearhead {
namespace {

constexpr int kSpins = 4000;  // some 20 to 50 µs: the next call often comes that soon

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Waits until `ready()`, soon by spinning.
template <class Ready> void wait_until(Ready ready) {
    for (int i = 0; !ready(); ++i)
        if (i < kSpins)
            pause();
        else
            std::this_thread::yield();
}

struct Round {  // one call's tasks
    const Tasks& tasks;
    std::atomic<int64_t> next{0};
    std::atomic<bool> stopped{false}, failed{false};

    void work(bool caller) {
        KeptMemory<false> scratch;
        void* thread_scratch;
        try {
            thread_scratch = scratch.at_least(tasks.scratch_bytes);
        } catch (const std::bad_alloc&) {
            if (caller) failed = true;  // the other threads may still run all tasks
            return;
        }
        for (int64_t task; !stopped && (task = next++) < tasks.count;) {
            tasks.body(tasks.context, task, thread_scratch);
            if (caller && tasks.stop && tasks.stop()) stopped = true;
        }
    }
};

struct Pool {
    std::atomic<bool> busy{false};  // some caller is using the workers
    std::mutex lock;
    std::condition_variable wake;
    std::atomic<uint64_t> generation{0};
    std::atomic<int> active{0};  // workers in the round
    Round* round = nullptr;
    int workers = 0, wanted = 0;  // a worker whose number is not below `wanted` keeps sleeping

    void grow(int count) {
        while (workers < count) {
            try {
                std::thread([this, number = workers] { serve(number); }).detach();
            } catch (const std::exception&) {  // no more threads, or no memory for one: the present ones do the work
                return;
            }
            ++workers;
        }
    }

    [[noreturn]] void serve(int number) {
        uint64_t seen = 0;
        for (;;) {
            for (int i = 0; i < kSpins && generation.load(std::memory_order_acquire) == seen; ++i) pause();
            Round* joined;
            {
                std::unique_lock<std::mutex> held(lock);
                wake.wait(held, [&] { return generation.load() != seen; });
                seen = generation.load();
                joined = number < wanted ? round : nullptr;
                if (joined) ++active;
            }
            if (!joined) continue;
            joined->work(false);
            active.fetch_sub(1, std::memory_order_release);
        }
    }

    void share(Round& all, int helpers) {
        grow(helpers);
        {
            std::lock_guard<std::mutex> held(lock);
            round = &all;
            wanted = helpers;
            ++generation;
        }
        wake.notify_all();
        all.work(true);
        {
            std::lock_guard<std::mutex> held(lock);
            round = nullptr;
        }
        wait_until([this] { return active.load(std::memory_order_acquire) == 0; });
    }
};

// Null in a forked process: OpenMP's threads are not there any more, and waiting for them would never end.
struct Team {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
    int (*size)();
};
std::atomic<const Team*> team{nullptr};

struct Shared {
    Round& round;
    const std::thread::id caller;
    std::atomic<int> places;  // for other threads than the caller's
};

// Runs the round on the team, always on all of it, since OpenMP starts new threads when the number changes. False where
// there is no team or it has too few threads.
bool share_with_team(Round& round, int helpers) {
    const Team* here = team.load();
    const int size = here ? here->size() : 0;
    if (size <= helpers) return false;
    Shared shared{round, std::this_thread::get_id(), {helpers}};
    const auto member = [](void* data) {
        Shared& shared = *static_cast<Shared*>(data);
        const bool caller = std::this_thread::get_id() == shared.caller;
        if (caller || shared.places-- > 0) shared.round.work(caller);
    };
    here->parallel(member, &shared, unsigned(size), 0);
    return true;
}

// Never freed: threads may still sleep in it when the process ends. A forked process starts without one.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
    Pool* here = pool.load();
    if (here) return *here;
    Pool* fresh = new Pool;
    if (pool.compare_exchange_strong(here, fresh)) return *fresh;
    delete fresh;
    return *here;
}

// False while another caller uses the pool.
bool share_with_pool(Round& round, int helpers) {
    Pool& workers = the_pool();
    if (workers.busy.exchange(true, std::memory_order_acquire)) return false;
    workers.share(round, helpers);
    workers.busy.store(false, std::memory_order_release);
    return true;
}

#if !defined(_WIN32)
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] {
    pool.store(nullptr);
    team.store(nullptr);
});
#endif

}  // namespace

Turn::Turn(int32_t* turn, int64_t number) : turn(turn), number(int32_t(number)) {
    wait_until([this] { return __atomic_load_n(this->turn, __ATOMIC_ACQUIRE) == this->number; });
}

void use_team(void (*parallel)(void (*)(void*), void*, unsigned, unsigned), int (*size)()) {
    team.store(new Team{parallel, size});
}

bool run(const Tasks& tasks) {
    Round round{tasks};
    const int helpers = int(tasks.count < tasks.threads ? tasks.count : tasks.threads) - 1;
    const bool shared =
        helpers > 0 && ((tasks.team && share_with_team(round, helpers)) || share_with_pool(round, helpers));
    if (!shared) round.work(true);
    if (round.failed && round.next < tasks.count) throw std::bad_alloc();
    return !round.stopped;
}

}  // namespace clearhead
