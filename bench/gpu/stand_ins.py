"""What plays the part of CUDA in a rehearsal, where there is none."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class StandInMark:
    """A point that has always been passed: the stand-in's copies run at once."""

    def wait(self) -> None: ...

    def done(self) -> bool:
        return True


class StandInDriver:
    """The calls of `zerokern.memory.CudaDriver`, where host tensors play the device."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def stream(self, name: str) -> object:
        return object()

    def mark(self, stream: object) -> StandInMark:
        return StandInMark()

    def follow(self, stream: object, mark: StandInMark) -> None: ...

    def copy(self, stream: object, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for dst, src in pairs:
            dst.copy_(src)

    def pinned(self, tensor: torch.Tensor) -> bool:
        return True
