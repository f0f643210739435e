// zk_sumsq, zk_accumulate, zk_collect, zk_convert and zk_stream, each with valid and with spoilt arguments.
#include <limits>
#include <memory>

#include "fuzz.h"

namespace fuzz {
namespace {

constexpr uint32_t FLOATS[] = {ZK_F32, ZK_BF16, ZK_F16};

uint32_t wrong_dtype(Random &random) {
    const uint32_t wrong[] = {ZK_NONE, ZK_INT8, 5, 77, 0xFFFFFFFFu};
    return random.pick(wrong);
}

std::unique_ptr<Buffer> filled(Random &random, Kind kind, int64_t numel) {
    auto buffer = std::make_unique<Buffer>(kind, numel, some_offset(random, kind));
    buffer->fill(random);
    return buffer;
}

struct Sources {
    std::vector<std::unique_ptr<Buffer>> memory;
    std::vector<const void *> pointers;

    Sources(Random &random, Kind kind, int64_t numel, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
            memory.push_back(filled(random, kind, numel));
            pointers.push_back(memory.back()->data());
        }
    }
};

struct Result {
    Buffer &buffer;
    const Buffer *scales = nullptr;  // of codes
};

// Runs on scalar too and compares the results, which both write and which start as they are.
template <class Run>
void expect_scalar_bits(const char *entry, uint64_t execution, Digest &digest, const std::vector<Result> &results,
                        Run run) {
    std::vector<Buffer> before, wide;
    for (const Result &result : results) before.push_back(result.buffer);
    if (const int code = run()) fail(entry, execution, "a valid call was refused", code);
    for (const Result &result : results) wide.push_back(result.buffer);
    const char *name = zk_isa_active();
    if (name != zk_isa_name(0)) {
        for (size_t i = 0; i < results.size(); ++i)
            std::memcpy(results[i].buffer.data(), before[i].data(), static_cast<size_t>(before[i].nbytes));
        zk_isa_force("scalar");
        run();
        zk_isa_force(name);
    }
    for (size_t i = 0; i < results.size(); ++i) {
        digest.add(results[i].buffer, results[i].scales);
        const int64_t at = first_difference(wide[i], results[i].buffer, results[i].scales);
        if (at < 0) continue;
        print_element(wide[i], results[i].buffer, at);
        fail(entry, execution, "other bits than scalar's at element", at);
    }
}

template <class Run>
void expect_refusal(const char *entry, uint64_t execution, const Buffer &result, Run run) {
    const Buffer before(result);
    if (run() == ZK_OK) fail(entry, execution, "spoilt arguments were accepted", 0);
    if (std::memcmp(before.data(), result.data(), static_cast<size_t>(before.nbytes)) != 0)
        fail(entry, execution, "it wrote although it refused", 0);
}

// Calls each(execution, digest) with the instruction sets in turn; it says whether the call was a valid one.
template <class Each>
Counts repeat(Random &random, uint64_t executions, Each each) {
    const std::vector<const char *> sets = usable_sets();
    Counts counts;
    for (uint64_t i = 0; i < executions; ++i) {
        zk_isa_force(sets[i % sets.size()]);
        round_somehow(random);
        ++(each(i, counts.digest) ? counts.accepted : counts.refused);
    }
    zk_isa_force(nullptr);
    std::fesetround(FE_TONEAREST);
    return counts;
}

}  // namespace

Counts fuzz_sumsq(Random &random, uint64_t executions) {
    return repeat(random, executions, [&](uint64_t execution, Digest &digest) {
        const uint32_t dtype = random.pick(FLOATS);
        const int64_t n = static_cast<int64_t>(random.below(5));
        std::vector<std::unique_ptr<Buffer>> memory;
        std::vector<const void *> sources;
        std::vector<int64_t> numels;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t numel =
                random.one_in(2000) ? 65535 + static_cast<int64_t>(random.below(3)) : some_numel(random);
            memory.push_back(filled(random, kind_of(dtype), numel));
            sources.push_back(memory.back()->data());
            numels.push_back(numel);
        }
        Buffer sums(Kind::fp64, n, 0), partials(Kind::fp64, zk_sumsq_partials(numels.data(), n), 0);
        std::memset(sums.data(), 0x5A, static_cast<size_t>(sums.nbytes));
        const void *const *from = sources.data();
        int64_t *counts = numels.data();
        double *scratch = reinterpret_cast<double *>(partials.data()), *to = reinterpret_cast<double *>(sums.data());
        if (!random.one_in(4) || n == 0) {
            expect_scalar_bits("zk_sumsq", execution, digest, {{sums}},
                               [&] { return zk_sumsq(from, counts, n, dtype, scratch, to); });
            return true;
        }
        const uint64_t at = random.below(static_cast<uint64_t>(n));
        uint32_t kind = dtype;
        int64_t count = n;
        switch (random.below(6)) {
            case 0:
                kind = wrong_dtype(random);
                break;
            case 1:
                count = -1 - static_cast<int64_t>(random.next() >> 2);
                break;
            case 2:
                counts[at] = -1 - static_cast<int64_t>(random.next() >> 2 >> random.below(62));
                break;
            case 3:
                from = nullptr;
                break;
            case 4:
                counts = nullptr;
                break;
            default:
                to = nullptr;
                break;
        }
        expect_refusal("zk_sumsq", execution, sums, [&] { return zk_sumsq(from, counts, count, kind, scratch, to); });
        return false;
    });
}

Counts fuzz_accumulate(Random &random, uint64_t executions) {
    return repeat(random, executions, [&](uint64_t execution, Digest &digest) {
        const uint32_t dst_dtype = random.pick(FLOATS), src_dtype = random.pick(FLOATS);
        const int64_t numel = some_numel(random), n = 1 + static_cast<int64_t>(random.below(4));
        const int add = random.one_in(2);
        const float scale = random.one_in(2) ? 1.0f : 0.37f;
        const auto dst = filled(random, kind_of(dst_dtype), numel);
        Sources from_all(random, kind_of(src_dtype), numel, n);
        std::vector<const void *> &sources = from_all.pointers;
        if (!random.one_in(4)) {
            expect_scalar_bits("zk_accumulate", execution, digest, {{*dst}}, [&] {
                return zk_accumulate(dst->data(), dst_dtype, sources.data(), n, src_dtype, numel, add, scale);
            });
            return true;
        }
        void *to = dst->data();
        const void *const *from = sources.data();
        uint32_t kinds[] = {dst_dtype, src_dtype};
        int64_t count = n, elements = numel;
        switch (random.below(numel ? 7 : 4)) {
            case 0:
                kinds[0] = wrong_dtype(random);
                break;
            case 1:
                kinds[1] = wrong_dtype(random);
                break;
            case 2:
                count = -static_cast<int64_t>(random.next() >> 1 >> random.below(63));
                break;
            case 3:
                elements = -1 - static_cast<int64_t>(random.next() >> 2);
                break;
            case 4:
                to = nullptr;
                break;
            case 5:
                from = nullptr;
                break;
            default:
                sources[random.below(static_cast<uint64_t>(n))] = nullptr;
                break;
        }
        expect_refusal("zk_accumulate", execution, *dst,
                       [&] { return zk_accumulate(to, kinds[0], from, count, kinds[1], elements, add, scale); });
        return false;
    });
}

Counts fuzz_collect(Random &random, uint64_t executions) {
    return repeat(random, executions, [&](uint64_t execution, Digest &digest) {
        const uint32_t dst_dtype = random.pick(FLOATS), src_dtype = random.pick(FLOATS);
        const int64_t n = 1 + static_cast<int64_t>(random.below(4));
        const int add = random.one_in(2);
        std::vector<std::unique_ptr<Buffer>> memory;
        std::vector<const void *> sources;
        std::vector<int64_t> begins, numels;
        int64_t total = 0;
        for (int64_t i = 0; i < n; ++i) {
            const int64_t numel =
                random.one_in(2000) ? 65535 + static_cast<int64_t>(random.below(3)) : some_numel(random);
            memory.push_back(filled(random, kind_of(src_dtype), numel));
            sources.push_back(memory.back()->data());
            begins.push_back(total + static_cast<int64_t>(random.below(3)));
            numels.push_back(numel);
            total = begins.back() + numel;
        }
        const auto dst = filled(random, kind_of(dst_dtype), total);
        void *to = dst->data();
        int64_t count = n;
        uint32_t kinds[] = {dst_dtype, src_dtype};
        const void *const *from = sources.data();
        const auto run = [&] {
            return zk_collect(to, kinds[0], from, begins.data(), numels.data(), count, kinds[1], add);
        };
        if (!random.one_in(4)) {
            const Buffer before(*dst);
            expect_scalar_bits("zk_collect", execution, digest, {{*dst}}, run);
            const Buffer found(*dst);
            std::memcpy(dst->data(), before.data(), static_cast<size_t>(before.nbytes));
            const int64_t width = dst_dtype == ZK_F32 ? 4 : 2;
            for (int64_t i = 0; i < n; ++i)
                zk_accumulate(static_cast<char *>(to) + begins[i] * width, dst_dtype, from + i, 1, src_dtype, numels[i],
                              add, 1.0f);
            const int64_t at = first_difference(found, *dst, nullptr);
            if (at >= 0) fail("zk_collect", execution, "other bits than zk_accumulate's at element", at);
            return true;
        }
        const size_t at = random.below(static_cast<uint64_t>(n));
        switch (random.below(6)) {
            case 0:
                kinds[random.below(2)] = wrong_dtype(random);
                break;
            case 1:
                count = -1 - static_cast<int64_t>(random.next() >> 2);
                break;
            case 2:
                begins[at] = -1 - static_cast<int64_t>(random.next() >> 2);
                break;
            case 3:
                numels[at] = -1 - static_cast<int64_t>(random.next() >> 2);
                break;
            case 4:
                from = nullptr;
                break;
            default:
                to = nullptr;
                break;
        }
        expect_refusal("zk_collect", execution, *dst, run);
        return false;
    });
}

Counts fuzz_accumulate_sumsq(Random &random, uint64_t executions) {
    return repeat(random, executions, [&](uint64_t execution, Digest &digest) {
        const uint32_t dst_dtype = random.pick(FLOATS), src_dtype = random.pick(FLOATS);
        const int64_t numel = random.one_in(2000) ? 131070 + static_cast<int64_t>(random.below(5)) : some_numel(random);
        const int64_t n = 1 + static_cast<int64_t>(random.below(3));
        const int add = random.one_in(2);
        const float scale = random.one_in(2) ? 1.0f : 0.37f;
        const auto dst = filled(random, kind_of(dst_dtype), numel);
        Sources from_all(random, kind_of(src_dtype), numel, n);
        std::vector<const void *> &sources = from_all.pointers;
        std::vector<int64_t> begins, numels;
        for (int64_t at = 0; at <= numel && !random.one_in(3);) {
            begins.push_back(at + static_cast<int64_t>(random.below(static_cast<uint64_t>(numel - at + 1))));
            numels.push_back(static_cast<int64_t>(random.below(static_cast<uint64_t>(numel - begins.back() + 1))));
            at = begins.back() + numels.back();
        }
        const int64_t spans = static_cast<int64_t>(numels.size());
        Buffer sums(Kind::fp64, spans, 0), partials(Kind::fp64, zk_sumsq_partials(numels.data(), spans), 0);
        std::memset(sums.data(), 0x5A, static_cast<size_t>(sums.nbytes));
        double *scratch = reinterpret_cast<double *>(partials.data()), *to = reinterpret_cast<double *>(sums.data());
        const auto run = [&] {
            return zk_accumulate_sumsq(dst->data(), dst_dtype, sources.data(), n, src_dtype, numel, add, scale,
                                       begins.data(), numels.data(), spans, scratch, to);
        };
        if (!spans || !random.one_in(4)) {
            expect_scalar_bits("zk_accumulate_sumsq", execution, digest, {{*dst}, {sums}}, run);
            std::vector<const void *> results;
            const int64_t width = dst_dtype == ZK_F32 ? 4 : 2;
            for (const int64_t begin : begins) results.push_back(static_cast<char *>(dst->data()) + begin * width);
            const Buffer fused(sums);
            zk_sumsq(results.data(), numels.data(), spans, dst_dtype, scratch, to);
            const int64_t at = first_difference(fused, sums, nullptr);
            if (at >= 0) fail("zk_accumulate_sumsq", execution, "another sum than zk_sumsq's of span", at);
            return true;
        }
        const size_t at = random.below(static_cast<uint64_t>(spans));
        switch (random.below(4)) {
            case 0:
                begins[at] = -1 - static_cast<int64_t>(random.next() >> 2 >> random.below(62));
                break;
            case 1:
                numels[at] = -1 - static_cast<int64_t>(random.next() >> 2 >> random.below(62));
                break;
            case 2:
                numels[at] = numel - begins[at] + 1 + static_cast<int64_t>(random.next() >> 2 >> random.below(62));
                break;
            default:
                begins[at] = numel + 1 + static_cast<int64_t>(random.next() >> 2 >> random.below(62));
                break;
        }
        expect_refusal("zk_accumulate_sumsq", execution, *dst, run);
        return false;
    });
}

Counts fuzz_convert(Random &random, uint64_t executions) {
    return repeat(random, executions, [&](uint64_t execution, Digest &digest) {
        const uint32_t codec = ZK_ENCODE_EXP_AVG + static_cast<uint32_t>(random.below(8));
        const bool split = codec >= ZK_SPLIT16, wide = codec == ZK_SPLIT16 || codec == ZK_JOIN16;
        const int64_t numel = some_numel(random);
        const auto x = filled(random, Kind::fp32, numel);
        if (codec == ZK_ENCODE_EXP_AVG_SQ) x->make_positive();
        const auto codes = filled(random, split ? Kind::bf16 : Kind::bytes, numel);
        const auto aux = filled(random,
                                !split ? Kind::fp32
                                : wide ? Kind::words
                                       : Kind::bytes,
                                split ? numel : (numel + ZK_BLOCK - 1) / ZK_BLOCK);
        if (!split) aux->make_positive();
        if (codec ==
            ZK_DECODE_EXP_AVG)  // no encoder writes -128, and the sign of the zero that it decodes as is left open
            for (int64_t i = 0; i < codes->nbytes; ++i)
                if (static_cast<int8_t>(codes->data()[i]) == -128) codes->data()[i] = 0;
        const bool decodes =
            codec == ZK_DECODE_EXP_AVG || codec == ZK_DECODE_EXP_AVG_SQ || codec == ZK_JOIN16 || codec == ZK_JOIN8;
        const Buffer &result = decodes ? *x : *codes;
        void *const code = codes->data(), *const extra = aux->data();
        float *const values = reinterpret_cast<float *>(x->data());
        if (!random.one_in(4)) {
            expect_scalar_bits("zk_convert", execution, digest, {{*x}, {*codes, split ? nullptr : aux.get()}, {*aux}},
                               [&] { return zk_convert(codec, values, code, extra, numel); });
            return true;
        }
        const uint32_t wrong_codec =
            random.one_in(2) ? 0 : ZK_JOIN8 + 1 + static_cast<uint32_t>(random.below(1u << 30));
        switch (random.below(numel ? 5 : 2)) {
            case 0:
                expect_refusal("zk_convert", execution, result,
                               [&] { return zk_convert(wrong_codec, values, code, extra, numel); });
                break;
            case 1:
                expect_refusal("zk_convert", execution, result,
                               [&] { return zk_convert(codec, values, code, extra, -1 - numel); });
                break;
            case 2:
                expect_refusal("zk_convert", execution, result,
                               [&] { return zk_convert(codec, nullptr, code, extra, numel); });
                break;
            case 3:
                expect_refusal("zk_convert", execution, result,
                               [&] { return zk_convert(codec, values, nullptr, extra, numel); });
                break;
            default:
                expect_refusal("zk_convert", execution, result,
                               [&] { return zk_convert(codec, values, code, nullptr, numel); });
                break;
        }
        return false;
    });
}

Counts fuzz_stream(Random &random, uint64_t executions) {
    return repeat(random, executions, [&](uint64_t execution, Digest &) {
        const int64_t nbytes = 64 * static_cast<int64_t>(random.below(20));
        std::vector<std::unique_ptr<Buffer>> memory;
        std::vector<void *> pointers[3];
        int counts[3];
        for (int role = 0; role < 3; ++role) {
            counts[role] = static_cast<int>(random.below(4));
            for (int i = 0; i < counts[role]; ++i) {
                // Writes go past the caches and are aligned; malloc's 16 bytes are brought to 64.
                memory.push_back(std::make_unique<Buffer>(Kind::bytes, nbytes + 64, 0));
                memory.back()->fill(random);
                const uint64_t address = reinterpret_cast<uint64_t>(memory.back()->data());
                pointers[role].push_back(memory.back()->data() +
                                         (role == 2 ? (64 - address % 64) % 64 : random.below(16) * 4));
            }
        }
        const void *const *reads = const_cast<const void *const *>(pointers[0].data());
        const auto call = [&](int nread, int64_t length) {
            return zk_stream(reads, nread, pointers[1].data(), counts[1], pointers[2].data(), counts[2], length);
        };
        if (!random.one_in(4)) {
            if (const int code = call(counts[0], nbytes))
                fail("zk_stream", execution, "a valid call was refused", code);
            return true;
        }
        int code = ZK_OK;
        switch (random.below(4)) {
            case 0:
                code = call(counts[0], nbytes + 1 + static_cast<int64_t>(random.below(63)));
                break;
            case 1:
                code = call(random.one_in(2) ? -1 : 9, nbytes);
                break;
            case 2:
                code = call(counts[0], -64);
                break;
            default:
                reads = nullptr;
                code = call(1 + static_cast<int>(random.below(8)), nbytes);
        }
        if (code == ZK_OK) fail("zk_stream", execution, "spoilt arguments were accepted", nbytes);
        return false;
    });
}

}  // namespace fuzz
