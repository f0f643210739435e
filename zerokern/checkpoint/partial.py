"""A model of which each rank has some modules: what saving, loading and exporting ask of it.

The stages of a pipeline are one (zerokern/parallel): a plug of the port "checkpoint model" makes one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from zerokern.checkpoint.ranks import Ranks
from zerokern.core.ports import plugs

__all__ = ["PartialModel", "SharedWeights", "model_of", "names_elsewhere", "shared_weights"]


@dataclass(frozen=True)
class SharedWeights:
    """Weights here of which other ranks have copies: all names of each, the saved one first; and by their names here,
    those that are such copies."""

    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()

    def leave_out(self, items: dict[str, Any], values: dict[str, Any]) -> None:
        """Takes copies out of what is saved: in one process they are names of the one weight."""
        for key in [key for key in items if self._is_copy(key)]:
            del items[key]
        for groups in values["groups"]:
            for group in groups:
                group["params"] = [name for name in group["params"] if name not in self.copies]
        for optimizer in values["optimizers"]:
            optimizer["beside"] = {name: kept for name, kept in optimizer["beside"].items() if name not in self.copies}
        values["aliases"].update({name: self.names[name][0] for name in self.copies if name != self.names[name][0]})

    def _is_copy(self, key: str) -> bool:
        kind, _, name = key.partition(".")
        if kind == "optim":
            name = name.removeprefix("state.").rpartition(".")[0]
        return kind in ("model", "initial", "optim") and name in self.copies


class PartialModel(nn.Module):
    """The modules of one model that are on this rank, whose members are named as the whole model names them.

    All ranks that have a part of the model make these calls together.
    """

    def check(self) -> None:
        """Raises StateError where two of its modules have a member of the same name."""
        raise NotImplementedError

    def shared_weights(self, ranks: Ranks, tensors: Callable[[], Mapping[str, Tensor]]) -> SharedWeights:
        """Which of the `tensors` here other ranks have copies of."""
        raise NotImplementedError

    def names_elsewhere(self, ranks: Ranks, names: Callable[[], Iterable[str]]) -> frozenset[str]:
        """The names that other ranks have of the model, without those here."""
        raise NotImplementedError

    def merge_saved(self, ranks: Ranks, digest: Mapping[str, str], described: Mapping[str, Any], nbytes: int) -> Any:
        """`values`, `places` and `nbytes` of the whole model, of what each rank has `described` of its part."""
        raise NotImplementedError

    def merge_rows(self, ranks: Ranks, digest: str, rows: Sequence[tuple[str, Any, Any]]) -> list[Any]:
        """Rows about the weights of the whole model, which begin with a name, of the rows that each rank has."""
        raise NotImplementedError


def model_of(given: Any) -> Any:
    """A `PartialModel` of what a plug knows as parts of one; what was given otherwise.

    >>> layer = nn.Linear(2, 2)
    >>> model_of(layer) is layer
    True
    """
    for make in plugs("checkpoint model"):
        model = make(given)
        if model is not None:
            return model
    return given


def shared_weights(ranks: Ranks, model: Any, tensors: Callable[[], Mapping[str, Tensor]]) -> SharedWeights:
    """Which of the `tensors` here other ranks have copies of; none, where all ranks have the whole model.

    >>> shared_weights(Ranks.of(None), nn.Linear(2, 2), dict).copies
    frozenset()
    """
    return model.shared_weights(ranks, tensors) if isinstance(model, PartialModel) else SharedWeights()


def names_elsewhere(ranks: Ranks, model: Any, names: Callable[[], Iterable[str]]) -> frozenset[str]:
    """The names that other ranks have of the model, without those here; none, where all ranks have the whole model."""
    return model.names_elsewhere(ranks, names) if isinstance(model, PartialModel) else frozenset()
