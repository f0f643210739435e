#define ZK_NS avx2
#define ZK_IN_LANES 1
#include "vec/avx2.h"
// The verbs come first: the algorithm is written in them.
#include "isa/isa.inl.h"
