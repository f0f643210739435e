"""The problem of Muon's whole step, momentum to parameters, for the matrices of a Llama."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .buffers import Buffers
from .contest import Provider, WrongResult
from .shapes import LAYERS, llama_matrices, llama_scale
from .simple import noise

__all__ = ["MatrixSteps"]

SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
COEFFICIENTS = (3.4445, -4.775, 2.0315)


class MatrixSteps:
    """fp32 parameters and gradients of all matrices; `numel`: of a whole model, whose embeddings are left out."""

    op = "muon step"

    def __init__(self, numel: int) -> None:
        layer = llama_matrices(llama_scale(numel))
        self.shapes = layer * LAYERS
        self.numel = LAYERS * sum(rows * columns for rows, columns in layer)
        buffers = Buffers(self.numel)
        self.grads = self._views(buffers.take("grad", torch.float32).copy_(noise(self.numel, 1)))
        self._start = noise(self.numel, 2) * 0.02
        self._values = buffers.take("param", torch.float32).copy_(self._start)
        self.params = [torch.nn.Parameter(one) for one in self._views(self._values)]

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        numels = [rows * columns for rows, columns in self.shapes]
        return [part.view(shape) for part, shape in zip(flat.split(numels), self.shapes, strict=True)]

    def provider(
        self,
        name: str,
        wiring: str,
        make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        use_threads: Callable[[int], object],
        products: torch.dtype,
        lossy: str = "",
    ) -> Provider:
        """`products`: what the iteration multiplies in."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        optimizer = make(self.params)

        def check() -> None:
            """A first step of the last matrix, whose singular values differ by a small factor."""
            self._values.copy_(self._start)
            optimizer.state.clear()
            optimizer.step()
            start, end = self._views(self._start)[-1].double(), self.params[-1].detach().double()
            found = (start * (1 - SETTINGS["lr"] * SETTINGS["weight_decay"]) - end) / SETTINGS["lr"]
            want = _orthogonal(self.grads[-1].double())
            off = float((found - want).norm() / want.norm())
            # each step of the iteration rounds three products, and parameters round what is taken from them
            rounded = torch.finfo(torch.float32).eps * float(start.norm() / want.norm()) / SETTINGS["lr"]
            most = 3 * SETTINGS["ns_steps"] * torch.finfo(products).eps + rounded
            if not off <= most:
                raise WrongResult(f"{name} ({wiring}): the last matrix's update is {off:.2g} off, at most {most:.2g}")

        # gradients read; averages and parameters read and written
        return Provider(
            name, optimizer.step, check, self.numel * 20, use_threads, streams=(1, 2, 0), lossy=lossy, wiring=wiring
        )


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Muon's iteration in the dtype of the matrix, which is at least as wide as it is high."""
    a, b, c = COEFFICIENTS
    matrix = matrix / matrix.norm()
    for _ in range(SETTINGS["ns_steps"]):
        square = matrix @ matrix.T
        matrix = a * matrix + (b * square + c * square @ square) @ matrix
    return matrix
