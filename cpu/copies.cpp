// Lists of tensors that are copied, as rows of addresses and bytes: read in one call, joined, and sorted by who copies
// them.

#include "zerokern_cpu.h"

namespace {

constexpr int64_t AHEAD = 12;  // pairs whose objects are fetched while those before them are looked at
constexpr int64_t WORDS = 3;   // of a row: to where, from where, how many bytes

const void *const *cell_of(const void *object, int64_t cell) {
    return reinterpret_cast<const void *const *>(static_cast<const char *>(object) + cell);
}

void fetch(const void *place) {
    for (int64_t line = 0; line < 192; line += 64) __builtin_prefetch(static_cast<const char *>(place) + line);
}

// The objects of a pair, and, closer to their turn, what their cells point to.
void fetch_ahead(const zk_pairs &pairs, int64_t i) {
    const void *const *const lists[] = {pairs.targets, pairs.sources};
    for (const void *const *objects : lists) {
        if (i + 2 * AHEAD < pairs.count) __builtin_prefetch(cell_of(objects[i + 2 * AHEAD], pairs.cell));
        if (i + AHEAD < pairs.count) fetch(*cell_of(objects[i + AHEAD], pairs.cell));
    }
}

// Its memory holds what it means, element by element, on the device where it should be.
bool is_plain(const zk_pair_calls &ask, const void *const *cell, int32_t expected, const zk_place &place) {
    int32_t type = -1, index = -2, layout = -1;
    bool contiguous = false;
    if (ask.layout(cell, &layout) || layout != expected) return false;
    if (ask.device_type(cell, &type) || type != place.type) return false;
    if (ask.device_index(cell, &index) || index != place.index) return false;
    if (ask.is_contiguous(cell, &contiguous) || !contiguous) return false;
    return !ask.is_negated(cell) && !ask.is_conjugated(cell);
}

uint64_t *put(const uint64_t *row, uint64_t *to) {
    for (int64_t word = 0; word < WORDS; ++word) to[word] = row[word];
    return to + WORDS;
}

int kind_of(const uint64_t *row) {
    const uint64_t place = (row[0] | row[1]) & 15;
    return place == 0 ? 0 : place % 4 == 0 ? 1 : place % 2 == 0 ? 2 : 3;
}

}  // namespace

int64_t zk_spans(const zk_pair_calls *ask, const zk_pairs *pairs, int64_t first, uint64_t *rows) {
    if (!ask || !pairs || (pairs->count > 0 && (!pairs->targets || !pairs->sources || !rows))) return ZK_E_NULL;
    const zk_pairs &of = *pairs;
    for (int64_t i = first; i < of.count; ++i) {
        fetch_ahead(of, i);
        const void *const *target = cell_of(of.targets[i], of.cell);
        const void *const *source = cell_of(of.sources[i], of.cell);
        void *to = nullptr, *from = nullptr;
        int64_t numel = -1;
        int32_t dtype = -1;
        if (ask->address(target, &to) || ask->address(source, &from)) return i;
        if (ask->numel(source, &numel) || ask->dtype(source, &dtype)) return i;
        if (of.host != ZK_UNASKED) {
            int64_t other = -1;
            int32_t kind = -1;
            if (ask->numel(target, &other) || other != numel || ask->dtype(target, &kind) || kind != dtype) return i;
            if (!is_plain(*ask, target, of.layout, of.target) || !is_plain(*ask, source, of.layout, of.source))
                return i;
            const uint64_t there = reinterpret_cast<uint64_t>(of.host == ZK_TARGETS ? to : from);
            if (numel && (there < of.begin || there >= of.end)) return i;
        }
        uint64_t *row = rows + WORDS * i;
        row[0] = reinterpret_cast<uint64_t>(to);
        row[1] = reinterpret_cast<uint64_t>(from);
        row[2] = static_cast<uint64_t>(numel) * ask->itemsize(dtype);
    }
    return of.count;
}

int64_t zk_join_spans(const uint64_t *rows, int64_t count, uint64_t *out) {
    if (count > 0 && (!rows || !out)) return ZK_E_NULL;
    uint64_t *end = out;
    for (const uint64_t *row = rows; row != rows + WORDS * count; row += WORDS) {
        if (!row[2]) continue;
        uint64_t *last = end == out ? out : end - WORDS;
        if (end != out && row[0] == last[0] + last[2] && row[1] == last[1] + last[2])
            last[2] += row[2];
        else
            end = put(row, end);
    }
    return (end - out) / WORDS;
}

int64_t zk_part_spans(const uint64_t *rows, int64_t count, uint64_t nbytes, uint64_t *out) {
    if (count > 0 && (!rows || !out)) return ZK_E_NULL;
    int64_t small = 0;
    for (int64_t i = 0; i < count; ++i) small += rows[WORDS * i + 2] < nbytes;
    uint64_t *ends[2] = {out, out + WORDS * small};
    for (const uint64_t *row = rows; row != rows + WORDS * count; row += WORDS) {
        uint64_t *&end = ends[row[2] >= nbytes];
        end = put(row, end);
    }
    return small;
}

int64_t zk_sort_spans(const uint64_t *rows, int64_t count, uint64_t *out, int64_t *counts) {
    if (!counts || (count > 0 && (!rows || !out))) return ZK_E_NULL;
    for (int kind = 0; kind < ZK_SPAN_KINDS; ++kind) counts[kind] = 0;
    for (int64_t i = 0; i < count; ++i) ++counts[kind_of(rows + WORDS * i)];
    uint64_t *ends[ZK_SPAN_KINDS] = {out};
    for (int kind = 1; kind < ZK_SPAN_KINDS; ++kind) ends[kind] = ends[kind - 1] + WORDS * counts[kind - 1];
    for (const uint64_t *row = rows; row != rows + WORDS * count; row += WORDS) {
        uint64_t *&end = ends[kind_of(row)];
        end = put(row, end);
    }
    return count;
}
