#define ZK_NS neon
#include "vec/neon.h"
// The verbs come first: the algorithm is written in them.
#include "isa/isa.inl.h"
