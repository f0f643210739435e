#define ZK_NS avx512vbmi
#define ZK_VBMI 1
#include "vec/avx512.h"
// The verbs come first: the algorithm is written in them.
#include "isa/isa.inl.h"
