#define ZK_NS avx512
#include "vec/avx512.h"
// The verbs come first: the algorithm is written in them.
#include "isa/isa.inl.h"
