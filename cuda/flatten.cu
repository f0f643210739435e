// A list of contiguous spans into others with cast, scale and sum of squares: tensors into a bucket, or out of it.
//
// The list is an argument of the kernel, so nothing is uploaded before a launch. A CTA moves one tile: 16 rows of 2,048
// bytes of the wider type. A thread moves 16 bytes of it in each row, 8 rows on their way at once; where the two sides
// are not aligned so, one element at a time, neighbours by neighbouring threads.
//
// promises: registers 96, stack 0, spills 0
#include "ring.cuh"
#include "sums.cuh"

constexpr u32 FLATTEN_THREADS = 128;
constexpr u32 TILE_ROWS = 16;
constexpr u32 PARTS = COLUMNS * 8;  // bytes: at most a row of positions, in float64
constexpr u32 FLATTEN_SHARED = PARTS + SUMS_SHARED;

template <u32 ROWS>
struct FlattenRows {
    Sums sums;
    u64 not_finite;  // float64: 1 or 0
    u64 factor;      // fp32, or 0
    float scale;
    u32 rows;
    Row row[ROWS];  // `size` in elements; a task is a tile
};

// NBYTES / 4 words of global memory in one access.
template <u32 NBYTES>
struct Vector {
    u32 word[NBYTES / 4];
};
ZK_DEVICE void load_vector(Vector<16> &vector, u64 at) {
    Words4 words = ld_global_v4(at);
    vector.word[0] = words.x, vector.word[1] = words.y, vector.word[2] = words.z, vector.word[3] = words.w;
}
ZK_DEVICE void load_vector(Vector<8> &vector, u64 at) {
    u64 words = ld_global_u64(at);
    vector.word[0] = (u32)words, vector.word[1] = (u32)(words >> 32);
}
ZK_DEVICE void store_vector(u64 at, const Vector<16> &vector) {
    st_global_v4(at, Words4{vector.word[0], vector.word[1], vector.word[2], vector.word[3]});
}
ZK_DEVICE void store_vector(u64 at, const Vector<8> &vector) {
    st_global_u64(at, vector.word[0] | (u64)vector.word[1] << 32);
}
template <class Type, u32 NBYTES>
ZK_DEVICE u32 element(const Vector<NBYTES> &vector, u32 i) {
    return Type::NBYTES == 4 ? vector.word[i] : vector.word[i / 2] >> (i % 2 * 16) & 0xFFFF;
}

template <class Source, class Target, bool STATS>
struct Mover {
    static constexpr u32 WIDER = Source::NBYTES > Target::NBYTES ? Source::NBYTES : Target::NBYTES;
    static constexpr u32 VEC = 16 / WIDER;  // elements of a thread in a row
    static constexpr u32 WIDTH = VEC * FLATTEN_THREADS;
    typedef Vector<VEC * Source::NBYTES> From;
    typedef Vector<VEC * Target::NBYTES> To;

    u64 to, from;
    float scale;
    double sums[VEC];

    ZK_MEMBER u32 moved(u32 bits, u32 position) {
        u32 made = Target::rounded(mul_rn_f32(Source::value(bits), scale));
        if (STATS) sums[position] = plus_square(sums[position], Target::value(made));
        return made;
    }
    ZK_MEMBER void move(u32 at, u32 position) {
        Target::store(to + at * Target::NBYTES, moved(Source::load(from + at * Source::NBYTES), position));
    }

    // This thread has positions VEC * thread and so on.
    ZK_MEMBER void wide(u32 left) {
        u32 own = thread_number() * VEC;
        for (u32 first = own; first < left; first += FLIGHT * WIDTH) {
            From vectors[FLIGHT];
#pragma unroll
            for (u32 i = 0; i < FLIGHT; ++i) {
                u32 at = first + i * WIDTH;
                if (at + VEC <= left) load_vector(vectors[i], from + at * Source::NBYTES);
            }
#pragma unroll
            for (u32 i = 0; i < FLIGHT; ++i) {
                u32 at = first + i * WIDTH;
                if (at + VEC > left) continue;
                To made{};
#pragma unroll
                for (u32 j = 0; j < VEC; ++j) {
                    u32 bits = moved(element<Source>(vectors[i], j), j);
                    if (Target::NBYTES == 4) {
                        made.word[j] = bits;
                    } else {
                        made.word[j / 2] |= bits << (j % 2 * 16);
                    }
                }
                store_vector(to + at * Target::NBYTES, made);
            }
        }
        u32 end = left & ~(VEC - 1);  // what is left is less than a vector, one thread's
        if (left > end && end % WIDTH == own) {
#pragma unroll
            for (u32 j = 0; j < VEC; ++j)
                if (end + j < left) move(end + j, j);
        }
    }

    // This thread has positions thread, thread + FLATTEN_THREADS and so on.
    ZK_MEMBER void ragged(u32 left) {
        for (u32 row = 0; row < left; row += WIDTH) {
            u32 bits[VEC];
#pragma unroll
            for (u32 j = 0; j < VEC; ++j) {
                u32 at = row + j * FLATTEN_THREADS + thread_number();
                if (at < left) bits[j] = Source::load(from + at * Source::NBYTES);
            }
#pragma unroll
            for (u32 j = 0; j < VEC; ++j) {
                u32 at = row + j * FLATTEN_THREADS + thread_number();
                if (at < left) Target::store(to + at * Target::NBYTES, moved(bits[j], j));
            }
        }
        if (!STATS) return;
        for (u32 j = 0; j < VEC; ++j)
            st_shared_f64(shared_memory() + 8 * (j * FLATTEN_THREADS + thread_number()), sums[j]);
        bar_sync();
        for (u32 j = 0; j < VEC; ++j) sums[j] = ld_shared_f64(shared_memory() + 8 * (thread_number() * VEC + j));
        bar_sync();
    }

    // Positions 2 j and 2 j + 1 are added, then pairs of these sums, and so on. In thread 0: the sum of the tile.
    ZK_MEMBER double total() {
#pragma unroll
        for (u32 pairs = VEC / 2; pairs > 0; pairs /= 2)
#pragma unroll
            for (u32 j = 0; j < pairs; ++j) sums[j] = add_rn_f64(sums[2 * j], sums[2 * j + 1]);
        double sum = sums[0];
#pragma unroll
        for (u32 apart = 1; apart < 32; apart *= 2) sum = add_rn_f64(sum, shfl_bfly_f64(sum, apart));
        if (thread_number() % 32 == 0) st_shared_f64(shared_memory() + thread_number() / 32 * 8, sum);
        bar_sync();
        u32 at = shared_memory();
        return add_rn_f64(add_rn_f64(ld_shared_f64(at), ld_shared_f64(at + 8)),
                          add_rn_f64(ld_shared_f64(at + 16), ld_shared_f64(at + 24)));
    }
};

template <class Source, class Target, bool STATS, u32 ROWS>
ZK_DEVICE void flatten(const FlattenRows<ROWS> &list) {
    typedef Mover<Source, Target, STATS> Tile;
    const Row &row = list.row[row_of(list, cta_number(), 0, cta_number())];
    u32 first = (cta_number() - row.first) * (TILE_ROWS * Tile::WIDTH);
    u32 left = row.size - first < TILE_ROWS * Tile::WIDTH ? row.size - first : TILE_ROWS * Tile::WIDTH;
    Tile tile{row.to + (u64)first * Target::NBYTES, row.from + (u64)first * Source::NBYTES, list.scale, {}};
    if (list.factor) tile.scale = mul_rn_f32(list.scale, f32_of_bits(ld_global_u32(list.factor)));
    if (((tile.from & (Tile::VEC * Source::NBYTES - 1)) | (tile.to & (Tile::VEC * Target::NBYTES - 1))) == 0) {
        tile.wide(left);
    } else {
        tile.ragged(left);
    }
    if (!STATS) return;
    double sum = tile.total();
    if (thread_number() == 0) st_global_f64(list.sums.partials + 8ull * (list.sums.first + cta_number()), sum);
    if (is_last(list.sums, shared_memory() + PARTS)) {
        double total = columns(list.sums, shared_memory() + PARTS);
        if (thread_number() == 0) st_global_f64(list.not_finite, is_finite(total) ? 0.0 : 1.0);
    }
}

#define ZK_FLATTEN_ROWS(source, target, few, rows)                                               \
    ZK_KERNEL flatten_##source##_##target##_##few(ZK_PARAMETERS(FlattenRows<rows>) list) {       \
        flatten<source, target, false>(list);                                                    \
    }                                                                                            \
    ZK_KERNEL flatten_##source##_##target##_stats_##few(ZK_PARAMETERS(FlattenRows<rows>) list) { \
        flatten<source, target, true>(list);                                                     \
    }
#define ZK_FLATTEN(source, target)           \
    ZK_FLATTEN_ROWS(source, target, few, 32) \
    ZK_FLATTEN_ROWS(source, target, many, 1344)
#ifdef ZK_SOURCE  // one pair of types, compiled when it is asked for
ZK_FLATTEN(ZK_SOURCE, ZK_TARGET)
#else
// clang-format off
ZK_FLATTEN(f32, f32) ZK_FLATTEN(f32, bf16) ZK_FLATTEN(f32, f16)
ZK_FLATTEN(bf16, f32) ZK_FLATTEN(bf16, bf16) ZK_FLATTEN(bf16, f16)
ZK_FLATTEN(f16, f32) ZK_FLATTEN(f16, bf16) ZK_FLATTEN(f16, f16)
// clang-format on
#endif
