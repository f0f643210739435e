"""The problem of a step on device memory: the values, the truth and the tolerances of `bench.step`, compared there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..buffers import Buffers
from ..contest import WrongResult
from ..shapes import Shape
from ..step import Algorithm, Output, StepProblem

BATCH = 1 << 26


class DeviceBuffers(Buffers):
    """Flat tensors by role and dtype, on the device. Whoever asks for the same gets the same memory."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__(numel)
        self.device = device

    def take(self, role: str, dtype: torch.dtype, numel: int | None = None) -> torch.Tensor:
        numel = self.numel if numel is None else numel
        key = (role, dtype, numel)
        if key not in self._tensors:
            self._tensors[key] = torch.zeros(numel, dtype=dtype, device=self.device)
        return self._tensors[key]


class DeviceProblem(StepProblem):
    """`clip=False`: nobody clips, and the truth does not."""

    def __init__(self, algorithm: Algorithm, shape: Shape, device: torch.device, *, clip: bool = True) -> None:
        self.device = device
        super().__init__(algorithm, shape, DeviceBuffers(shape.span, device))
        self.base = {role: values.to(device) for role, values in self.base.items()}
        self.clips = clip
        if not clip:
            self.clip = 1.0

    def fill(self, role: str, dtype: torch.dtype, base: torch.Tensor | None = None, per: int = 1) -> None:
        super().fill(role, dtype, (self.base[role] if base is None else base).to(self.device), per)

    def zeros(self) -> dict[str, torch.Tensor]:
        """States that nobody has updated yet, one period of each."""
        return {state: torch.zeros_like(self.base[state]) for state in self.algorithm.states}

    def check(self, who: str, outputs: Sequence[Output]) -> None:
        """Compare every element, many tensors at once; raises WrongResult."""
        for output in outputs:
            want = output.want.float()
            bound = want.abs() * output.rtol + output.atol
            if output.slack is not None:
                bound += output.slack.float()
            for pieces in self._batches():
                got = torch.cat([output.read(*piece).float() for piece in pieces])
                at = self._places(pieces)
                wrong = ~((got - want[at]).abs() <= bound[at])
                if wrong.any():
                    first = int(wrong.nonzero()[0])
                    i, element = self._tensor_of(pieces, first)
                    raise WrongResult(
                        f"{who}: {output.role}[{element}] of tensor {i} is {got[first].item():.9g}, "
                        f"the float64 truth is {want[at[first]].item():.9g}"
                    )

    def _batches(self) -> Iterator[list[tuple[int, int, int]]]:
        """(tensor, start, stop), together at most BATCH elements."""
        pieces: list[tuple[int, int, int]] = []
        room = BATCH
        for i, numel in enumerate(self.shape.numels):
            for start in range(0, numel, BATCH):
                stop = min(numel, start + BATCH)
                if stop - start > room:
                    yield pieces
                    pieces, room = [], BATCH
                pieces.append((i, start, stop))
                room -= stop - start
        if pieces:
            yield pieces

    def _places(self, pieces: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Where within the period each element of the pieces lies."""
        offsets = self.shape.offsets
        starts = torch.tensor([offsets[i] + start for i, start, _ in pieces])
        numels = torch.tensor([stop - start for _, start, stop in pieces])
        shift = (starts - (numels.cumsum(0) - numels)).to(self.device).repeat_interleave(numels.to(self.device))
        return (torch.arange(shift.numel(), device=self.device) + shift) % self.period

    @staticmethod
    def _tensor_of(pieces: Sequence[tuple[int, int, int]], place: int) -> tuple[int, int]:
        for i, start, stop in pieces:
            if place < stop - start:
                return i, start + place
            place -= stop - start
        raise IndexError(place)
