"""A GPT by its shape alone: the formulas of ZeRO-Infinity for states, activations, checkpoints and working memory."""

from __future__ import annotations

from dataclasses import dataclass

from zerokern.core.errors import got

__all__ = ["Transformer"]

_STATES = 20  # bytes per parameter: fp16 parameter, fp32 gradient and its fp16 source, fp32 master and two averages
_WORKING = 16  # bytes by hidden², of the largest operator (hidden to 4 hidden): fp16 parameters and gradients


@dataclass(frozen=True)
class Transformer:
    """`layers` blocks of 12 hidden² parameters; with `heads`, `batch` (per rank) and `seq` also its activations.

    `ci` is how many blocks lie between two activation checkpoints.

    >>> gpt = Transformer(128, 25 * 1024, heads=256, batch=32, seq=1024)
    >>> f"{gpt.numel / 1e12:.2f} T, states {gpt.states / 2**40:.2f} TiB, checkpoints {gpt.checkpoints / 2**40:.2f} TiB"
    '1.01 T, states 18.31 TiB, checkpoints 0.20 TiB'
    """

    layers: int
    hidden: int
    heads: int | None = None
    batch: int | None = None
    seq: int | None = None
    ci: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "batch", "seq", "ci"):
            value = getattr(self, name)
            if value is None and name in ("heads", "batch", "seq"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(got(name, value, "a whole number from 1 on"))
        given = [name for name in ("heads", "batch", "seq") if getattr(self, name) is not None]
        if given and len(given) < 3:
            missing = ", ".join(name for name in ("heads", "batch", "seq") if name not in given)
            raise ValueError(
                f"activations follow from heads, batch and seq together; {missing} is missing: give it too"
            )
        if self.ci > self.layers:
            raise ValueError(
                got("ci", self.ci, f"a number of layers between checkpoints, at most layers={self.layers}")
            )

    @property
    def tensors(self) -> tuple[int, ...]:
        """Elements of the parameters of one layer: query, key and value; output; up; down."""
        square = self.hidden * self.hidden
        return 3 * square, square, 4 * square, 4 * square

    @property
    def numel(self) -> int:
        return self.layers * sum(self.tensors)

    @property
    def states(self) -> int:
        """Bytes of model states as the paper counts them, of all ranks together."""
        return _STATES * self.numel

    @property
    def working_states(self) -> int:
        """Bytes of the parameters and gradients of the largest operator."""
        return _WORKING * self.hidden * self.hidden

    @property
    def has_activations(self) -> bool:
        return self.batch is not None

    @property
    def activations(self) -> int:
        """Bytes of all activations, if none is recomputed."""
        return self._layer_activations * self.layers

    @property
    def checkpoints(self) -> int:
        """Bytes of activation checkpoints; where `ci` does not divide the layers, as the paper has it, a fraction."""
        return 2 * self._tokens * self.hidden * self.layers // self.ci

    @property
    def working_activations(self) -> int:
        """Bytes of the activations between two checkpoints, while they are recomputed."""
        return self._layer_activations * self.ci // 2

    @property
    def _tokens(self) -> int:
        return (self.batch or 0) * (self.seq or 0)

    @property
    def _layer_activations(self) -> int:
        return 2 * self._tokens * (16 * self.hidden + 2 * (self.heads or 0) * (self.seq or 0))
