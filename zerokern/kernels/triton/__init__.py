"""The kernels for GPUs, in Triton. Nothing here is imported before a tensor on a GPU asks for it."""
