// What the disk engine has to refuse, in the middle of its life; and files and memory that go and come back.
#include "io_life.h"

namespace fuzz {

// The batch that waits, with something in it that is not possible: it is named, and nothing of the batch is queued.
void Life::refuse_bad() {
    zk_io_request wrong = *batch[random.below(batch.size())], *entry = &wrong;
    wrong.after = nullptr;
    switch (random.below(9)) {
        case 0:
            wrong.op = static_cast<uint32_t>(random.one_in(2) ? 0 : 3 + random.below(1000));
            break;
        case 1:
            wrong.flags |= 2u << random.below(31);
            break;
        case 2:
            wrong.file = static_cast<int32_t>(random.one_in(2) ? -1 - random.below(9) : 3 + random.below(1 << 20));
            break;
        case 3:
            wrong.nbytes = 1ull << (62 + random.below(2));
            break;
        case 4:
            wrong.offset = 1ull << (62 + random.below(2));
            break;
        case 5:
            wrong.address = nullptr;
            wrong.nbytes |= 1;
            break;
        case 6:
            entry = nullptr;
            break;
        case 7:
            wrong.state = random.one_in(2) ? ZK_IO_PENDING : ZK_IO_WAITED;
            break;
        default:
            wrong.file = batch[0]->file;
            wrong.offset = 1;
            if (files[0].offset_align == 1 || files.back().offset_align == 1) entry = batch[0];  // twice the same
            break;
    }
    std::vector<zk_io_request *> all = batch;
    const size_t at = entry == batch[0] ? all.size() : random.below(all.size() + 1);
    all.insert(all.begin() + static_cast<int64_t>(at), entry);
    int64_t bad = -7;
    const int error = zk_io_submit(engine, all.data(), static_cast<int64_t>(all.size()), &bad);
    expect(error == ZK_E_VALUE || error == ZK_E_NULL, "a bad batch was taken", error);
    expect(bad == static_cast<int64_t>(at), "another request was named", bad);
    for (const zk_io_request *request : batch) expect(request->state == ZK_IO_IDLE, "a refused batch was queued");
    ++counts.refused;
}

// Between rounds: files and memory go and come back, and calls that make no sense are refused.
void Life::meddle() {
    if (random.one_in(2)) {
        ScratchFile &file = files[random.below(files.size())];
        const int32_t before = file.number;
        expect(zk_io_forget_file(engine, before) == ZK_OK, "a file was not forgotten", before);
        Chain chain{&file, 0, FILE_NBYTES, {}};
        zk_io_request *request = &draw(chain, true).request;
        int64_t bad = -7;
        expect(zk_io_submit(engine, &request, 1, &bad) == ZK_E_VALUE && !bad, "a forgotten file was read", before);
        expect(zk_io_forget_file(engine, before) == ZK_E_VALUE, "forgotten twice", before);
        transfers.clear();
        add(file);
        expect(file.number == before, "another number", file.number);
    }
    if (random.one_in(2)) {
        const int known = zk_io_forget_memory(engine, slots);
        expect(known == ZK_OK || known == ZK_E_VALUE, "memory was not forgotten", known);
        expect(zk_io_forget_memory(engine, slots) == ZK_E_VALUE, "forgotten twice");
        if (random.one_in(2)) zk_io_memory(engine, slots, some_slots());
    }
    zk_io_request idle{};
    int64_t bad = 0;
    int32_t place = 0;
    const int fd = files[0].fd;
    expect(zk_io_wait(&idle, -1) == ZK_E_VALUE && zk_io_wait(nullptr, 0) == ZK_E_NULL, "a wait for nothing");
    expect(zk_io_submit(engine, nullptr, 1, &bad) == ZK_E_NULL && zk_io_submit(engine, nullptr, 0, &bad) == ZK_OK,
           "null");
    expect(
        zk_io_submit(engine, nullptr, -1, &bad) == ZK_E_COUNT && zk_io_submit(nullptr, nullptr, 0, &bad) == ZK_E_NULL,
        "-1");
    expect(zk_io_file(engine, -1, 1, 1, &place) == ZK_E_VALUE && zk_io_file(engine, fd, 3, 1, &place) == ZK_E_VALUE,
           "file");
    expect(
        zk_io_file(engine, fd, 1, 1 << 20, &place) == ZK_E_VALUE && zk_io_file(engine, fd, 0, 1, &place) == ZK_E_VALUE,
        "align");
    expect(zk_io_memory(engine, nullptr, 1) == ZK_E_NULL && zk_io_memory(engine, slots, 0) == ZK_E_COUNT, "memory");
    zk_io *none = nullptr;
    zk_io_options wrong = options;
    switch (random.below(5)) {
        case 0:
            wrong.kind = 3;
            break;
        case 1:
            wrong.depth = random.one_in(2) ? 0 : 4097;
            break;
        case 2:
            wrong.block = random.one_in(3) ? 0 : random.one_in(2) ? 4097 : (1ull << 30) + 4096;
            break;
        case 3:
            wrong.bounces = random.one_in(2) ? 0 : 4097;
            break;
        default:
            wrong.kind = ZK_IO_THREADS;
            wrong.threads = random.one_in(2) ? 0 : 257;
    }
    expect(zk_io_open(&wrong, &none) < 0 && !none, "an engine of bad options");
    counts.refused += 14;
}

}  // namespace fuzz
