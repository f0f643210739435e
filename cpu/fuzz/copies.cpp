// zk_spans over a framework of its own, and what joins, parts and sorts its rows, against the plainest code for each.
#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "fuzz.h"

namespace fuzz {
namespace {

struct Tensor {
    void *address;
    int64_t numel;
    int32_t dtype, layout, type, index;
    bool contiguous, negated, conjugated, refuses;
};
struct Object {  // whose cell stands behind other words
    uint64_t head[2];
    const void *tensor;
};
constexpr int64_t CELL = offsetof(Object, tensor);

const Tensor *in(const void *const *cell) { return static_cast<const Tensor *>(*cell); }
int32_t address(const void *const *cell, void **to) { return *to = in(cell)->address, in(cell)->refuses; }
int32_t layout(const void *const *cell, int32_t *to) { return *to = in(cell)->layout, 0; }
int32_t dtype(const void *const *cell, int32_t *to) { return *to = in(cell)->dtype, 0; }
int32_t numel(const void *const *cell, int64_t *to) { return *to = in(cell)->numel, 0; }
int32_t is_contiguous(const void *const *cell, bool *yes) { return *yes = in(cell)->contiguous, 0; }
int32_t device_type(const void *const *cell, int32_t *to) { return *to = in(cell)->type, 0; }
int32_t device_index(const void *const *cell, int32_t *to) { return *to = in(cell)->index, 0; }
size_t itemsize(int32_t kind) { return kind == 6 ? 4 : 2; }
bool is_negated(const void *const *cell) { return in(cell)->negated; }
bool is_conjugated(const void *const *cell) { return in(cell)->conjugated; }

constexpr zk_pair_calls CALLS = {address,     layout,       dtype,    numel,      is_contiguous,
                                 device_type, device_index, itemsize, is_negated, is_conjugated};

struct Row {
    uint64_t to, from, nbytes;
};
static_assert(sizeof(Row) == 24);
uint64_t *words(std::vector<Row> &rows) { return rows.empty() ? nullptr : &rows[0].to; }
bool same(const std::vector<Row> &one, const std::vector<Row> &other) {
    return one.size() == other.size() && (one.empty() || !std::memcmp(one.data(), other.data(), 24 * one.size()));
}

// Makes one tensor unfit; returns whether a list that was checked before takes it all the same.
bool spoil(Random &random, Tensor &tensor) {
    switch (random.below(9)) {
        case 0:
            return tensor.layout = 1, true;
        case 1:
            return tensor.type = 7, true;
        case 2:
            return tensor.index = 5, true;
        case 3:
            return tensor.contiguous = false, true;
        case 4:
            return tensor.negated = true, true;
        case 5:
            return tensor.conjugated = true, true;
        case 6:
            return tensor.dtype = 15, true;
        case 7:
            return ++tensor.numel, true;
        default:
            return tensor.refuses = true, false;
    }
}

void read_lists(Random &random, uint64_t number, bool *refused) {
    const size_t count = random.below(40);
    const int64_t all = static_cast<int64_t>(count);
    const int32_t host = static_cast<int32_t>(random.below(3));
    std::vector<std::unique_ptr<Tensor>> tensors;
    std::vector<std::unique_ptr<Object>> objects;
    std::vector<const void *> sides[2];
    std::vector<Row> expected(count), found(count);
    int64_t wrong = all;
    for (size_t i = 0; i < count; ++i) {
        const int64_t elements = static_cast<int64_t>(random.below(9));
        for (int side = 0; side < 2; ++side) {
            const int32_t type = side == (host == ZK_TARGETS ? 0 : 1) ? 0 : 1;  // of the device, but for host memory
            void *place = reinterpret_cast<void *>(uintptr_t{64} * (1 + random.below(1000)));
            tensors.push_back(
                std::make_unique<Tensor>(Tensor{place, elements, 6, 0, type, type - 1, true, false, false, false}));
            objects.push_back(std::make_unique<Object>(Object{{1, 2}, tensors.back().get()}));
            sides[side].push_back(objects.back().get());
        }
        Tensor &target = *tensors[2 * i], &source = *tensors[2 * i + 1];
        if (random.one_in(60)) {
            Tensor &one = random.one_in(2) ? target : source;
            const bool passes = spoil(random, one) && host == ZK_UNASKED;
            if (!passes && wrong == all) wrong = static_cast<int64_t>(i);
        }
        expected[i] = {reinterpret_cast<uint64_t>(target.address), reinterpret_cast<uint64_t>(source.address),
                       static_cast<uint64_t>(source.numel) * itemsize(source.dtype)};
    }
    const zk_place on_host = {0, -1}, on_device = {1, 0};
    const bool down = host == ZK_TARGETS;
    zk_pairs list = {sides[0].data(),
                     sides[1].data(),
                     all,
                     CELL,
                     0,
                     0,
                     down ? on_host : on_device,
                     down ? on_device : on_host,
                     0,
                     host};
    int64_t at = 0;
    while ((at = zk_spans(&CALLS, &list, at, words(found))) >= 0 && at < wrong) {  // its host memory is not known
        const Row &row = expected[static_cast<size_t>(at)];
        const uint64_t there = down ? row.to : row.from;
        if (host == ZK_UNASKED || !row.nbytes || (there >= list.begin && there < list.end))
            fail("zk_spans", number, "stopped at a pair that is known", at);
        list.begin = there;
        list.end = there + 64 * random.below(4) + 1;
    }
    if (at != wrong) fail("zk_spans", number, "stopped at the wrong pair", at);
    found.resize(static_cast<size_t>(at));
    expected.resize(static_cast<size_t>(at));
    if (!same(found, expected)) fail("zk_spans", number, "made other rows", at);
    if (zk_spans(nullptr, &list, 0, words(found)) != ZK_E_NULL || zk_spans(&CALLS, nullptr, 0, nullptr) != ZK_E_NULL)
        fail("zk_spans", number, "took null", 0);
    *refused = wrong != all;
}

void arrange(Random &random, uint64_t number) {
    std::vector<Row> rows;
    uint64_t to = 4096, from = 1 << 20;
    for (uint64_t left = random.below(40); left > 0; --left) {
        const uint64_t nbytes = random.below(5) * (random.one_in(2) ? 16 : 3);
        rows.push_back({to, from, nbytes});
        to += nbytes + (random.one_in(3) ? random.below(40) : 0);
        from += nbytes + (random.one_in(3) ? random.below(40) : 0);
    }
    std::vector<Row> joined, out(rows.size()), parted, sorted;
    for (const Row &row : rows) {
        if (!row.nbytes) continue;
        const bool follows = !joined.empty() && joined.back().to + joined.back().nbytes == row.to &&
                             joined.back().from + joined.back().nbytes == row.from;
        if (follows)
            joined.back().nbytes += row.nbytes;
        else
            joined.push_back(row);
    }
    const int64_t count = static_cast<int64_t>(rows.size());
    std::vector<Row> made = out;
    made.resize(static_cast<size_t>(zk_join_spans(words(rows), count, words(out))));
    std::copy_n(out.begin(), made.size(), made.begin());
    if (!same(made, joined)) fail("zk_join_spans", number, "made other rows", 0);
    const uint64_t nbytes = random.below(50);
    int64_t small = 0;
    for (const bool below : {true, false})
        for (const Row &row : rows)
            if ((row.nbytes < nbytes) == below) parted.push_back(row), small += below;
    if (zk_part_spans(words(rows), count, nbytes, words(out)) != small || !same(out, parted))
        fail("zk_part_spans", number, "made other rows", small);
    std::map<int, std::vector<Row>> kinds;
    for (const Row &row : rows) {
        const uint64_t place = row.to | row.from;
        kinds[place % 16 == 0 ? 0 : place % 4 == 0 ? 1 : place % 2 == 0 ? 2 : 3].push_back(row);
    }
    int64_t counts[ZK_SPAN_KINDS];
    if (zk_sort_spans(words(rows), count, words(out), counts) != count) fail("zk_sort_spans", number, "stopped", 0);
    for (int kind = 0; kind < ZK_SPAN_KINDS; ++kind) {
        if (counts[kind] != static_cast<int64_t>(kinds[kind].size())) fail("zk_sort_spans", number, "counted", kind);
        sorted.insert(sorted.end(), kinds[kind].begin(), kinds[kind].end());
    }
    if (!same(out, sorted)) fail("zk_sort_spans", number, "made other rows", 0);
    if (zk_join_spans(nullptr, 1, nullptr) != ZK_E_NULL || zk_part_spans(nullptr, 1, 1, nullptr) != ZK_E_NULL ||
        zk_sort_spans(nullptr, 1, nullptr, counts) != ZK_E_NULL)
        fail("zk_sort_spans", number, "took null", 0);
}

}  // namespace

Counts fuzz_copies(Random &random, uint64_t executions) {
    Counts counts;
    for (uint64_t i = 0; i < executions; ++i) {
        bool refused = false;
        read_lists(random, i, &refused);
        arrange(random, i);
        ++(refused ? counts.refused : counts.accepted);
    }
    return counts;
}

}  // namespace fuzz
