"""`zk.measure`: measures the bytes that a rank holds, by role, to compare them with its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zerokern.core.errors import got
from zerokern.optim.base import FusedOptimizer
from zerokern.optim.chained import unchained
from zerokern.optim.records import on_disk_of
from zerokern.pages import html_page
from zerokern.planner import table
from zerokern.planner.footprint import Footprint
from zerokern.planner.holding import STATES, WORKING, HeldMemory, Holding
from zerokern.planner.recipe import short
from zerokern.zero.kinds import local_of, shardings_of
from zerokern.zero.shard import shard_of

if TYPE_CHECKING:
    from zerokern.memory import Rest

__all__ = ["Measured", "measure"]


@dataclass(frozen=True)
class Measured(HeldMemory):
    """Bytes that this rank holds now, by role and tier, summed over distinct storages.

    `pinned`: bytes that the optimizer has locked in host memory, in whole pages, as in `Plan.pinned`.

    >>> import zerokern as zk
    >>> held = zk.measure(torch.nn.Linear(256, 255))
    >>> held.roles, held.total
    ({'parameters': 262140}, 262140)
    """

    title: str
    held: tuple[Holding, ...]
    world: int = 1
    stage: int = 0
    pinned: int = 0

    def beside(self, plan: Footprint) -> str:
        """Returns the plan's table at its stage with a column of what is held, and by how much it differs.

        >>> import zerokern as zk
        >>> model = torch.nn.Linear(1024, 1024)
        >>> print(zk.measure(model).beside(zk.plan(model, stage=0, optimizer=None)))  # doctest: +ELLIPSIS
        ### Linear, 1M parameters in 2 tensors, on 1 rank
        ...
        """
        if (plan.world, plan.stage) != (self.world, self.stage):
            raise ValueError(
                f"the plan is of stage {plan.stage} on {plan.world} ranks, what was measured of stage {self.stage} on "
                f"{self.world}; plan that: zk.plan(model, stage={self.stage}, world={self.world})"
            )
        return table.compared_page(plan, self)

    def __str__(self) -> str:
        return table.held_page(self.title, self)

    def _repr_html_(self) -> str:
        return html_page(str(self))


def measure(model: nn.Module, opt: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None) -> Measured:
    """Measures what this rank holds of a model and its optimizer right now, in the roles that `zk.plan` uses.

    `opt`: also several, such as `zk.Muon` and `zk.AdamW`, which update different parameters. It works on any module:
    under `zk.shard`, under FSDP2, or plain. Activations and step counts are not included.

    >>> import zerokern as zk
    >>> model = torch.nn.Linear(256, 256, bias=False)
    >>> opt = zk.AdamW(model.parameters())
    >>> model(torch.ones(1, 256)).sum().backward(); opt.step()
    >>> zk.measure(model, opt).roles
    {'parameters': 262144, 'gradients': 262144, 'exp_avg': 262144, 'exp_avg_sq': 262144}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(got("model", model, "an nn.Module"))
    opts = unchained(list(opt) if isinstance(opt, Iterable) else opt)
    for one in opts:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(got("opt", one, "None, a torch.optim.Optimizer, or several of them"))
    params = list(model.parameters())
    if not params:
        raise ValueError(f"{type(model).__name__} has no parameters, so that there is nothing to measure")
    shardings = shardings_of(map(shard_of, params))
    buckets = [one for sharding in shardings for one in sharding.gradient_buckets]
    memories = [one for sharding in shardings for one in sharding.memories] + [one.shown for one in buckets]
    rests = [rest for memory in memories if (rest := getattr(memory, "rest", None)) is not None]
    hosted = [one.shard for sharding in shardings for one in sharding.memories if one.host is not None]
    hosted += [one.shown.reduced for one in buckets if one.memory.host is not None and one.shown.reduced is not None]
    computing = next((one.group.device for one in shardings if hosted), params[0].device)
    tally = _Tally(computing.type, rests, hosted)
    for sharding in shardings:
        for role, tensors in sharding.holdings().items():
            for tensor in tensors:
                tally.add(role, tensor)
    for param in params:
        if shard_of(param) is None:
            tally.add("parameters", param.detach())
        if param.grad is not None:
            tally.add("gradients", param.grad)
    for one in opts:
        _of_optimizer(one, tally)
    world = max((sharding.group.size for sharding in shardings), default=1)
    stage = max((sharding.stage for sharding in shardings), default=0)
    rooms = [one.holdings.room for one in opts if isinstance(one, FusedOptimizer)]
    pinned = sum(room.nbytes for room in rooms if room is not None)
    return Measured(f"{type(model).__name__}, what this rank holds", tuple(tally.rows()), world, stage, pinned)


class _Tally:
    """Adds up bytes by (role, format, tier). A storage counts once, for the first role that has it.

    What rests on disk counts there, and also in memory while it is fetched. `hosted`: tensors in host memory beside a
    device that computes.
    """

    def __init__(self, device: str, resting: Iterable[Rest], hosted: Iterable[Tensor] = ()) -> None:
        self.device = device
        self._hosted = {tensor.untyped_storage().data_ptr() for tensor in hosted}
        self._resting = {rest.memory.untyped_storage().data_ptr(): rest for rest in resting}
        self._seen: set[int] = set()
        self._keep: list[Tensor] = []  # a storage that is freed meanwhile could lend its address to the next
        self._found = Counter[tuple[str, str, str]]()

    def add(self, role: str, tensor: Tensor, form: str = "") -> None:
        local = local_of(tensor)
        storage = local.untyped_storage()
        if storage.nbytes() == 0 or local.device.type == "meta" or storage.data_ptr() in self._seen:
            return
        self._seen.add(storage.data_ptr())
        self._keep.append(local)
        tier = "device" if local.device.type == self.device else local.device.type
        tier = "cpu" if storage.data_ptr() in self._hosted else tier
        rest = self._resting.get(storage.data_ptr())
        if rest is not None:
            if rest.is_here:
                self.put("gathered" if role == "parameters" else "buffers", "", tier, storage.nbytes())
            tier = "nvme"
        self.put(role, form or _format(local), tier, storage.nbytes())

    def put(self, role: str, form: str, tier: str, nbytes: int) -> None:
        self._found[role, form if role in STATES else "", tier] += nbytes

    def rows(self) -> Iterator[Holding]:
        order = [*STATES, *WORKING]
        keys = sorted(self._found, key=lambda key: order.index(key[0]) if key[0] in order else len(order))
        return (Holding(*key, self._found[key]) for key in keys if self._found[key])


def _of_optimizer(opt: torch.optim.Optimizer, tally: _Tally) -> None:
    here = opt.holdings if isinstance(opt, FusedOptimizer) else None
    host = None if here is None else here.shards.host
    for copy in [] if host is None else host.copies.values():
        if copy.shadow is not None:
            tally.add("shadow", copy.shadow)
        if copy.stays is None:
            tally.add("host parameters", copy.values.detach())
            tally.add("host gradients", copy.grad)
    for entry in opt.state.values():
        if not isinstance(entry, dict):
            continue
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.ndim:
                tally.add(*_role(key, value))
        owner = on_disk_of(entry)
        for key, stand_in in ({} if owner is None else owner.described()).items():
            role, _, form = _role(key, stand_in)
            tally.put(role, form, "nvme", stand_in.nbytes)
    beside = None if here is None or here.binding is None else here.binding.beside
    tally.put("ring", "", "device", 0 if beside is None else beside.ring_nbytes)
    disk = None if here is None else here.disk
    if disk is not None and disk.is_open:
        tally.put("ring", "", "cpu", sum(slot.lease.nbytes for slot in disk.ring.slots))


def _role(key: str, value: Tensor) -> tuple[str, Tensor, str]:
    """Returns the role, the tensor and its format; int8 codes and their scales have one role."""
    role = key.removesuffix("_scale")
    return role, value, "int8" if role != key or value.dtype is torch.uint8 else _format(value)


def _format(value: Tensor) -> str:
    return short(str(value.dtype).removeprefix("torch."))
