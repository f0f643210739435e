// zk_changed_count, zk_changed_pack and zk_changed_unpack against the definition of the packed form, a bit at a time;
// and packed forms that somebody has spoilt, which are refused, or are those of another change, and then written as
// such.
#include "fuzz.h"

namespace fuzz {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr int64_t LISTED = 16;  // a block with fewer changed elements lists their places

int64_t length_of(int64_t numel, int64_t base) { return numel - base < ZK_BLOCK ? numel - base : ZK_BLOCK; }

bool bit_of(const uint8_t *bits, int64_t i) { return bits[i / 8] >> (i % 8) & 1; }

struct Packed {
    Bytes counts, places, values;
};

Packed packed_of(const uint8_t *mask, const char *from, int64_t width, int64_t numel) {
    Packed packed;
    for (int64_t base = 0; base < numel; base += ZK_BLOCK) {
        const int64_t length = length_of(numel, base);
        Bytes listed, bits(static_cast<size_t>((length + 7) / 8));
        for (int64_t i = 0; i < length; ++i) {
            if (!bit_of(mask, base + i)) continue;
            listed.push_back(static_cast<uint8_t>(i));
            bits[static_cast<size_t>(i / 8)] |= static_cast<uint8_t>(1 << i % 8);
            packed.values.insert(packed.values.end(), from + (base + i) * width, from + (base + i + 1) * width);
        }
        const int64_t count = static_cast<int64_t>(listed.size());
        packed.counts.push_back(static_cast<uint8_t>(count));
        if (count == 0 || count == length) continue;
        const Bytes &places = count < LISTED ? listed : bits;
        packed.places.insert(packed.places.end(), places.begin(), places.end());
    }
    return packed;
}

// Writes what is packed, and returns the code that zk_changed_unpack has for it.
int unpacked(const Packed &packed, int64_t width, int64_t numel, char *to) {
    size_t place = 0, value = 0;
    for (int64_t base = 0; base < numel; base += ZK_BLOCK) {
        const int64_t length = length_of(numel, base), count = packed.counts[static_cast<size_t>(base / ZK_BLOCK)];
        if (count > length) return ZK_E_COUNT;
        const size_t nplaces = count == 0 || count == length ? 0
                               : count < LISTED              ? static_cast<size_t>(count)
                                                             : static_cast<size_t>((length + 7) / 8);
        const size_t nvalues = static_cast<size_t>(count * width);
        if (packed.places.size() - place < nplaces || packed.values.size() - value < nvalues) return ZK_E_COUNT;
        std::vector<int64_t> changed;
        for (int64_t i = 0; i < length && !nplaces && count; ++i) changed.push_back(i);
        for (size_t i = 0; i < nplaces; ++i) {
            const uint8_t byte = packed.places[place + i];
            if (count < LISTED) changed.push_back(byte);
            for (int64_t bit = 0; bit < 8 && count >= LISTED; ++bit)
                if (byte >> bit & 1) changed.push_back(8 * static_cast<int64_t>(i) + bit);
        }
        if (static_cast<int64_t>(changed.size()) != count) return ZK_E_VALUE;
        for (size_t i = 0; i < changed.size(); ++i)
            if (changed[i] >= length || (i && changed[i] <= changed[i - 1])) return ZK_E_VALUE;
        for (size_t i = 0; i < changed.size(); ++i)
            std::memcpy(to + (base + changed[i]) * width, &packed.values[value + i * static_cast<size_t>(width)],
                        static_cast<size_t>(width));
        place += nplaces;
        value += nvalues;
    }
    return place == packed.places.size() && value == packed.values.size() ? ZK_OK : ZK_E_COUNT;
}

// None, all, few or any elements of a block, and what there was behind the last one.
void fill_mask(Random &random, Buffer &mask) {
    for (int64_t i = 0; i < mask.nbytes; ++i) {
        static uint64_t style = 0;
        if (i % (ZK_BLOCK / 8) == 0) style = random.below(5);
        const uint8_t any = static_cast<uint8_t>(random.next() >> 24);
        const uint8_t few = random.one_in(4) ? static_cast<uint8_t>(1 << random.below(8)) : 0;
        mask.data()[i] = static_cast<char>(style == 0 ? 0 : style == 1 ? 0xFF : style == 2 ? few : any);
    }
}

void spoil(Random &random, Bytes &bytes, size_t width) {
    if (random.one_in(2) && !bytes.empty()) {
        bytes[random.below(bytes.size())] = static_cast<uint8_t>(random.one_in(2) ? random.below(20) : random.next());
    } else if (random.one_in(2) && bytes.size() >= width) {
        bytes.erase(bytes.begin(), bytes.begin() + static_cast<int64_t>(width));
    } else {
        bytes.insert(bytes.begin(), width, static_cast<uint8_t>(random.next()));
    }
}

bool holds(const Buffer &buffer, const Bytes &bytes) {
    return static_cast<size_t>(buffer.nbytes) == bytes.size() &&
           (bytes.empty() || std::memcmp(buffer.data(), bytes.data(), bytes.size()) == 0);
}

// What a caller has received: nothing lies behind it.
Buffer received(Random &random, Kind kind, const Bytes &bytes) {
    Buffer buffer(kind, static_cast<int64_t>(bytes.size()) / width_of(kind), some_offset(random, kind));
    if (!bytes.empty()) std::memcpy(buffer.data(), bytes.data(), bytes.size());
    return buffer;
}

uint8_t *bytes_of(const Buffer &buffer) { return reinterpret_cast<uint8_t *>(buffer.data()); }

void unpack_as_defined(Random &random, const Packed &packed, uint32_t dtype, const Buffer &before, uint64_t execution) {
    const int64_t width = width_of(before.kind), numel = before.nbytes / width;
    Buffer to(before), expected(before);
    const Buffer counts = received(random, Kind::bytes, packed.counts);
    const Buffer places = received(random, Kind::bytes, packed.places);
    const Buffer values = received(random, before.kind, packed.values);
    const int right = unpacked(packed, width, numel, expected.data());
    const int code = zk_changed_unpack(bytes_of(counts), bytes_of(places), places.nbytes, values.data(),
                                       values.nbytes / width, dtype, numel, to.data());
    if (code != right) fail("zk_changed_unpack", execution, "not the definition's code, but", code);
    const Buffer &result = right == ZK_OK ? expected : before;
    if (to.nbytes && std::memcmp(to.data(), result.data(), static_cast<size_t>(to.nbytes)) != 0)
        fail("zk_changed_unpack", execution, "wrong words, or written although refused; code", code);
}

}  // namespace

Counts fuzz_changed(Random &random, uint64_t executions) {
    const uint32_t dtypes[] = {ZK_F32, ZK_BF16, ZK_F16};
    Counts counted;
    for (uint64_t i = 0; i < executions; ++i) {
        const uint32_t dtype = random.pick(dtypes);
        const Kind kind = kind_of(dtype);
        const int64_t numel = some_numel(random) * (random.one_in(16) ? 9 : 1), width = width_of(kind);
        Buffer mask(Kind::bytes, (numel + 7) / 8, some_offset(random, Kind::bytes));
        Buffer from(kind, numel, some_offset(random, kind)), before(kind, numel, some_offset(random, kind));
        fill_mask(random, mask);
        from.fill(random);
        before.fill(random);
        const Packed right = packed_of(bytes_of(mask), from.data(), width, numel);

        Buffer counts(Kind::bytes, (numel + ZK_BLOCK - 1) / ZK_BLOCK, some_offset(random, Kind::bytes));
        int64_t sizes[] = {-1, -1};
        if (zk_changed_count(bytes_of(mask), numel, bytes_of(counts), sizes) != ZK_OK || !holds(counts, right.counts))
            fail("zk_changed_count", i, "not the definition's counts, of elements", numel);
        const size_t nplaces = static_cast<size_t>(sizes[0]), nvalues = static_cast<size_t>(sizes[1] * width);
        if (nplaces != right.places.size() || nvalues != right.values.size())
            fail("zk_changed_count", i, "not the definition's sizes, but", sizes[0]);
        Buffer places(Kind::bytes, sizes[0], some_offset(random, Kind::bytes));
        Buffer values(kind, sizes[1], some_offset(random, kind));
        if (zk_changed_pack(bytes_of(mask), from.data(), dtype, numel, bytes_of(places), values.data()) != ZK_OK ||
            !holds(places, right.places) || !holds(values, right.values))
            fail("zk_changed_pack", i, "not the definition's form, of elements", numel);
        unpack_as_defined(random, right, dtype, before, i);
        ++counted.accepted;
        if (!random.one_in(2)) continue;

        Packed wrong = right;
        for (uint64_t times = 1 + random.below(3); times; --times) {
            const uint64_t what = random.below(4);
            if (what == 0 && !wrong.counts.empty())
                wrong.counts[random.below(wrong.counts.size())] = static_cast<uint8_t>(random.below(140));
            else if (what == 1)
                spoil(random, wrong.values, static_cast<size_t>(width));
            else
                spoil(random, wrong.places, 1);
        }
        unpack_as_defined(random, wrong, dtype, before, i);
        const uint64_t how = random.below(6);
        const int64_t few = how == 0 ? -1 - numel : numel;
        const uint32_t other = how == 1 ? 0xFFu : dtype;
        if (how < 2 &&
            zk_changed_pack(bytes_of(mask), from.data(), other, few, bytes_of(places), values.data()) == ZK_OK)
            fail("zk_changed_pack", i, "spoilt arguments were accepted", static_cast<int64_t>(how));
        if (how == 2 && numel && zk_changed_count(nullptr, numel, bytes_of(counts), sizes) == ZK_OK)
            fail("zk_changed_count", i, "a null mask was accepted", numel);
        if (how == 3 && numel &&
            zk_changed_pack(bytes_of(mask), nullptr, dtype, numel, bytes_of(places), values.data()) == ZK_OK)
            fail("zk_changed_pack", i, "null values were accepted", numel);
        if (how == 4 && zk_changed_unpack(bytes_of(counts), bytes_of(places), -1, values.data(), sizes[1], dtype, numel,
                                          before.data()) == ZK_OK)
            fail("zk_changed_unpack", i, "fewer places than none were accepted", numel);
        if (how == 5 && sizes[1] &&
            zk_changed_unpack(bytes_of(counts), bytes_of(places), sizes[0], nullptr, sizes[1], dtype, numel,
                              before.data()) == ZK_OK)
            fail("zk_changed_unpack", i, "null values were accepted", numel);
        ++counted.refused;
    }
    return counted;
}

}  // namespace fuzz
