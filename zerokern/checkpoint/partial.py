"""A model of which each rank has only some modules, such as the stages of a pipeline.

A plug of the port "checkpoint model" makes one of the stages of a pipeline (zerokern/parallel).
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
    """Weights that other ranks have copies of. `names`: all names of each, the saved one first; `copies`: which ones
    are copies."""

    names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()

    def leave_out(self, items: dict[str, Any], values: dict[str, Any]) -> None:
        """Removes copies from what is saved, and records them as aliases, as if the model were in one process."""
        for key in list(items):
            kind, _, name = key.partition(".")
            name = name.removeprefix("state.").rpartition(".")[0] if kind == "optim" else name
            if kind in ("model", "initial", "optim") and name in self.copies:
                del items[key]
        for groups in values["groups"]:
            for group in groups:
                group["params"] = [name for name in group["params"] if name not in self.copies]
        for optimizer in values["optimizers"]:
            optimizer["beside"] = {name: kept for name, kept in optimizer["beside"].items() if name not in self.copies}
        values["aliases"].update({name: self.names[name][0] for name in self.copies if name != self.names[name][0]})


class PartialModel(nn.Module):
    """The modules of one model that are on this rank, with the member names that they have in the whole model.

    All ranks that have a part of the model call these methods together.
    """

    def check(self) -> None:
        """Raises StateError if two of its modules have a member of the same name."""
        raise NotImplementedError

    def shared_weights(self, ranks: Ranks, tensors: Callable[[], Mapping[str, Tensor]]) -> SharedWeights:
        """Returns which `tensors` are copies of weights on other ranks."""
        raise NotImplementedError

    def names_elsewhere(self, ranks: Ranks, names: Callable[[], Iterable[str]]) -> frozenset[str]:
        """Returns names of the model that only other ranks have."""
        raise NotImplementedError

    def merge_saved(self, ranks: Ranks, digest: Mapping[str, str], described: Mapping[str, Any], nbytes: int) -> Any:
        """Returns `values`, `places` and `nbytes` of the whole model, merged from what each rank `described` of its
        part."""
        raise NotImplementedError

    def merge_rows(self, ranks: Ranks, digest: str, rows: Sequence[tuple[str, Any, Any]]) -> list[Any]:
        """Returns rows about the weights of the whole model, each beginning with a name, merged from the rows of all
        ranks."""
        raise NotImplementedError


def model_of(given: Any) -> Any:
    """Returns a `PartialModel` if a plug recognizes the object as part of a model, else the object itself.

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
    """Returns which `tensors` are copies of weights on other ranks; none if every rank has the whole model.

    >>> shared_weights(Ranks.of(None), nn.Linear(2, 2), dict).copies
    frozenset()
    """
    return model.shared_weights(ranks, tensors) if isinstance(model, PartialModel) else SharedWeights()


def names_elsewhere(ranks: Ranks, model: Any, names: Callable[[], Iterable[str]]) -> frozenset[str]:
    """Returns names of the model that only other ranks have; none if every rank has the whole model."""
    return model.names_elsewhere(ranks, names) if isinstance(model, PartialModel) else frozenset()
