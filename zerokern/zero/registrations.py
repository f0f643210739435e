"""`Registrations`: the places in modules where a unit's parameters are registered, the user's or the full ones."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.memory.addresses import TensorBodies
from zerokern.zero import checks
from zerokern.zero.hooks import graph_task, in_backward
from zerokern.zero.kinds import without_waiting
from zerokern.zero.params import BucketEntry
from zerokern.zero.sharded import Sharded

__all__ = ["Registration", "Registrations"]

Registration = tuple[dict[str, Any], str]
"""The parameters of a module by name, and one of these names."""

_is_trained = operator.attrgetter("requires_grad")


class Registrations:
    """The places where the parameters of one unit are registered. They name the full ones while modules compute."""

    def __init__(
        self, module: nn.Module, entries: Sequence[BucketEntry], places: dict[int, list[Registration]]
    ) -> None:
        """`places`: of parameters, by their ids."""
        self._entries = entries
        self._params: list[Tensor] = [entry.param for entry in entries]
        self.fulls = [entry.full for entry in entries if entry.full is not None]
        pairs = zip(self.fulls, self._params, strict=True)
        self._places = [(*place, param, full) for full, param in pairs for place in places[id(param)]]
        self._whose, self._names = [one[0] for one in self._places], [one[1] for one in self._places]
        self._place_params, self._place_fulls = [one[2] for one in self._places], [one[3] for one in self._places]
        tables = {id(table): table for table, *_ in self._places}
        # by table, what it has while modules compute, and between that
        self._all_full, self._all_sharded = (
            [(one, {place[1]: place[kind] for place in self._places if place[0] is one}) for one in tables.values()]
            for kind in (3, 2)
        )
        self._is_full = False
        self._bodies = TensorBodies([*self._params, *self.fulls])
        rnns = [one for one in module.modules() if isinstance(one, nn.RNNBase) and id(one._parameters) in tables]
        self._rnns = list(map(weakref.ref, rnns))

    def register_full(self, *, materialized: bool) -> None:
        """Let the modules compute with the full parameters. `materialized`: some may be full already."""
        self._is_full = True
        if graph_task() == -1:  # a hook within the last pass may have frozen or thawed the parameters alone
            self._freeze_alike(self._params, self.fulls)
        found = list(map(dict.get, self._whose, self._names))
        if not materialized and all(map(operator.is_, found, self._place_params)):
            for table, fulls in self._all_full:
                table.update(fulls)
            if self._rnns:
                self._refresh_rnns()
            return
        for one, (there, attribute, param, full) in zip(found, self._places, strict=True):
            if one is not param and one is not full:  # by functional_call, say: that is what is to compute
                self._refuse_stranger(one, param)
            elif isinstance(param, Sharded):
                there[attribute] = full
        self._refresh_rnns()

    def register_sharded(self) -> None:
        """Give the modules back the parameters that the user knows."""
        if self._is_full:
            found = list(map(dict.get, self._whose, self._names))
            if all(map(operator.is_, found, self._place_fulls)):
                for table, params in self._all_sharded:
                    table.update(params)
            else:
                for one, (there, attribute, param, full) in zip(found, self._places, strict=True):
                    if one is full:
                        there[attribute] = param
            if self._rnns:
                self._refresh_rnns()
            self._is_full = False
            if graph_task() == -1:  # the forward may have frozen or thawed the full ones alone
                self._freeze_alike(self.fulls, self._params)

    def _freeze_alike(self, source: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Freezes and thaws the others as the source is."""
        with without_waiting():
            found, count = self._bodies.trained(), len(self._params)
            if found[:count] != found[count:]:
                wanted = map(_is_trained, source)
                for param, other, trained in zip(self._params, others, wanted, strict=True):
                    if _is_trained(other) is not trained and isinstance(param, Sharded):
                        other.requires_grad_(trained)

    def _refuse_stranger(self, found: Tensor | None, param: Tensor) -> None:
        if checks.is_trained(found) and torch.is_grad_enabled() and not in_backward():
            assert found is not None
            checks.refuse_stranger(next(entry.name for entry in self._entries if entry.param is param), found)

    def _refresh_rnns(self) -> None:
        """Recurrent modules keep a list of their parameters besides."""
        for reference in self._rnns:
            module = reference()
            if module is not None:
                module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]
