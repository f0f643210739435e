// Every kernel of this folder: what is compiled, and what an editor indexes.
#include "gather.cuh"
#include "scatter.cuh"
