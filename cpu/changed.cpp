// The packed form of a delta: of each block of ZK_BLOCK elements how many changed, which, and their new words.

#include <cstring>

#include "work.h"

namespace {

constexpr int64_t LISTED = 16;  // from so many on a block's places are its bits

int64_t length_of(int64_t numel, int64_t base) { return numel - base < ZK_BLOCK ? numel - base : ZK_BLOCK; }
int64_t bytes_of(int64_t bits) { return (bits + 7) / 8; }
int64_t place_bytes(int64_t count, int64_t length) {
    return count == 0 || count == length ? 0 : count < LISTED ? count : bytes_of(length);
}

// The bits of one block in two words; what lies behind its end is 0.
struct BlockBits {
    uint64_t words[2] = {0, 0};

    BlockBits(const uint8_t *mask, int64_t length) {
        for (int64_t byte = 0; byte < bytes_of(length); ++byte)
            words[byte / 8] |= static_cast<uint64_t>(mask[byte]) << (byte % 8 * 8);
        for (int64_t w = 0; w < 2; ++w)
            if (length < 64 * (w + 1)) words[w] &= length <= 64 * w ? 0 : (1ull << (length - 64 * w)) - 1;
    }
    int64_t count() const { return __builtin_popcountll(words[0]) + __builtin_popcountll(words[1]); }
    template <class Each>
    void for_each(const Each &each) const {
        for (int w = 0; w < 2; ++w)
            for (uint64_t rest = words[w]; rest; rest &= rest - 1) each(64 * w + __builtin_ctzll(rest));
    }
};

template <class Word>
void pack(const uint8_t *mask, const Word *from, int64_t numel, uint8_t *places, Word *values) {
    for (int64_t base = 0; base < numel; base += ZK_BLOCK) {
        const int64_t length = length_of(numel, base);
        const BlockBits bits(mask + base / 8, length);
        const int64_t count = bits.count(), nbytes = place_bytes(count, length);
        bits.for_each([&](int64_t place) { *values++ = from[base + place]; });
        if (nbytes && count < LISTED) {
            bits.for_each([&](int64_t place) { *places++ = static_cast<uint8_t>(place); });
        } else {
            for (int64_t byte = 0; byte < nbytes; ++byte)
                *places++ = static_cast<uint8_t>(bits.words[byte / 8] >> (byte % 8 * 8));
        }
    }
}

// Whether places are those of a block: ascending, within it, as many as were counted.
bool fit(const uint8_t *places, int64_t count, int64_t length) {
    if (count < LISTED) {
        for (int64_t i = 0; i < count; ++i)
            if (places[i] >= length || (i > 0 && places[i] <= places[i - 1])) return false;
        return true;
    }
    return BlockBits(places, length).count() == count && (length % 8 == 0 || !(places[length / 8] >> length % 8));
}

int check(const uint8_t *counts, const uint8_t *places, int64_t nplaces, int64_t nvalues, int64_t numel) {
    for (int64_t base = 0; base < numel; base += ZK_BLOCK) {
        const int64_t length = length_of(numel, base), count = counts[base / ZK_BLOCK];
        const int64_t nbytes = place_bytes(count, length);
        if (count > length || (nplaces -= nbytes) < 0 || (nvalues -= count) < 0) return ZK_E_COUNT;
        if (nbytes && !fit(places, count, length)) return ZK_E_VALUE;
        places += nbytes;
    }
    return nplaces || nvalues ? ZK_E_COUNT : ZK_OK;
}

template <class Word>
void unpack(const uint8_t *counts, const uint8_t *places, const Word *values, int64_t numel, Word *to) {
    for (int64_t base = 0; base < numel; base += ZK_BLOCK) {
        const int64_t length = length_of(numel, base), count = counts[base / ZK_BLOCK];
        const int64_t nbytes = place_bytes(count, length);
        if (count == length) {
            std::memcpy(to + base, values, sizeof(Word) * static_cast<size_t>(count));
        } else if (count < LISTED) {
            for (int64_t i = 0; i < count; ++i) to[base + places[i]] = values[i];
        } else {
            const Word *next = values;
            BlockBits(places, length).for_each([&](int64_t place) { to[base + place] = *next++; });
        }
        places += nbytes;
        values += count;
    }
}

}  // namespace

extern "C" {

int zk_changed_count(const uint8_t *mask, int64_t numel, uint8_t *counts, int64_t *sizes) {
    if (numel < 0) return ZK_E_COUNT;
    if (!sizes || (numel && (!mask || !counts))) return ZK_E_NULL;
    sizes[0] = sizes[1] = 0;
    for (int64_t base = 0; base < numel; base += ZK_BLOCK) {
        const int64_t length = length_of(numel, base), count = BlockBits(mask + base / 8, length).count();
        counts[base / ZK_BLOCK] = static_cast<uint8_t>(count);
        sizes[0] += place_bytes(count, length);
        sizes[1] += count;
    }
    return ZK_OK;
}

int zk_changed_pack(const uint8_t *mask, const void *from, uint32_t dtype, int64_t numel, uint8_t *places,
                    void *values) {
    if (numel < 0) return ZK_E_COUNT;
    if (!zk::is_float(dtype)) return ZK_E_FORMAT;
    if (numel && (!mask || !from || !places || !values)) return ZK_E_NULL;
    if (dtype == ZK_F32)
        pack(mask, static_cast<const uint32_t *>(from), numel, places, static_cast<uint32_t *>(values));
    else
        pack(mask, static_cast<const uint16_t *>(from), numel, places, static_cast<uint16_t *>(values));
    return ZK_OK;
}

int zk_changed_unpack(const uint8_t *counts, const uint8_t *places, int64_t nplaces, const void *values,
                      int64_t nvalues, uint32_t dtype, int64_t numel, void *to) {
    if (numel < 0 || nplaces < 0 || nvalues < 0) return ZK_E_COUNT;
    if (!zk::is_float(dtype)) return ZK_E_FORMAT;
    if ((numel && (!counts || !to)) || (nplaces && !places) || (nvalues && !values)) return ZK_E_NULL;
    if (const int code = check(counts, places, nplaces, nvalues, numel)) return code;
    if (dtype == ZK_F32)
        unpack(counts, places, static_cast<const uint32_t *>(values), numel, static_cast<uint32_t *>(to));
    else
        unpack(counts, places, static_cast<const uint16_t *>(values), numel, static_cast<uint16_t *>(to));
    return ZK_OK;
}

}  // extern "C"
