// The life of one disk engine under fuzzing: what io.cpp and io_refusals.cpp do with it.
#pragma once

#include <deque>
#include <memory>

#include "io.h"

namespace fuzz {

constexpr uint64_t MOST_TRANSFERS = 24;  // of one round
constexpr int SPANS = 6;                 // of each file; transfers of one span are ordered, those of others are not

struct Transfer {
    zk_io_request request{};
    std::unique_ptr<Memory> memory;
    ScratchFile *file = nullptr;
    uint64_t padded = 0;
    std::vector<char> written;
    bool bounces = false;
};

struct Chain {
    ScratchFile *file;
    uint64_t begin, end;
    std::vector<Transfer *> last;  // one, or reads that may overtake each other
};

struct Life {
    Life(Random &generator, uint64_t execution, uint32_t kind);
    Life(const Life &) = delete;
    Life &operator=(const Life &) = delete;
    ~Life();

    [[noreturn]] void fail_with(const char *what, int64_t detail) const {
        std::fprintf(stderr, "engine %u: depth %u, block %llu, threads %u, bounces %u, %s faults\n", options.kind,
                     options.depth, static_cast<unsigned long long>(options.block), options.threads, options.bounces,
                     faulty ? "with" : "no");
        fail("zk_io", number, what, detail);
    }
    void expect(bool right, const char *what, int64_t detail = 0) const {
        if (!right) fail_with(what, detail);
    }

    void draw_faults();
    bool begin();  // false where this kind of engine cannot run here
    void add(ScratchFile &file);
    // Registered memory may end in the middle of a span.
    uint64_t some_slots() { return random.one_in(2) ? MOST_TRANSFERS * SLOT_NBYTES : 4096 * (1 + random.below(400)); }

    void round();
    void short_round();
    void meddle();
    Transfer &draw(Chain &chain, bool reads_only);
    void link(Chain &chain, Transfer &transfer);
    void flush();
    void refuse_bad();
    void wait(Transfer &transfer, bool until_done);
    void finish(uint64_t file_end);
    void check_state(const Transfer &transfer) const;
    void check(const Transfer &transfer, uint64_t file_end);
    bool may_fail(const Transfer &transfer) const;
    bool must_fail(const Transfer &transfer) const;

    Random &random;
    const uint64_t number;
    zk_io_options options{};
    zk_io_faults faults{};
    bool faulty = false;
    zk_io *engine = nullptr;
    std::deque<ScratchFile> files;
    std::deque<Transfer> transfers;
    std::vector<zk_io_request *> batch;
    char *slots = nullptr;
    Counts counts;
    uint64_t read = 0, written = 0, bounced = 0;  // by the device, where all went well
    bool all_well = true;
};

}  // namespace fuzz
