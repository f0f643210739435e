"""`Registrations`: the places in modules where a unit's parameters are registered, the user's or the full ones."""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.zero import checks
from zerokern.zero.hooks import in_backward
from zerokern.zero.params import BucketEntry
from zerokern.zero.publishing import without_waiting
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
        self._tables, self._names = [one[0] for one in self._places], [one[1] for one in self._places]
        self._place_params, self._place_fulls = [one[2] for one in self._places], [one[3] for one in self._places]
        self._is_full = False
        tables = {id(table) for table, *_ in self._places}
        rnns = [one for one in module.modules() if isinstance(one, nn.RNNBase) and id(one._parameters) in tables]
        self._rnns = list(map(weakref.ref, rnns))

    def register_full(self, *, materialized: bool) -> None:
        """Let the modules compute with the full parameters. `materialized`: some may be full already."""
        self._is_full = True
        if not in_backward():  # a hook within the last pass may have frozen or thawed the parameters alone
            self._freeze_alike(self._params, self.fulls)
        found = self._registered()
        if not materialized and all(map(operator.is_, found, self._place_params)):
            self._register(self._place_fulls)
            return
        for one, (there, attribute, param, full) in zip(found, self._places, strict=True):
            if one is not param and one is not full:  # by functional_call, say: that is what is to compute
                self._refuse_stranger(one, param)
            elif isinstance(param, Sharded):
                there[attribute] = full
        self._refresh_rnns()

    def _registered(self) -> list[Any]:
        return list(map(dict.get, self._tables, self._names))

    def _register(self, tensors: Sequence[Tensor]) -> None:
        """Puts these into all places."""
        deque(map(dict.__setitem__, self._tables, self._names, tensors), maxlen=0)
        self._refresh_rnns()

    def register_sharded(self) -> None:
        """Give the modules back the parameters that the user knows."""
        if self._is_full:
            if all(map(operator.is_, self._registered(), self._place_fulls)):
                self._register(self._place_params)
            else:
                for there, attribute, param, full in self._places:
                    if there.get(attribute) is full:
                        there[attribute] = param
                self._refresh_rnns()
            self._is_full = False
            if not in_backward():  # the forward may have frozen or thawed the full ones alone
                self._freeze_alike(self.fulls, self._params)

    def _freeze_alike(self, source: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Freezes and thaws the others as the source is."""
        with without_waiting():
            wanted, found = list(map(_is_trained, source)), list(map(_is_trained, others))
            if wanted != found:
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
