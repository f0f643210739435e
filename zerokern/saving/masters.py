"""The exact values that parameters were rounded from, where their optimizer or their sharding keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zerokern.kernels import join
from zerokern.optim.checkpointed import Checkpointed
from zerokern.optim.disk import Disk
from zerokern.optim.dtensors import DTensorHome
from zerokern.optim.records import OnDisk, on_disk_of
from zerokern.saving.parameters import named_tensors
from zerokern.zero.boxes import runs
from zerokern.zero.homes import Home, home_of

__all__ = ["exact_parts"]

Values = Callable[[int, int], Tensor]  # elements from begin to end, 1-D
ExactPart = tuple[int, int, Values]  # start in the tensor, numel, and what gives them


def exact_parts(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, list[ExactPart]]:
    """By name, this rank's elements of the parameters that have a master, a remainder, or exact initial values.

    >>> exact_parts(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters()))
    {}
    """
    found: dict[str, list[ExactPart]] = {}
    known = _known(opt) if isinstance(opt, Checkpointed) else {}
    disk = _OneAtATime(opt._disk) if isinstance(opt, Checkpointed) and opt._disk is not None else None
    for name, param in named_tensors(model).items():
        home = home_of(param)
        piece, where, entry = known.get(id(param)) or known.get(id(getattr(home, "piece", None))) or (None, home, None)
        values = None
        if piece is not None and entry:
            values = _of_state(piece, entry, disk)
        elif home is not None:
            values, where = _initial(home, param), home
        if home is not None and not home.numel:
            found[name] = []  # its owner has them: what is whole here is rounded
        elif values is not None:
            found[name] = [(start, numel, _from(values, first)) for start, numel, first in _places(param, where)]
    return found


def _known(opt: Checkpointed) -> dict[int, tuple[Tensor, Any, Any]]:
    """By parameter: what is updated in its place, where that lies, and its state; as of the last step."""
    opt._finish()
    opt._refuse_if_torn()
    opt._catch_up()
    local, held = opt._local, opt._held
    everyone = [param for group in opt.param_groups for param in group["params"]]
    if local is None:
        return {id(param): (param, None, held.get(param)) for param in everyone}
    triples = zip(local.everyone, local.pieces, local.homes, strict=True)
    return {id(param): (piece, home, held.get(piece)) for param, piece, home in triples}


def _of_state(piece: Tensor, entry: dict[str, Any], disk: _OneAtATime | None) -> Values | None:
    owner = on_disk_of(entry)
    if owner is not None and disk is not None:
        return (lambda begin, end: disk.values(owner, begin, end)) if owner.has_master else None
    if "master" in entry:
        master = entry["master"].detach().reshape(-1)
        return lambda begin, end: master[begin:end]
    if "remainder" in entry:
        high, low = piece.detach().reshape(-1), entry["remainder"].detach().reshape(-1)
        return lambda begin, end: join(high[begin:end], low[begin:end])
    return None


class _OneAtATime:
    """State on disk, of which one parameter's is in memory."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._owner: OnDisk | None = None
        self._values: Values | None = None

    def values(self, owner: OnDisk, begin: int, end: int) -> Tensor:
        if self._owner is not owner:
            self._owner, self._values = owner, None  # the last one's memory first
            (entry,) = self._disk.read([owner])
            self._values = _of_state(owner.param, entry, None)
        assert self._values is not None
        return self._values(begin, end)


def _initial(home: Home, param: Tensor) -> Values | None:
    """What zk.shard or zk.load_pretrained has kept for an optimizer that has not stepped yet."""
    kept, piece = home._initial, home.piece.detach()
    if kept is None or (piece._version, param._version) != (home._initial_version, home.seen_version):
        return None
    if kept.dtype is torch.float32:
        return lambda begin, end: kept[begin:end]
    return lambda begin, end: join(piece[begin:end], kept[begin:end])


def _places(param: Tensor, home: Home | DTensorHome | None) -> list[tuple[int, int, int]]:
    """Which elements of the whole these are: start, numel, and the first one's place among them."""
    if home is None:
        return [(0, param.numel(), 0)]
    if isinstance(home, DTensorHome):
        return runs(param.shape, home.cut.offsets, home.cut.local_shape)
    return [(home.start, home.numel, 0)]


def _from(values: Values, first: int) -> Values:
    return lambda begin, end: values(first + begin, first + end)
