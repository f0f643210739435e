// The whole algorithm, compiled once per instruction set: the includer names the namespace and the verbs.
#include "accumulate/accumulate.inl.h"
#include "adagrad/adagrad.inl.h"
#include "adam/adam.inl.h"
#include "codec/convert.inl.h"
#include "lion/lion.inl.h"
#include "muon/muon.inl.h"
#include "sgd/sgd.inl.h"
#include "stream/stream.inl.h"
#include "sumsq/sumsq.inl.h"
#include "update/lifted_block.inl.h"

namespace zk {
namespace ZK_NS {
namespace {

// The combinations that training runs on have kernels of their own; the rest shares one per rule and state.
template <class Rule, int S>
UpdateFn pick(const zk_group &g, int target) {
    if constexpr (Rule::STATES == 2 && W > 1) {
        if (g.grad == ZK_BF16 && g.out == ZK_NONE && target == TO_SPLIT16)
            return Update<Rule, ZK_BF16, TO_SPLIT16, S, ZK_NONE>::run;
        if (g.grad == ZK_BF16 && g.out == ZK_NONE && target == TO_SPLIT8)
            return Update<Rule, ZK_BF16, TO_SPLIT8, S, ZK_NONE>::run;
        if (g.grad == ZK_BF16 && g.out == ZK_BF16 && target == TO_FP32)
            return Update<Rule, ZK_BF16, TO_FP32, S, ZK_BF16>::run;
        if (g.grad == ZK_F32 && g.out == ZK_NONE && target == TO_FP32)
            return Update<Rule, ZK_F32, TO_FP32, S, ZK_NONE>::run;
    }
    return Update<Rule, ANY, ANY, S, ANY>::run;
}

UpdateFn update(const zk_group &g, int target) {
    switch (g.algorithm) {
        case ZK_ADAM:
            return g.state == ZK_F32    ? pick<AdamRule, ZK_F32>(g, target)
                   : g.state == ZK_BF16 ? pick<AdamRule, ZK_BF16>(g, target)
                   : g.state == ZK_INT8 ? pick<AdamRule, ZK_INT8>(g, target)
                                        : nullptr;
        case ZK_LION:
            return g.state == ZK_F32    ? pick<LionRule, ZK_F32>(g, target)
                   : g.state == ZK_BF16 ? pick<LionRule, ZK_BF16>(g, target)
                   : g.state == ZK_INT8 ? pick<LionRule, ZK_INT8>(g, target)
                                        : nullptr;
        case ZK_ADAGRAD:
            return g.state == ZK_F32    ? pick<AdagradRule, ZK_F32>(g, target)
                   : g.state == ZK_BF16 ? pick<AdagradRule, ZK_BF16>(g, target)
                                        : nullptr;
        case ZK_SGD:
            return g.state == ZK_F32    ? pick<SgdRule, ZK_F32>(g, target)
                   : g.state == ZK_BF16 ? pick<SgdRule, ZK_BF16>(g, target)
                   : g.state == ZK_NONE ? pick<SgdRule, ZK_NONE>(g, target)
                                        : nullptr;
        case ZK_MUON:
            return muon(g);
        default:
            return nullptr;
    }
}

}  // namespace

#define ZK_STRING_(x) #x
#define ZK_STRING(x) ZK_STRING_(x)
extern const IsaTable table;
const IsaTable table = {ZK_STRING(ZK_NS), update, sumsq, accumulate, convert, stream};

}  // namespace ZK_NS
}  // namespace zk
