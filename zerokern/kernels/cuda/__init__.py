"""CUDA kernels, for what copy engines and Triton do worse: many small spans, and lists as arguments.

``ferry`` copies a list of spans between device memory and pinned host memory. ``BucketLaunches`` moves a list of
tensors into a bucket and out of it without an upload: the implementation "cuda" of `zerokern.kernels.flat`, which takes
it where it is available.

The sources are in the folder `cuda` at the top of the repository. NVRTC compiles them when they are first needed, for
the GPU that is there, into a cache on disk. CuPy loads and launches them: ``available`` says whether all of it is here,
and whether a first launch has given the right bits. Nothing of that is imported before.

    from zerokern.kernels import cuda

    if cuda.available(device):
        cuda.ferry([(pinned, gradient)], stream)
"""

from zerokern.kernels.cuda.bucket import BucketLaunches
from zerokern.kernels.cuda.loader import CUDA, reason, refuse_without
from zerokern.kernels.cuda.spans import ferry, ferry_spans
from zerokern.kernels.cuda.trial import available

__all__ = ["CUDA", "BucketLaunches", "available", "ferry", "ferry_spans", "reason", "refuse_without"]
