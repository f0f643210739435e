"""A CUDA kernel, for what copy engines and Triton do worse: many small spans.

``ferry`` copies a list of spans between device memory and pinned host memory. `zerokern.memory` takes it for lists that
have many small ones.

The sources are in the folder `cuda` at the top of the repository. NVRTC compiles them when they are first needed, for
the GPU that is there, into a cache on disk. CuPy loads and launches them: ``available`` says whether all of it is here.
Nothing of that is imported before. A first launch is a trial (`zerokern.memory.span_copies`).

    from zerokern.kernels import cuda

    if cuda.available(device):
        cuda.ferry([(pinned, gradient)], stream)
"""

from zerokern.kernels.cuda.loader import available, reason, refuse_without
from zerokern.kernels.cuda.spans import ferry, ferry_spans

__all__ = ["available", "ferry", "ferry_spans", "reason", "refuse_without"]
