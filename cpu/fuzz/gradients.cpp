// zk_gradients and what else looks at many tensors, over a framework of its own: tensors are heap blocks of exact
// sizes, and its functions may refuse.
#include <memory>
#include <vector>

#include "fuzz.h"

namespace fuzz {
namespace {

// What a cell points to. A gradient that is undefined is a null cell.
struct Tensor {
    void *address;
    const void *grad;
    int64_t numel;
    int32_t layout, dtype;
    bool contiguous, refuses, negated;
};

const Tensor *in(const void *const *cell) { return static_cast<const Tensor *>(*cell); }

const void *const *grad(const void *tensor) { return &static_cast<const Tensor *>(tensor)->grad; }
int32_t is_defined(const void *const *cell, bool *yes) {
    *yes = *cell != nullptr;
    return 0;
}
int32_t address(const void *const *cell, void **to) {
    *to = in(cell)->address;
    return in(cell)->refuses;
}
int32_t layout(const void *const *cell, int32_t *to) {
    *to = in(cell)->layout;
    return 0;
}
int32_t dtype(const void *const *cell, int32_t *to) {
    *to = in(cell)->dtype;
    return 0;
}
int32_t numel(const void *const *cell, int64_t *to) {
    *to = in(cell)->numel;
    return 0;
}
int32_t is_contiguous(const void *const *cell, bool *yes) {
    *yes = in(cell)->contiguous;
    return 0;
}

bool is_negated(const void *const *cell) { return in(cell)->negated; }

int64_t version(const void *const *cell) { return in(cell)->numel; }
bool requires_grad(const void *tensor) { return static_cast<const Tensor *>(tensor)->contiguous; }

std::vector<const void *> raised;
void note_raised(const void *const *cell) { raised.push_back(*cell); }

constexpr zk_tensor_calls CALLS = {grad, is_defined, address, layout, dtype, numel, is_contiguous, is_negated};

}  // namespace

Counts fuzz_gradients(Random &random, uint64_t executions) {
    Counts counts;
    for (uint64_t i = 0; i < executions; ++i) {
        const size_t count = random.below(40);
        std::vector<std::unique_ptr<Tensor>> params, grads;
        std::vector<const void *> tensors;
        std::vector<void *> addresses;
        std::vector<int64_t> numels;
        std::vector<int32_t> dtypes;
        int64_t first_wrong = static_cast<int64_t>(count);
        const bool anywhere = random.one_in(4), given = random.one_in(2);
        for (size_t t = 0; t < count; ++t) {
            char *place = reinterpret_cast<char *>(uintptr_t{64} * (1 + random.below(1000)));
            grads.push_back(std::make_unique<Tensor>(
                Tensor{place + 8, nullptr, static_cast<int64_t>(random.below(9)), 0, 6, true, false, false}));
            params.push_back(
                std::make_unique<Tensor>(Tensor{place, grads[t].get(), grads[t]->numel, 0, 6, true, false, false}));
            tensors.push_back(params[t].get());
            addresses.push_back(place);
            numels.push_back(grads[t]->numel);
            dtypes.push_back(6);
            if (!random.one_in(60)) continue;
            const uint64_t change = random.below(11);
            if (anywhere && change == 1) {
                params[t]->address = place + 1;
                continue;
            }
            if (first_wrong == static_cast<int64_t>(count)) first_wrong = static_cast<int64_t>(t);
            switch (change) {
                case 0:
                    params[t]->grad = nullptr;
                    break;
                case 1:
                    params[t]->address = place + 1;
                    break;
                case 2:
                    grads[t]->layout = 1;
                    break;
                case 3:
                    grads[t]->dtype = 15;
                    break;
                case 4:
                    ++grads[t]->numel;
                    break;
                case 5:
                    grads[t]->contiguous = false;
                    break;
                case 6:
                    params[t]->dtype = 15;
                    break;
                case 7:
                    ++params[t]->numel;
                    break;
                case 8:
                    params[t]->contiguous = false;
                    break;
                case 9:
                    grads[t]->negated = true;
                    break;
                default:
                    grads[t]->refuses = true;
                    break;
            }
        }
        std::vector<const void *> gradients;  // by themselves, not as their tensors have them
        for (size_t t = 0; t < count; ++t) {
            gradients.push_back(params[t]->grad);
            if (given) params[t]->grad = nullptr;
        }
        std::vector<void *> found(count + 1);  // never null
        const zk_tensor_list list = {tensors.data(),
                                     anywhere ? nullptr : addresses.data(),
                                     given ? gradients.data() : nullptr,
                                     numels.data(),
                                     dtypes.data(),
                                     dtypes.data(),
                                     static_cast<int64_t>(count),
                                     0};
        const int64_t answer = zk_gradients(&CALLS, &list, found.data());
        if (answer != first_wrong) fail("zk_gradients", i, "stopped at the wrong tensor", answer);
        for (int64_t t = 0; t < answer; ++t)
            if (found[static_cast<size_t>(t)] != grads[static_cast<size_t>(t)]->address)
                fail("zk_gradients", i, "wrong address of", t);
        int64_t first_elsewhere = 0;
        while (first_elsewhere < static_cast<int64_t>(count) &&
               params[static_cast<size_t>(first_elsewhere)]->address == addresses[static_cast<size_t>(first_elsewhere)])
            ++first_elsewhere;
        const int64_t place = zk_in_place(&CALLS, tensors.data(), addresses.data(), static_cast<int64_t>(count));
        if (place != first_elsewhere) fail("zk_in_place", i, "stopped at the wrong tensor", place);
        if (zk_in_place(&CALLS, nullptr, nullptr, 1) != ZK_E_NULL) fail("zk_in_place", i, "took null tensors", 0);
        if (zk_gradients(nullptr, &list, found.data()) != ZK_E_NULL) fail("zk_gradients", i, "took null calls", 0);
        std::vector<const void *const *> cells;
        for (const void *const &tensor : tensors) cells.push_back(&tensor);
        const size_t changed = random.below(41);
        std::vector<const void *> before = tensors;
        if (changed < count) before[changed] = nullptr;
        if (zk_in_cells(cells.data(), before.data(), static_cast<int64_t>(count)) !=
            static_cast<int64_t>(changed < count ? changed : count))
            fail("zk_in_cells", i, "stopped at the wrong cell", 0);
        if (zk_in_cells(nullptr, nullptr, 1) != ZK_E_NULL) fail("zk_in_cells", i, "took null cells", 0);
        std::vector<const void *> expected;
        for (size_t t = 0; t < count; ++t) expected.push_back(params[t]->grad);
        size_t other = count, with_one = 0;
        while (with_one < count && !params[with_one]->grad) ++with_one;
        if (zk_have_gradients(&CALLS, tensors.data(), nullptr, static_cast<int64_t>(count)) !=
            static_cast<int64_t>(with_one))
            fail("zk_have_gradients", i, "found none where there is one", 0);
        if (changed < count) {
            other = changed;
            expected[changed] = expected[changed] ? nullptr : tensors[changed];
        }
        if (zk_have_gradients(&CALLS, tensors.data(), expected.data(), static_cast<int64_t>(count)) !=
            static_cast<int64_t>(other))
            fail("zk_have_gradients", i, "stopped at the wrong tensor", 0);
        if (zk_have_gradients(nullptr, nullptr, nullptr, 1) != ZK_E_NULL)
            fail("zk_have_gradients", i, "took null calls", 0);
        std::vector<int64_t> versions(count);
        std::vector<uint8_t> trained(count);
        if (zk_versions(version, tensors.data(), versions.data(), static_cast<int64_t>(count)) !=
                static_cast<int64_t>(count) ||
            zk_trained(requires_grad, tensors.data(), trained.data(), static_cast<int64_t>(count)) !=
                static_cast<int64_t>(count))
            fail("zk_versions", i, "stopped early", 0);
        for (size_t t = 0; t < count; ++t)
            if (versions[t] != params[t]->numel || trained[t] != (params[t]->contiguous ? 1 : 0))
                fail("zk_versions", i, "wrong answer about", static_cast<int64_t>(t));
        if (zk_versions(nullptr, nullptr, nullptr, 1) != ZK_E_NULL ||
            zk_trained(nullptr, nullptr, nullptr, 1) != ZK_E_NULL)
            fail("zk_versions", i, "took null calls", 0);
        raised.clear();
        if (zk_raise_versions(note_raised, cells.data(), static_cast<int64_t>(count)) != static_cast<int64_t>(count))
            fail("zk_raise_versions", i, "stopped early", 0);
        for (size_t t = 0; t < count; ++t)
            if (raised.size() != count || raised[t] != tensors[t]) fail("zk_raise_versions", i, "left out", 0);
        if (zk_raise_versions(nullptr, cells.data(), 1) != ZK_E_NULL)
            fail("zk_raise_versions", i, "took a null call", 0);
        ++(first_wrong == static_cast<int64_t>(count) ? counts.accepted : counts.refused);
    }
    return counts;
}

}  // namespace fuzz
