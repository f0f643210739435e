// Pairs of vectors with AVX512-VNNI and VBMI, for cores whose shuffles are scarce: a multiply-add of words extends the
// sign and adds in one instruction, and a permute of bytes takes one slot where one of words takes two (Intel).
#pragma once

namespace zk {
namespace ZK_NS {
namespace {

struct Two {
    F a, b;
};

// The element of a pair that lane `lane` of its first (0) or second (1) vector holds.
constexpr int element_of(Order order, int second, int lane) {
    return order == Order::natural ? 16 * second + lane : 2 * lane + second;
}

// Constants in memory: the compiler would build them again and again from integer registers, through port 5.
template <Order O>
struct PairTables {
    alignas(64) uint8_t widen[2][64];      // words of memory to upper halves
    alignas(64) uint8_t deal[64];          // words of memory to one word of each element in its dword: a low, b high
    alignas(64) uint8_t deal_bytes[64];    // the same from 32 bytes, as the upper byte of each word
    alignas(64) uint8_t gather[64];        // upper (a) and lower (b) words of dwords to memory
    alignas(64) uint8_t second_bytes[64];  // byte 1 of each dword to memory
    alignas(64) uint32_t upper[16], unit[16], upper_unit[16], half[16], nudge[16], bit8[16], nudge8[16], sign_bytes[16],
        nan_classes[16];
    uint64_t upper_bytes, odd_words, second_lanes;
};
template <Order O>
constexpr PairTables<O> make_pair_tables() {
    PairTables<O> t{};
    for (int lane = 0; lane < 16; ++lane) {
        for (int second = 0; second < 2; ++second) {
            const int element = element_of(O, second, lane);
            for (int byte = 0; byte < 2; ++byte) {
                t.widen[second][4 * lane + 2 + byte] = static_cast<uint8_t>(2 * element + byte);
                t.deal[4 * lane + 2 * second + byte] = static_cast<uint8_t>(2 * element + byte);
                t.gather[2 * element + byte] = static_cast<uint8_t>(4 * lane + 2 * second + byte);
            }
            t.deal_bytes[4 * lane + 2 * second] = 63;  // the upper half of the register is zero
            t.deal_bytes[4 * lane + 2 * second + 1] = static_cast<uint8_t>(element);
            t.second_bytes[element] = static_cast<uint8_t>(4 * lane + 1);
            if (second) t.second_lanes |= 1ull << element;
        }
        t.upper[lane] = 0xFFFF0000u;
        t.unit[lane] = 1;
        t.upper_unit[lane] = 0x10000;
        t.half[lane] = 0x8000;
        t.nudge[lane] = 0x7FFF;
        t.bit8[lane] = 0x100;
        t.nudge8[lane] = 0x807F;
        t.sign_bytes[lane] = 0x80808080u;
        t.nan_classes[lane] = 0x11111133;
    }
    t.upper_bytes = 0xCCCCCCCCCCCCCCCCull;
    t.odd_words = 0xAAAAAAAAull;
    return t;
}
template <Order O>
constexpr PairTables<O> PAIR_TABLES = make_pair_tables<O>();

inline I fixed(const uint32_t (&x)[16]) { return _mm512_load_si512(x); }
inline I order_of(const uint8_t (&x)[64]) { return _mm512_load_si512(x); }

// The verbs on pairs. Masks stay in their registers from here on, tables in memory.
template <Order O>
struct Pairs {
    static constexpr bool NATURAL = O == Order::natural;
    const PairTables<O> *t = &PAIR_TABLES<O>;
    __mmask64 upper_bytes, second_lanes;
    __mmask32 odd_words;

    ZK_INLINE Pairs() {
        asm("" : "+r"(t));  // what it points to is no longer known
        upper_bytes = t->upper_bytes;
        second_lanes = t->second_lanes;
        odd_words = static_cast<__mmask32>(t->odd_words);
    }

    // 32 words to the upper halves.
    ZK_INLINE Two widen(I x) const {
        if constexpr (NATURAL)
            return {floats(_mm512_maskz_permutexvar_epi8(upper_bytes, order_of(t->widen[0]), x)),
                    floats(_mm512_maskz_permutexvar_epi8(upper_bytes, order_of(t->widen[1]), x))};
        return {floats(_mm512_slli_epi32(x, 16)), floats(_mm512_and_si512(x, fixed(t->upper)))};
    }
    // hi << 16 plus a signed word.
    ZK_INLINE Two join(I hi, I dealt) const {
        const Two upper = widen(hi);
        return {floats(_mm512_dpwssd_epi32(ints(upper.a), dealt, fixed(t->unit))),
                floats(_mm512_dpwssd_epi32(ints(upper.b), dealt, fixed(t->upper_unit)))};
    }
    ZK_INLINE Two load_split16(const uint16_t *hi, const int16_t *lo) const {
        const I low = load_512(lo);
        return join(load_512(hi), NATURAL ? _mm512_permutexvar_epi8(order_of(t->deal), low) : low);
    }
    ZK_INLINE Two load_split8(const uint16_t *hi, const int8_t *lo) const {
        const I low = _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(lo)));
        return join(load_512(hi), _mm512_permutexvar_epi8(order_of(t->deal_bytes), low));
    }

    ZK_INLINE I in_memory(I words_of_dwords) const {
        return NATURAL ? _mm512_permutexvar_epi8(order_of(t->gather), words_of_dwords) : words_of_dwords;
    }
    ZK_INLINE I upper_words(I a, I b) const {
        return in_memory(_mm512_mask_mov_epi16(_mm512_srli_epi32(a, 16), odd_words, b));
    }
    ZK_INLINE I lower_words(I a, I b) const {
        return in_memory(_mm512_mask_mov_epi16(a, odd_words, _mm512_slli_epi32(b, 16)));
    }
    ZK_INLINE I canonical(F x) const { return ints(_mm512_fixupimm_ps(x, x, fixed(t->nan_classes), 0)); }

    // To nearest even, no NaNs: half a unit less one, and the lowest bit that stays.
    ZK_INLINE I nudged(I x) const {
        return _mm512_dpwssd_epi32(_mm512_add_epi32(x, fixed(t->nudge)), _mm512_and_si512(x, fixed(t->upper_unit)),
                                   fixed(t->upper_unit));
    }
    ZK_INLINE I bf16_of(I a, I b) const { return upper_words(nudged(a), nudged(b)); }

    ZK_INLINE void store_split16(uint16_t *hi, int16_t *lo, I a, I b) const {
        const I half = fixed(t->half);
        store_512(hi, upper_words(_mm512_add_epi32(a, half), _mm512_add_epi32(b, half)));
        store_512(lo, lower_words(a, b));
    }
    // As above for 24 bits, and 0x8000 for the borrow of the signed byte, which flips the byte's sign.
    ZK_INLINE I nudged8(I x) const {
        return _mm512_dpbusd_epi32(_mm512_add_epi32(x, fixed(t->nudge8)), _mm512_and_si512(x, fixed(t->bit8)),
                                   fixed(t->bit8));
    }
    ZK_INLINE void store_split8(uint16_t *hi, int8_t *lo, I x, I y) const {
        const I a = nudged8(x), b = nudged8(y), from = order_of(t->second_bytes);
        store_512(hi, upper_words(a, b));
        const I low = _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(from, a), second_lanes, from, b);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(lo),
                            _mm512_castsi512_si256(_mm512_xor_si512(low, fixed(t->sign_bytes))));
    }
};

// The compiler may not move x's value across this, so that what was written in turns stays in turns.
#define ZK_PACED(x) asm volatile("" : "+v"(x))

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
