// The host twins of cuda/ptx.cuh: a GPU played by one thread, which checks each access of a kernel.
//
// Threads of a CTA are fibers, entered in random order. Barriers and bulk copies complete late and in random order.
// What depends on luck on a GPU is found here in every run, since order is tracked and not observed: a stage that is
// used again before wait_group.read, a load that is read before this thread has seen its phase complete, memory that
// threads and bulk copies share without a proxy fence, races within shared memory, double writes, reads of what was
// just written, accesses out of bounds or of what nobody wrote, a CTA that ends before its copies, and hangs.
#pragma once
#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "fibers.h"

#define ZK_DEVICE static inline
#define ZK_MEMBER inline
#define ZK_KERNEL extern "C" void
#define ZK_PARAMETERS(type) const type &
#ifndef ZK_BULK
#define ZK_BULK 1
#endif

namespace machine {

constexpr u32 WARP = 32, GRAIN = 2, CTAS = 8;  // CTAS: at once; others begin when one ends
enum { READ = 1, WRITE = 2, SCRATCH = 4 };     // SCRATCH: read and written in any order, complete from the start

struct Region {
    u64 begin, end;
    u32 may;
    std::vector<u8> written;
};

struct Access {  // the last one of a kind to a grain of shared memory
    u32 thread = ~0u, cta_epoch = 0, fences = 0;
};

enum State : u8 { NOTHING, BY_THREAD, BY_BULK };

struct Grain {
    State state = NOTHING;
    bool arrived = false;        // BY_BULK: the copy has put its bytes here
    u32 barrier = 0, phase = 0;  // BY_BULK: whose completion says so
    u32 lock = 0;                // number + 1 of the store that has not been waited for
    Access writer, reader;
};

struct Barrier {
    u32 arrivals, pending, phase;
    int64_t bytes;
    Access made;
    bool fenced;
};

struct Copy {
    bool load;
    u32 cta, shared, nbytes, barrier, phase, number;
    u64 global;
    std::vector<u8> bytes;  // of a store, once read
    bool was_read = false, was_written = false;
};

struct Thread {
    u32 number, cta;
    bool done = false, waits = false;
    u32 fences = 0;
    size_t region[2] = {0, 0};             // of the last access: read, written
    std::map<u32, u32> seen;               // phases of a barrier that this thread knows to be complete
    std::vector<std::vector<u32>> groups;  // numbers of its stores
    std::vector<u32> open;
    size_t first_group = 0, first_written = 0;
};

struct Meeting {
    u32 here = 0, epoch = 0;
};

struct Cta {
    u32 number = 0, alive = 0;
    std::vector<u8> memory;
    std::vector<Grain> grains;
    std::map<u32, Barrier> barriers;
    Meeting all;
    std::vector<Meeting> exchanges;
    std::vector<double> values;  // of exchanges: two rounds for each thread
    std::vector<Thread> threads;
};

struct Machine {
    typedef void (*Kernel)(const void *);
    std::vector<Region> regions;
    std::vector<Cta> ctas;
    std::vector<Copy> copies;
    std::vector<u32> under_way;
    std::vector<u32> ready;  // fibers that can go on: slot * threads + thread
    Fibers fibers;
    Kernel kernel = nullptr;
    const void *parameters = nullptr;
    u32 threads = 0, count = 0, running = 0, patience = 1;
    u64 state = 1;
    std::string error;
    Thread *now = nullptr;
    Cta *here = nullptr;

    u32 random() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<u32>(state >> 16);
    }

    // ---- what goes wrong ends the run
    [[noreturn]] void fail(const std::string &what) {
        char where[64];
        snprintf(where, sizeof where, "cta %u thread %u: ", here->number, now->number);
        if (error.empty()) error = where + what;
        for (;;) fibers.leave();
    }

    // ---- turns
    void turn() {
        if (--patience) return;
        patience = 1 + random() % 48;
        fibers.leave();
    }
    void give_way() { fibers.leave(); }

    void meet(Meeting &place, u32 wanted, u32 first) {
        u32 epoch = place.epoch;
        if (++place.here == wanted) {
            place.here = 0;
            ++place.epoch;
            for (u32 i = first; i < first + wanted; ++i) wake(i);
            return;
        }
        now->waits = true;
        while (place.epoch == epoch) give_way();
    }
    void wake(u32 thread) {
        Thread &one = here->threads[thread];
        if (!one.waits) return;
        one.waits = false;
        ready.push_back(static_cast<u32>(here - ctas.data()) * threads + thread);
    }

    // ---- order
    Access access() const { return {now->number, here->all.epoch, now->fences}; }
    bool before_now(const Access &old) const {
        return old.thread == ~0u || old.thread == now->number || here->all.epoch > old.cta_epoch;
    }
    bool fenced(const Access &old) const { return old.thread == ~0u || here->threads[old.thread].fences > old.fences; }

    // ---- global memory
    Region &region(u64 at, u64 nbytes, u32 may, const char *what) {
        size_t &guess = now->region[may == WRITE];
        for (size_t i = 0; i < regions.size(); ++i) {
            Region &one = regions[guess];
            if (at >= one.begin && at + nbytes <= one.end && one.may & (may | SCRATCH)) return one;
            guess = guess + 1 < regions.size() ? guess + 1 : 0;
        }
        fail(std::string(what) + " global memory out of bounds");
    }
    void read_global(u64 at, u64 nbytes) {
        if (at % (nbytes <= 16 ? nbytes : 16)) fail("a misaligned global read");
        Region &one = region(at, nbytes, READ, "reads");
        if (one.may & WRITE)
            for (u64 i = at - one.begin; i < at - one.begin + nbytes; ++i)
                if (one.written[i]) fail("reads what was just written");
    }
    void write_global(u64 at, u64 nbytes) {
        if (at % (nbytes <= 16 ? nbytes : 16)) fail("a misaligned global write");
        Region &one = region(at, nbytes, WRITE, "writes");
        if (one.may & SCRATCH) return;
        for (u64 i = at - one.begin; i < at - one.begin + nbytes; ++i) {
            if (one.written[i]) fail("writes a byte twice");
            one.written[i] = 1;
        }
    }

    // ---- shared memory, by threads
    Grain *grains(u32 at, u32 nbytes) {
        if (at % (nbytes <= 16 ? nbytes : 16)) fail("a misaligned access to shared memory");
        if (u64(at) + nbytes > here->memory.size()) fail("an access out of bounds of shared memory");
        return &here->grains[at / GRAIN];
    }
    void read_shared(u32 at, u32 nbytes) {
        Grain *grain = grains(at, nbytes);
        for (u32 i = 0; i < nbytes / GRAIN; ++i) {
            Grain &g = grain[i];
            if (g.state == NOTHING) fail("reads shared memory that nobody wrote");
            if (g.state == BY_BULK) check_seen(g);
            if (g.state == BY_THREAD && !before_now(g.writer)) fail("reads what another thread writes: no barrier");
            g.reader = access();
        }
    }
    void write_shared(u32 at, u32 nbytes) {
        Grain *grain = grains(at, nbytes);
        for (u32 i = 0; i < nbytes / GRAIN; ++i) {
            Grain &g = grain[i];
            if (g.lock) fail("writes to a stage before wait_group.read");
            if (g.state == BY_BULK) check_seen(g);
            if (!before_now(g.writer) || !before_now(g.reader)) fail("writes what another thread uses: no barrier");
            g.state = BY_THREAD;
            g.writer = access();
        }
    }
    void check_seen(const Grain &g) {
        auto found = now->seen.find(g.barrier);
        if (!g.arrived || found == now->seen.end() || found->second <= g.phase)
            fail("uses a stage before the phase of its barrier is seen complete");
    }

    // ---- barriers that count bytes
    Barrier &barrier(u32 at) {
        auto found = here->barriers.find(at);
        if (found == here->barriers.end()) fail("a barrier that was not initialised");
        if (!before_now(found->second.made)) fail("a barrier that another thread initialises: no barrier of the CTA");
        return found->second;
    }
    void completed(Barrier &one) {
        if (one.pending || one.bytes) return;
        one.pending = one.arrivals;
        ++one.phase;
    }

    // ---- bulk copies
    void check_bulk(u64 global, u32 shared, u32 nbytes) {
        if (global % 16 || shared % 16 || nbytes % 16 || !nbytes) fail("a bulk copy that is not aligned to 16 bytes");
        if (u64(shared) + nbytes > here->memory.size()) fail("a bulk copy out of bounds of shared memory");
    }
    u32 start(Copy copy) {
        copy.number = static_cast<u32>(copies.size());
        copies.push_back(copy);
        under_way.push_back(copy.number);
        return copy.number;
    }
    void bulk_load(u32 to, u64 from, u32 nbytes, u32 at) {
        check_bulk(from, to, nbytes);
        read_global(from, nbytes);
        Barrier &one = barrier(at);
        if (!one.fenced) fail("a bulk copy on a barrier without fence.mbarrier_init");
        for (u32 i = 0; i < nbytes / GRAIN; ++i) {
            Grain &g = here->grains[to / GRAIN + i];
            if (g.lock) fail("loads into a stage before wait_group.read");
            if (g.state == BY_BULK) check_seen(g);
            if (!before_now(g.writer) || !before_now(g.reader)) fail("loads into what a thread uses: no barrier");
            if (!fenced(g.writer) || !fenced(g.reader)) fail("loads into what a thread used: no proxy fence");
            g.state = BY_BULK;
            g.arrived = false;
            g.barrier = at;
            g.phase = one.phase;
            g.writer = g.reader = Access{};
        }
        start({true, u32(here - ctas.data()), to, nbytes, at, one.phase, 0, from, {}});
    }
    void bulk_store(u64 to, u32 from, u32 nbytes) {
        check_bulk(to, from, nbytes);
        write_global(to, nbytes);
        u32 number = start({false, u32(here - ctas.data()), from, nbytes, 0, 0, 0, to, {}});
        for (u32 i = 0; i < nbytes / GRAIN; ++i) {
            Grain &g = here->grains[from / GRAIN + i];
            if (g.state == NOTHING) fail("stores shared memory that nobody wrote");
            if (g.state == BY_BULK) check_seen(g);
            if (g.state == BY_THREAD && !before_now(g.writer)) fail("stores what another thread writes: no barrier");
            if (g.state == BY_THREAD && !fenced(g.writer)) fail("stores what a thread wrote: no proxy fence");
            g.lock = number + 1;
        }
        now->open.push_back(number);
    }
    void wait_group(u32 pending, bool read) {
        size_t until = now->groups.size() > pending ? now->groups.size() - pending : 0;
        size_t &first = read ? now->first_group : now->first_written;
        for (; first < until; ++first)
            for (u32 number : now->groups[first]) {
                while (!(read ? copies[number].was_read : copies[number].was_written)) give_way();
                unlock(copies[number]);
            }
        if (!read && now->first_group < first) now->first_group = first;
    }
    void unlock(const Copy &copy) {
        for (u32 i = 0; i < copy.nbytes / GRAIN; ++i) {
            Grain &g = here->grains[copy.shared / GRAIN + i];
            if (g.lock == copy.number + 1) g.lock = 0;
        }
    }
    // One of the copies under way goes one step further.
    void advance() {
        u32 place = random() % static_cast<u32>(under_way.size());
        Copy &copy = copies[under_way[place]];
        Cta &cta = ctas[copy.cta];
        u8 *shared = cta.memory.data() + copy.shared;
        if (copy.load) {
            memcpy(shared, reinterpret_cast<void *>(copy.global), copy.nbytes);
            for (u32 i = 0; i < copy.nbytes / GRAIN; ++i) cta.grains[copy.shared / GRAIN + i].arrived = true;
            Barrier &one = cta.barriers.at(copy.barrier);
            if (one.phase != copy.phase && error.empty()) error = "a barrier's phase ended before its copy";
            one.bytes -= copy.nbytes;
            completed(one);
        } else if (!copy.was_read) {
            copy.bytes.assign(shared, shared + copy.nbytes);
            copy.was_read = true;
            return;
        } else {
            memcpy(reinterpret_cast<void *>(copy.global), copy.bytes.data(), copy.nbytes);
            copy.was_written = true;
        }
        under_way[place] = under_way.back();
        under_way.pop_back();
    }

    // ---- a launch
    void begin(u32 slot, u32 number, u32 shared);
    void ended();
    void run(u32 grid, u32 shared);
};

inline Machine &the() {
    static Machine one;
    return one;
}

inline void body() {
    Machine &m = the();
    m.kernel(m.parameters);
    m.ended();
    for (;;) m.fibers.leave();
}

inline void Machine::begin(u32 slot, u32 number, u32 shared) {
    Cta &cta = ctas[slot];
    cta.number = number;
    cta.alive = threads;
    cta.memory.assign(shared, 0xA5);
    cta.grains.assign(shared / GRAIN, Grain{});
    cta.barriers.clear();
    cta.all = Meeting{};
    cta.exchanges.assign(threads / WARP, Meeting{});
    cta.values.assign(2 * threads, 0.0);
    cta.threads.assign(threads, Thread{});
    for (u32 i = 0; i < threads; ++i) {
        cta.threads[i].number = i;
        cta.threads[i].cta = slot;
        fibers.prepare(slot * threads + i, body);
        ready.push_back(slot * threads + i);
    }
}

// A thread is past its kernel: what it has started must be complete.
inline void Machine::ended() {
    if (!now->open.empty()) fail("ends with bulk stores that were not committed");
    if (now->first_group < now->groups.size()) fail("ends before wait_group");
    if (--here->alive == 0) {
        for (u32 number : under_way)
            if (copies[number].load && &ctas[copies[number].cta] == here) fail("ends before a bulk load has arrived");
        --running;
    }
    now->done = true;
}

inline void Machine::run(u32 grid, u32 shared) {
    u32 next = 0;
    u64 idle = 0;
    ctas.resize(CTAS);
    copies.clear();
    under_way.clear();
    ready.clear();
    error.clear();
    running = 0;
    for (; next < grid && next < CTAS; ++next, ++running) begin(next, next, shared);
    while (running && error.empty()) {
        if (!under_way.empty() && (ready.empty() || random() % 8 == 0)) {
            advance();
            idle = 0;
        }
        if (ready.empty()) {
            if (under_way.empty()) error = "hangs: every thread waits";
            continue;
        }
        u32 place = random() % static_cast<u32>(ready.size()), fiber = ready[place];
        here = &ctas[fiber / threads];
        now = &here->threads[fiber % threads];
        fibers.enter(fiber);
        if (now->done || now->waits) {
            ready[place] = ready.back();
            ready.pop_back();
        }
        if (now->done && !here->alive && next < grid) {
            begin(static_cast<u32>(here - ctas.data()), next++, shared);
            ++running;
        }
        idle = under_way.empty() ? idle + 1 : 0;
        if (idle > 4000000) error = "hangs: threads ask for what never comes";
    }
    while (!under_way.empty() && error.empty()) advance();
}

}  // namespace machine

// ---- the twins
inline u32 thread_number() { return machine::the().now->number; }
inline u32 cta_number() { return machine::the().here->number; }
inline u32 cta_count() { return machine::the().count; }
inline u32 shared_memory() { return 0; }

#define ZK_TWIN_LOAD(name, type)                             \
    inline type name(u64 at) {                               \
        machine::the().turn();                               \
        machine::the().read_global(at, sizeof(type));        \
        type x;                                              \
        memcpy(&x, reinterpret_cast<void *>(at), sizeof(x)); \
        return x;                                            \
    }
#define ZK_TWIN_STORE(name, type)                            \
    inline void name(u64 at, type x) {                       \
        machine::the().turn();                               \
        machine::the().write_global(at, sizeof(type));       \
        memcpy(reinterpret_cast<void *>(at), &x, sizeof(x)); \
    }
ZK_TWIN_LOAD(ld_global_u8, u8)
ZK_TWIN_LOAD(ld_global_u16, u16)
ZK_TWIN_LOAD(ld_global_u32, u32)
ZK_TWIN_LOAD(ld_global_u64, u64)
ZK_TWIN_LOAD(ld_global_v4, Words4)
ZK_TWIN_STORE(st_global_u8, u8)
ZK_TWIN_STORE(st_global_u16, u16)
ZK_TWIN_STORE(st_global_u32, u32)
ZK_TWIN_STORE(st_global_u64, u64)
ZK_TWIN_STORE(st_global_v4, Words4)

inline void mbarrier_init(u32 at, u32 arrivals) {
    machine::Machine &m = machine::the();
    m.write_shared(at, 8);
    m.here->barriers[at] = machine::Barrier{arrivals, arrivals, 0, 0, m.access(), false};
}
inline void fence_mbarrier_init() {
    for (auto &one : machine::the().here->barriers)
        if (one.second.made.thread == machine::the().now->number) one.second.fenced = true;
}
inline void mbarrier_arrive_expect_tx(u32 at, u32 nbytes) {
    machine::Machine &m = machine::the();
    m.turn();
    machine::Barrier &one = m.barrier(at);
    one.bytes += nbytes;
    --one.pending;
    m.completed(one);
}
inline bool mbarrier_try_wait_parity(u32 at, u32 parity) {
    machine::Machine &m = machine::the();
    m.give_way();
    machine::Barrier &one = m.barrier(at);
    if ((one.phase & 1) == parity) return false;
    m.now->seen[at] = one.phase;
    return true;
}
inline void fence_proxy_async() { ++machine::the().now->fences; }
inline void bulk_load(u32 to, u64 from, u32 nbytes, u32 barrier) {
    machine::the().turn();
    machine::the().bulk_load(to, from, nbytes, barrier);
}
inline void bulk_store(u64 to, u32 from, u32 nbytes) {
    machine::the().turn();
    machine::the().bulk_store(to, from, nbytes);
}
inline void bulk_commit_group() {
    machine::Thread &now = *machine::the().now;
    now.groups.push_back(now.open);
    now.open.clear();
}
template <u32 PENDING>
inline void bulk_wait_group_read() {
    machine::the().wait_group(PENDING, true);
}
template <u32 PENDING>
inline void bulk_wait_group() {
    machine::the().wait_group(PENDING, false);
}

// ---- what the tests call
extern "C" {
inline __attribute__((used)) void machine_clear() { machine::the().regions.clear(); }
inline __attribute__((used)) void machine_region(u64 begin, u64 nbytes, u32 may) {
    std::vector<u8> written(may & machine::WRITE && !(may & machine::SCRATCH) ? nbytes : 0);
    machine::the().regions.push_back({begin, begin + nbytes, may, written});
}
// Runs a kernel of this library; the text of what went wrong, or an empty one.
inline __attribute__((used)) const char *machine_run(const char *name, const void *parameters, u32 grid, u32 threads,
                                                     u32 shared, u64 seed) {
    machine::Machine &m = machine::the();
    Dl_info own;
    dladdr(reinterpret_cast<void *>(&machine_run), &own);
    void *library = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    m.kernel = reinterpret_cast<machine::Machine::Kernel>(dlsym(library, name));
    if (!m.kernel) return "no such kernel";
    m.parameters = parameters;
    m.threads = threads;
    m.count = grid;
    m.state = seed * 2654435761u + 88172645463325252u;
    m.run(grid, shared);
    return m.error.c_str();
}
}
