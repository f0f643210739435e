// The disk engine against a model of its files: random transfers in chains of `after`, under faults, on both kinds of
// engine. Every request ends; it fails only where a fault or the end of the file says so; nothing else is touched.
#include <errno.h>
#include <sys/mman.h>

#include <algorithm>

#include "io_life.h"

namespace fuzz {

Life::Life(Random &generator, uint64_t execution, uint32_t kind) : random(generator), number(execution) {
    options.kind = kind;
    options.depth = static_cast<uint32_t>(1 + random.below(random.one_in(2) ? 4 : 40));
    options.block = 4096 << random.below(5);
    options.threads = static_cast<uint32_t>(1 + random.below(4));
    options.bounces = static_cast<uint32_t>(1 + random.below(random.one_in(2) ? 1 : 8));
    if (!random.one_in(4)) draw_faults();
    for (uint64_t n = 1 + random.below(2); n; --n) files.emplace_back(!random.one_in(3), random.one_in(4) ? 4 : 1);
    void *base =
        mmap(nullptr, MOST_TRANSFERS * SLOT_NBYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) std::abort();
    slots = static_cast<char *>(base);
}

Life::~Life() { munmap(slots, MOST_TRANSFERS * SLOT_NBYTES); }

void Life::draw_faults() {
    faulty = true;
    faults.seed = random.next();
    for (uint32_t *chance : {&faults.delay, &faults.shorten, &faults.interrupt, &faults.again, &faults.full})
        if (random.one_in(2)) *chance = static_cast<uint32_t>(random.below(30000));
    faults.delay_us = static_cast<uint32_t>(1 + random.below(400));
    const int errors[] = {EIO, ENOSPC, EDQUOT, EROFS};
    faults.fail_errno = random.pick(errors);
    if (random.one_in(3)) faults.fail = static_cast<uint32_t>(random.below(8000));
    faults.fail_file = -1;
    if (random.one_in(3)) {
        faults.fail_op = static_cast<uint32_t>(random.below(3));
        faults.fail_file = static_cast<int32_t>(random.below(3)) - 1;
        faults.fail_count = random.one_in(2) ? -1 : static_cast<int32_t>(random.below(4));
        faults.fail_begin = random.below(FILE_NBYTES);
        faults.fail_end = faults.fail_begin + random.below(FILE_NBYTES / 4);
    }
}

bool Life::begin() {
    if (faulty) options.faults = &faults;
    const int refused = zk_io_open(&options, &engine);
    if (refused > 0 && options.kind == ZK_IO_URING) return false;
    expect(refused == ZK_OK, "no engine", refused);
    for (ScratchFile &file : files) add(file);
    if (!random.one_in(3)) zk_io_memory(engine, slots, some_slots());
    return true;
}

void Life::add(ScratchFile &file) {
    const int error = zk_io_file(engine, file.fd, file.memory_align, file.offset_align, &file.number);
    expect(error == ZK_OK, "a file was refused", error);
}

Transfer &Life::draw(Chain &chain, bool reads_only) {
    ScratchFile &file = *chain.file;
    transfers.emplace_back();
    Transfer &transfer = transfers.back();
    zk_io_request &request = transfer.request;
    transfer.file = &file;
    request.op = !reads_only && random.one_in(2) ? ZK_IO_WRITE : ZK_IO_READ;
    request.flags = random.one_in(3) ? ZK_IO_PADDED : 0;
    request.file = file.number;
    request.offset = chain.begin + random.below((chain.end - chain.begin) / file.offset_align) * file.offset_align;
    const uint64_t room = std::min(chain.end - request.offset, MOST_NBYTES);
    request.nbytes = random.one_in(12) ? 0 : random.one_in(3) ? room : 1 + random.below(room);
    transfer.padded = up(request.nbytes, file.offset_align);
    const bool padded = request.flags & ZK_IO_PADDED;
    const uint64_t lead = random.one_in(2) ? 0 : random.one_in(2) ? 64 * random.below(64) : random.below(4096);
    char *slot = random.one_in(2) ? slots + (transfers.size() - 1) * SLOT_NBYTES : nullptr;
    transfer.memory.reset(new Memory(slot, lead, request.nbytes, padded ? transfer.padded : request.nbytes));
    request.address = transfer.memory->address;
    transfer.bounces = request.nbytes && (reinterpret_cast<uint64_t>(request.address) % file.memory_align ||
                                          (!padded && transfer.padded != request.nbytes));
    if (request.op == ZK_IO_WRITE) {
        transfer.memory->fill(random);
        transfer.written.assign(transfer.padded, 0);
        // What is behind the span reaches the file where it moves with the span; in a bounce buffer there are zeros.
        const bool as_it_lies = padded && !transfer.bounces;
        std::copy_n(transfer.memory->address, as_it_lies ? transfer.padded : request.nbytes, transfer.written.begin());
    }
    return transfer;
}

// Orders a transfer behind those of its span: by `after`, and by waiting where there is more than one.
void Life::link(Chain &chain, Transfer &transfer) {
    const bool reads = transfer.request.op == ZK_IO_READ;
    if (!chain.last.empty()) {
        if (reads && chain.last[0]->request.op == ZK_IO_READ && random.one_in(2)) {
            transfer.request.after = chain.last[0]->request.after;
            chain.last.push_back(&transfer);
            return;
        }
        const bool by_waiting = random.one_in(6);
        if (by_waiting || chain.last.size() > 1) flush();
        for (size_t i = by_waiting ? 0 : 1; i < chain.last.size(); ++i) wait(*chain.last[i], true);
        if (!by_waiting) transfer.request.after = &chain.last[0]->request;
    }
    chain.last.assign(1, &transfer);
}

void Life::flush() {
    if (batch.empty()) return;
    if (random.one_in(3)) refuse_bad();
    int64_t bad = -7;
    const int error = zk_io_submit(engine, batch.data(), static_cast<int64_t>(batch.size()), &bad);
    expect(error == ZK_OK, "a good batch was refused", bad);
    counts.accepted += batch.size();
    batch.clear();
}

void Life::wait(Transfer &transfer, bool until_done) {
    zk_io_request &request = transfer.request;
    const int64_t ns = until_done ? -1 : random.one_in(2) ? 0 : static_cast<int64_t>(random.below(200000));
    const int code = zk_io_wait(&request, ns);
    if (code == ETIMEDOUT && !until_done) return;
    expect(code == ZK_OK, "a wait that went wrong", code);
    expect(request.state == ZK_IO_DONE, "a wait before the end", request.state);
    if (request.after)
        expect(__atomic_load_n(&request.after->state, __ATOMIC_ACQUIRE) == ZK_IO_DONE, "overtook `after`");
}

bool Life::must_fail(const Transfer &transfer) const {
    const zk_io_request &request = transfer.request;
    if (!faults.fail_count || (faults.fail_op && faults.fail_op != request.op)) return false;
    if (faults.fail_file >= 0 && faults.fail_file != request.file) return false;
    return request.nbytes && request.offset < faults.fail_end && request.offset + transfer.padded > faults.fail_begin &&
           faults.fail_begin < faults.fail_end;
}

bool Life::may_fail(const Transfer &transfer) const {
    return transfer.request.nbytes && (faults.fail || must_fail(transfer));
}

void Life::check_state(const Transfer &transfer) const {
    const int32_t state = __atomic_load_n(&transfer.request.state, __ATOMIC_ACQUIRE);
    expect(state == ZK_IO_DONE, "a request that has not ended", state);
}

// One transfer that has ended, in the order of its span.
void Life::check(const Transfer &transfer, uint64_t file_end) {
    const zk_io_request &request = transfer.request;
    ScratchFile &file = *transfer.file;
    const uint64_t end = request.offset + request.nbytes;
    const bool cut_off = request.op == ZK_IO_READ && end > file_end && request.nbytes;
    check_state(transfer);
    expect(transfer.memory->guards_are_whole(), "memory beside the span was written to", request.op);
    if (request.error) {
        const bool justified =
            (request.error == faults.fail_errno && may_fail(transfer)) || (request.error == ENODATA && cut_off);
        expect(justified, "an error without a reason", request.error);
        expect(request.error_at >= request.offset && request.error_nbytes &&
                   request.error_at + request.error_nbytes <= end,
               "an error elsewhere", static_cast<int64_t>(request.error_at));
        all_well = false;
    } else {
        expect(!cut_off, "read beyond the end of the file", static_cast<int64_t>(request.offset));
        expect(faults.fail_count >= 0 || !must_fail(transfer), "a failure was lost");
        expect((request.bounced != 0) == transfer.bounces, "bounced, or not, without a reason", request.bounced);
        (request.op == ZK_IO_WRITE ? written : read) += transfer.padded;
        const bool astray = reinterpret_cast<uint64_t>(request.address) % file.memory_align;
        if (transfer.bounces) bounced += astray ? request.nbytes : request.nbytes % file.offset_align;
    }
    if (request.op == ZK_IO_WRITE) {
        expect(!request.nbytes || !std::memcmp(request.address, transfer.written.data(), request.nbytes),
               "a source was changed");
        for (uint64_t i = 0; i < transfer.padded; ++i) {
            file.bytes[request.offset + i] = static_cast<unsigned char>(transfer.written[i]);
            file.known[request.offset + i] = !request.error;
        }
    } else if (!request.error) {
        const unsigned char *got = static_cast<unsigned char *>(request.address);
        for (uint64_t i = 0; i < request.nbytes; ++i)
            if (file.known[request.offset + i] && got[i] != file.bytes[request.offset + i])
                fail_with("wrong data at", static_cast<int64_t>(request.offset + i));
    }
}

void Life::finish(uint64_t file_end) {
    flush();
    if (random.one_in(8)) {  // requests in flight end first
        expect(zk_io_close(engine) == ZK_OK, "no close");
        for (const Transfer &transfer : transfers) check(transfer, file_end);
        transfers.clear();
        expect(begin(), "no second engine");
        read = written = bounced = 0;
        all_well = true;
    }
    if (random.one_in(8)) {  // a file is forgotten when its requests have ended
        ScratchFile &file = files[random.below(files.size())];
        expect(zk_io_forget_file(engine, file.number) == ZK_OK, "a file was not forgotten", file.number);
        for (const Transfer &transfer : transfers)
            if (transfer.file == &file) check_state(transfer);
        add(file);
    }
    for (Transfer &transfer : transfers)
        if (random.one_in(2)) wait(transfer, random.one_in(2));
    for (Transfer &transfer : transfers) wait(transfer, true);
    for (const Transfer &transfer : transfers) check(transfer, file_end);
    transfers.clear();
    zk_io_stats stats;
    expect(zk_io_stats_of(engine, &stats) == ZK_OK && !stats.pending, "pending", static_cast<int64_t>(stats.pending));
    if (all_well) {
        expect(stats.read_nbytes == read, "read more or less than asked", static_cast<int64_t>(stats.read_nbytes));
        expect(stats.written_nbytes == written, "wrote more or less", static_cast<int64_t>(stats.written_nbytes));
        expect(stats.bounced_nbytes == bounced, "copied more or less", static_cast<int64_t>(stats.bounced_nbytes));
    }
}

void Life::round() {
    std::vector<Chain> chains;
    for (ScratchFile &file : files) {
        uint64_t begin = 0;
        for (int i = 0; i < SPANS; ++i) {
            const uint64_t some = up(begin + 1 + random.below(FILE_NBYTES / SPANS / 2), file.offset_align);
            const uint64_t end = i == SPANS - 1 ? FILE_NBYTES : some;
            chains.push_back({&file, begin, end, {}});
            begin = end;
        }
    }
    for (uint64_t n = 1 + random.below(MOST_TRANSFERS); n; --n) {
        Chain &chain = chains[random.below(random.one_in(2) ? chains.size() : 2)];
        Transfer &transfer = draw(chain, false);
        link(chain, transfer);
        batch.push_back(&transfer.request);
        if (random.one_in(4)) flush();
        if (random.one_in(6)) {
            flush();
            wait(transfers[random.below(transfers.size())], random.one_in(3));
        }
    }
    finish(FILE_NBYTES);
}

// Reads of files that somebody has cut off.
void Life::short_round() {
    const uint64_t end = random.below(FILE_NBYTES);
    for (ScratchFile &file : files) file.cut_off(end);
    for (uint64_t n = 1 + random.below(MOST_TRANSFERS); n; --n) {
        ScratchFile &file = files[random.below(files.size())];
        Chain anywhere{&file, 0, FILE_NBYTES, {}};
        batch.push_back(&draw(anywhere, true).request);
    }
    finish(end);
    for (ScratchFile &file : files) {
        file.cut_off(FILE_NBYTES);
        std::fill(file.bytes.begin() + static_cast<int64_t>(end), file.bytes.end(), 0);
        std::fill(file.known.begin() + static_cast<int64_t>(end), file.known.end(), 1);
    }
}

namespace {

bool live(Random &random, uint64_t number, uint32_t kind, Counts *counts) {
    Life life(random, number, kind);
    if (!life.begin()) return false;
    for (uint64_t rounds = 1 + random.below(6); rounds; --rounds) {
        if (random.one_in(6))
            life.short_round();
        else
            life.round();
        if (random.one_in(3)) life.meddle();
    }
    life.expect(zk_io_close(life.engine) == ZK_OK, "no close");
    for (const ScratchFile &file : life.files) {
        const int64_t wrong = file.first_wrong_byte();
        life.expect(wrong < 0, "the file holds something else at", wrong);
    }
    counts->accepted += life.counts.accepted;
    counts->refused += life.counts.refused;
    return true;
}

}  // namespace

// An execution here is a transfer.
Counts fuzz_io(Random &random, uint64_t executions) {
    Counts counts;
    bool uring = true;
    for (uint64_t number = 0; counts.accepted < executions; ++number) {
        if (uring && !live(random, number, ZK_IO_URING, &counts)) {
            std::printf("io_uring is refused on this machine: the thread engine alone is tried\n");
            uring = false;
        }
        live(random, number, ZK_IO_THREADS, &counts);
    }
    return counts;
}

}  // namespace fuzz
