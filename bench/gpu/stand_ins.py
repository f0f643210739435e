"""What plays the part of CUDA in a rehearsal, where there is none."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class StandInTable:
    """The calls of `zerokern.kernels.cuda.HostTable`, made by torch on host tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], bucket_dtype: torch.dtype) -> None:
        self._numels = [tensor.numel() for tensor in tensors]
        self._dtype = bucket_dtype

    def gather(self, tensors: Sequence[torch.Tensor], bucket: torch.Tensor, *, stats: torch.Tensor) -> None:
        torch.cat([tensor.to(self._dtype) for tensor in tensors], out=bucket)
        _report(bucket, stats)

    def scatter(self, bucket: torch.Tensor, tensors: Sequence[torch.Tensor], *, stats: torch.Tensor) -> None:
        for tensor, part in zip(tensors, bucket.split(self._numels), strict=True):
            tensor.copy_(part)
        _report(bucket, stats)


def _report(values: torch.Tensor, stats: torch.Tensor) -> None:
    stats[0] = values.double().square().sum()
    stats[1] = 0.0


class StandInMark:
    """A point that has always been passed: the stand-in's copies run at once."""

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True


class StandInDriver:
    """The calls of `zerokern.memory.CudaDriver`, where host tensors play the device."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def stream(self) -> object:
        return object()

    def mark(self, stream: object) -> StandInMark:
        return StandInMark()

    def follow(self, stream: object, mark: StandInMark) -> None: ...

    def copy(self, stream: object, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for dst, src in pairs:
            dst.copy_(src)

    def pinned(self, tensor: torch.Tensor) -> bool:
        return True
