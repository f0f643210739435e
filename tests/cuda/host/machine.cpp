// What the tests call of the host machine: declare spans, launch, read what happened.
#include "machine.h"

#include "index.cu"

namespace {

struct Kernel {
    const char *name;
    void (*run)(zerokern::Job);
};

#define KERNEL(name) {#name, name}
const Kernel kKernels[] = {KERNEL(gather_fp32),  KERNEL(gather_bf16),  KERNEL(gather_fp16),
                           KERNEL(scatter_fp32), KERNEL(scatter_bf16), KERNEL(scatter_fp16)};

zerokern::Job job;
const Kernel *kernel;

}  // namespace

extern "C" void machine_clear() {
    machine::spans.clear();
    machine::fault = machine::kNone;
    std::memset(machine::counts, 0, sizeof(machine::counts));
}

extern "C" void machine_allow(unsigned long long at, long long nbytes, int is_link, int is_writable) {
    const auto count = static_cast<std::size_t>(nbytes);
    machine::spans.push_back({at, at + count, is_link != 0, is_writable != 0, std::vector<bool>(count)});
}

extern "C" long long machine_count(int is_store, int is_link, int nbytes) {
    return machine::counts[is_store][is_link][nbytes];
}

// Runs the blocks of a grid one after the other, in an order of the seed. Returns a fault, or -1: no such kernel.
extern "C" int machine_launch(const char *name, const void *words, int nblocks, unsigned long long seed) {
    static std::vector<machine::Thread> threads(zerokern::kThreads);
    kernel = nullptr;
    for (const Kernel &one : kKernels) {
        if (!std::strcmp(one.name, name)) kernel = &one;
    }
    if (!kernel) return -1;
    std::memcpy(&job, words, sizeof(job));
    for (machine::Span &span : machine::spans) span.written.assign(span.written.size(), false);
    machine::body = [] { kernel->run(job); };
    machine::Shuffle shuffle{seed};
    std::vector<unsigned int> order;
    for (int i = 0; i < nblocks; ++i) order.push_back(static_cast<unsigned int>(i));
    shuffle(order);
    gridDim.x = static_cast<unsigned int>(nblocks);
    for (const unsigned int block : order) {
        blockIdx.x = block;
        machine::run_block(threads, shuffle);
    }
    return machine::fault;
}
