// zk_convert: the codecs on their own, for tests and for changing formats.
#pragma once

#include "codec/codec.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

inline void encode_block(uint32_t codec, const float *x, void *codes, float *scale) {
    F values[ZK_BLOCK / W], most = set1(0.0f);
    for (int v = 0; v < ZK_BLOCK / W; ++v) {
        values[v] = load(x + v * W);
        if (codec == ZK_ENCODE_EXP_AVG_SQ) values[v] = sqrt(values[v]);
        most = max_bits(most, abs(values[v]));
    }
    if (codec == ZK_ENCODE_EXP_AVG) {
        *scale = encode_averages(static_cast<int8_t *>(codes), values, reduce_max(most));
    } else {
        *scale = encode_roots(static_cast<uint8_t *>(codes), values, reduce_max(most));
    }
}

inline void decode_step(uint32_t codec, float *x, const void *codes, float scale) {
    F values[Q];
    if (codec == ZK_DECODE_EXP_AVG) {
        decode_signed(static_cast<const int8_t *>(codes), values);
        for (int j = 0; j < Q; ++j) store(x + j * W, mul(values[j], set1(scale)));
    } else {
        decode_unsigned(static_cast<const uint8_t *>(codes), values);
        for (int j = 0; j < Q; ++j) {
            const F root = mul(values[j], set1(scale / 255.0f));
            store(x + j * W, mul(root, root));
        }
    }
}

inline void split_step(uint32_t codec, float *x, void *hi, void *low) {
    F values[Q];
    if (codec == ZK_SPLIT16 || codec == ZK_SPLIT8) {
        for (int j = 0; j < Q; ++j) values[j] = load(x + j * W);
        codec == ZK_SPLIT16 ? store_split16(static_cast<uint16_t *>(hi), static_cast<int16_t *>(low), values)
                            : store_split8(static_cast<uint16_t *>(hi), static_cast<int8_t *>(low), values);
    } else {
        codec == ZK_JOIN16 ? load_split16(static_cast<const uint16_t *>(hi), static_cast<const int16_t *>(low), values)
                           : load_split8(static_cast<const uint16_t *>(hi), static_cast<const int8_t *>(low), values);
        for (int j = 0; j < Q; ++j) store(x + j * W, values[j]);
    }
}

// One block; every buffer holds ZK_BLOCK elements.
inline void convert_block(uint32_t codec, float *x, void *codes, void *aux) {
    const int low_bytes = codec == ZK_SPLIT16 || codec == ZK_JOIN16 ? 2 : 1;
    if (codec == ZK_ENCODE_EXP_AVG || codec == ZK_ENCODE_EXP_AVG_SQ) {
        encode_block(codec, x, codes, static_cast<float *>(aux));
        return;
    }
    for (int i = 0; i < ZK_BLOCK; i += W * Q) {
        if (codec == ZK_DECODE_EXP_AVG || codec == ZK_DECODE_EXP_AVG_SQ) {
            decode_step(codec, x + i, static_cast<char *>(codes) + i, *static_cast<float *>(aux));
        } else {
            split_step(codec, x + i, static_cast<char *>(codes) + 2 * i, static_cast<char *>(aux) + low_bytes * i);
        }
    }
}

void convert(uint32_t codec, float *x, void *codes, void *aux, int64_t begin, int64_t end) {
    const bool split = codec >= ZK_SPLIT16;
    const int64_t code_bytes = split ? 2 : 1;
    const int64_t aux_bytes = codec == ZK_SPLIT16 || codec == ZK_JOIN16 ? 2 : 1;  // per element, of a remainder
    for (int64_t i = begin; i < end; i += ZK_BLOCK) {
        const int64_t n = end - i < ZK_BLOCK ? end - i : ZK_BLOCK;
        char *code = static_cast<char *>(codes) + i * code_bytes;
        char *extra = split ? static_cast<char *>(aux) + i * aux_bytes : static_cast<char *>(aux) + i / ZK_BLOCK * 4;
        if (n == ZK_BLOCK) {
            convert_block(codec, x + i, code, extra);
            continue;
        }
        alignas(64) float values[ZK_BLOCK] = {};
        alignas(64) char room[ZK_BLOCK * 2] = {}, low[ZK_BLOCK * 2] = {};
        std::memcpy(values, x + i, static_cast<size_t>(n) * 4);
        std::memcpy(room, code, static_cast<size_t>(n * code_bytes));
        std::memcpy(low, extra, static_cast<size_t>(split ? n * aux_bytes : 4));
        convert_block(codec, values, room, low);
        std::memcpy(x + i, values, static_cast<size_t>(n) * 4);
        std::memcpy(code, room, static_cast<size_t>(n * code_bytes));
        std::memcpy(extra, low, static_cast<size_t>(split ? n * aux_bytes : 4));
    }
}

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
