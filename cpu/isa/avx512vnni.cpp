#define ZK_NS avx512vnni
#define ZK_VBMI 1
#define ZK_STAGGERED 1
#include "vec/avx512.h"
// The verbs come first: the algorithm is written in them.
#include "isa/isa.inl.h"
