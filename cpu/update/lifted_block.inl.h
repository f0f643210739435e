// A block of int8 averages that are as small as denormal numbers, and whose gradients are all 0: a row of an embedding
// that is no longer used. Its averages are computed in units, its roots times 2^75, with the bits of the usual way.
#pragma once

#include "update/update.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

#if defined(ZK_LIFT)
template <class UPDATE>
struct LiftedBlock {
    using Rule = typename UPDATE::Rule;
    static constexpr float SMALL = 0x1p-110f, SMALL_ROOT = 0x1p-50f, LEAST_ROOT = 0x1p-100f;

    static ZK_INLINE bool fits(const zk_segment &s, const Scalars &k, const Rule &rule, int64_t base) {
        const float scale = s.exp_avg_scale[base / ZK_BLOCK];
        if (__builtin_expect(!(bits_of(scale) - 1 < bits_of(SMALL)), 1)) return false;  // 0 and what has a sign too
        if (!Rule::LIFTS_BLOCKS || rule.coupled || !(k.scale - k.scale == 0.0f))
            return false;  // NaN and infinite times 0
        const int grad_bytes = UPDATE::grad_bytes(k);
        const char *const from = static_cast<const char *>(s.grad) + base * grad_bytes;
        I any = _mm512_setzero_si512();
        for (int64_t b = 0; b < TILE * grad_bytes; b += 64) any = _mm512_or_si512(any, load_512(from + b));
        const I signs = _mm512_set1_epi32(grad_bytes == 4 ? INT32_MAX : 0x7FFF7FFF);
        return _mm512_test_epi32_mask(any, signs) == 0;
    }

    // False, and nothing written, where a step could move a parameter, or a product of roots may be denormal.
    static __attribute__((noinline)) bool update(const zk_segment &s, const Scalars &k, const Rule &rule, int64_t base,
                                                 typename UPDATE::Pending &to) {
        const int64_t block = base / ZK_BLOCK;
        const float root_scale = Rule::STATES >= 2 ? s.exp_avg_sq_scale[block] : 0.0f;
        if (!(root_scale == 0.0f || (root_scale >= LEAST_ROOT && root_scale <= 1.0f / LEAST_ROOT))) return false;
        const bool small_root = root_scale < SMALL_ROOT;
        const LiftedScales c = {set1(scale_units(s.exp_avg_scale[block])),
                                set1(small_root ? root_scale * 0x1p75f / 255.0f : root_scale / 255.0f),
                                small_root ? 0x1p75f : 1.0f};
        F p[VECTORS], most_average = set1(0.0f), most_root = set1(0.0f);
        for (int v = 0; v < VECTORS; v += Q) {
            const int64_t i = base + v * W;
            F m[Q], root[Q], values[Q];
            decode_signed(at<int8_t>(s.exp_avg, i), m);
            if constexpr (Rule::STATES >= 2) decode_unsigned(at<uint8_t>(s.exp_avg_sq, i), root);
            rule.lifted_averages(c, m, root);
            UPDATE::load_params(s, k, i, values);
            if (!rule.lifted_step(values, root)) return false;
            for (int j = 0; j < Q; ++j) {
                p[v + j] = values[j];
                to.averages[v + j] = m[j];
                to.roots[v + j] = root[j];
                most_average = max_bits(most_average, abs(m[j]));
                most_root = max_bits(most_root, root[j]);
            }
        }
        to.average_scale = reduce_max(most_average);
        to.root_scale = reduce_max(most_root);
        to.in_units = true;
        for (int v = 0; v < VECTORS; v += Q) {
            const F values[Q] = {p[v], p[v + 1], p[v + 2], p[v + 3]};
            UPDATE::store_params(s, k, base + v * W, values);
        }
        return true;
    }
};
#endif

}  // namespace
}  // namespace ZK_NS
}  // namespace zk
