#define ZK_NS scalar
#include "vec/scalar.h"
// The verbs come first: the algorithm is written in them.
#include "isa/isa.inl.h"
