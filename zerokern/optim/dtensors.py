"""Where parameters live, whoever divided them: plain ones, zk.shard's, FSDP2's and other DTensors.

A `DTensorHome` is what a `zerokern.zero.homes.Home` is to zk.shard's: what this rank holds stands in for the parameter.
The two differ in who moves the values: here the program that made the DTensor does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerokern.comm import Team
from zerokern.core.errors import StateError, got
from zerokern.memory.here import Here
from zerokern.zero.homes import alias, home_of
from zerokern.zero.kinds import Placed, Residence, is_divided, over

__all__ = ["Alone", "DTensorHome", "homes_of", "local_gradient", "refuse_int8", "spans_of"]

_PLAIN = (Tensor, nn.Parameter)


class DTensorSharding:
    """The DTensors of one optimizer that are divided over the same ranks; what a `Sharding` is to its model."""

    def __init__(self, mesh: DeviceMesh, dims: Sequence[int]) -> None:
        self.replicated = not dims
        self.stage = 0 if self.replicated else 3
        self.group = Team(mesh, dims)
        self.team = None if self.replicated else self.group
        self.teams = [] if self.replicated else [self.group]
        self.everyone = Team(mesh, range(mesh.ndim))  # those with copies too
        self.publisher = None  # nothing moves
        self.homes: list[DTensorHome] = []

    @property
    def zero_order(self) -> list[Tensor]:
        """The parameters."""
        return [home.param for home in self.homes]

    def publish(self) -> None:
        """Nothing moves; writes to pieces count as writes to their parameters, which their owner has accounted for."""
        trained = [home for home in self.homes if home.param.requires_grad]
        known = [home for home in trained if not home.written]
        torch.autograd.graph.increment_version([t for home in trained for t in (home.param, home.local)])
        for home in known:
            home.seen_versions = home.versions

    def fold(self, factor: float | Tensor) -> None:
        """Scale the gradients by a factor, now: any optimizer may step a DTensor, and most would not know of it."""
        with torch.no_grad():
            for home in self.homes:
                grad = local_gradient(home.param)
                if grad is not None:
                    grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)

    def take_fold(self) -> float:
        """No factor is ever pending."""
        return 1.0


class Alone(Residence):
    """Of a plain parameter, or of what is to be taken for one: all of it is here, and it is its own piece."""

    def __init__(self, name: str, param: Tensor) -> None:
        self.name, self.here, self.piece = name, Here.span(param.shape, 0, param.numel()), param
        self.shape, self.start, self.numel = param.shape, 0, param.numel()

    def look(self, param: Tensor) -> None:
        pass

    def stays(self, param: Tensor) -> bool:
        return param is self.piece and home_of(param) is None and not is_divided(param)

    def local_gradient(self, param: Tensor) -> Tensor | None:
        return param.grad

    def take(self, key: str, value: Any, *, own: bool = False) -> Any:
        return value

    def show(self, key: str, value: Any, before: Any = None) -> Any:
        return value


class DTensorHome(Residence):
    """Of a DTensor: its piece is flat, over the memory of the local tensor."""

    here: Placed

    def __init__(self, name: str, param: DTensor, sharding: DTensorSharding) -> None:
        self.param, self.sharding = param, sharding
        self.local = _local_of(name, param)
        here = Placed.by(param, sharding.group)
        if self.local.numel() != here.numel:
            do = "every rank must hold what its placements say"
            raise ValueError(got(f"{name}.to_local()", tuple(self.local.shape), f"{here.sizes}", do))
        super().__init__(name, here, alias(self.local, 0, (here.numel,)), param.requires_grad)
        if hasattr(self.piece, "grad_dtype"):
            self.piece.grad_dtype = None  # whatever the gradients come in
        self._address, self._spec = self.local.data_ptr(), param._spec
        self.seen_versions = self.versions

    @property
    def versions(self) -> tuple[int, int]:
        """Writes to the DTensor do not count on the tensor within, nor the other way round."""
        return self.param._version, self.local._version

    @property
    def written(self) -> bool:
        """Whether anybody else has written to the parameter since its owner last looked."""
        return self.seen_versions != self.versions

    def look(self, param: Tensor) -> None:
        versions = self.versions
        if versions != self.seen_versions:
            torch.autograd.graph.increment_version(self.piece)
            self.seen_versions = versions

    def stays(self, param: Tensor) -> bool:
        """As everywhere; its values lie where they did, too."""
        if param is not self.param or not isinstance(param, DTensor):
            return False
        local = param._local_tensor
        return (
            (local is self.local or (local.shape == self.local.shape and local.dtype == self.local.dtype))
            and local.data_ptr() == self._address
            and local.device == self.piece.device
            and (param._spec is self._spec or param._spec == self._spec)
        )

    def local_gradient(self, param: Tensor) -> Tensor | None:
        grad = local_gradient(self.param, self.name)
        if grad is None:
            return None
        if not self.sharding.replicated:
            self.sharding.group.join()  # here, not on a thread of the update
        return grad


def homes_of(params: Sequence[Tensor], names: Sequence[str], before: Sequence[Residence] = ()) -> list[Residence]:
    """Where each parameter lives. Of those `before`, the ones of DTensors that still fit are kept.

    >>> homes_of([nn.Parameter(torch.ones(2))], ["weight"])
    [Alone('weight', elements 0:2 of (2,))]
    """
    known = {id(home.param): home for home in before if isinstance(home, DTensorHome)}
    shardings = {(home.here.mesh, home.here.dims): home.sharding for home in known.values()}
    found: list[Residence] = []
    for name, param in zip(names, params, strict=True):
        last = known.get(id(param))
        if not isinstance(param, DTensor) or home_of(param) is not None:
            found.append(home_of(param) or Alone(name, param))
        elif last is not None and last.stays(param):
            found.append(last)
        else:
            mesh, dims = param.device_mesh, _divided(name, param)
            if (mesh, dims) not in shardings:
                shardings[mesh, dims] = DTensorSharding(mesh, dims)
            found.append(DTensorHome(name, param, shardings[mesh, dims]))
    for sharding in shardings.values():
        sharding.homes = [home for home in found if home.sharding is sharding]
    return found


def refuse_int8(homes: Iterable[Residence]) -> None:
    """Blocks are counted from a whole parameter's element 0, so no block may be on two ranks."""
    for home in homes:
        if home.here.misaligned:
            do = f"{home.here.misaligned}, so {home.name} goes into a param_group with state_format='fp32'"
            raise ValueError(got("state_format", "int8", "'fp32' or 'bf16'", do))


def local_gradient(param: DTensor, name: str = "a parameter") -> Tensor | None:
    """This rank's elements of a DTensor's gradient, 1-D and in the gradient's own memory; None where it has none.

    A gradient that is divided in another way (a partial sum) is divided as the parameter is, once.
    """
    grad = param.grad
    if grad is None:
        return None
    if not isinstance(grad, DTensor):
        do = "DTensor.from_local makes one of this rank's part"
        raise StateError(got(f"{name}.grad", type(grad).__name__, "a DTensor, as the parameter is", do))
    local = grad._local_tensor
    same = grad._spec is param._spec or tuple(grad.placements) == tuple(param.placements)
    if not same or not local.is_contiguous() or type(local) not in _PLAIN:
        with torch.no_grad():
            there = grad.redistribute(param.device_mesh, param.placements)
            local = there.to_local().contiguous()  # waits for what is under way
            param.grad = over(local, param.device_mesh, param.placements, param.shape, param.stride())
    return local.detach().view(-1)


def spans_of(params: Iterable[Tensor]) -> list[tuple[Team, list[Tensor]]]:
    """This rank's elements of the gradients of DTensors, by the ranks that hold the others; replicated ones alone."""
    found: dict[Any, list[Tensor]] = {}
    for number, param in enumerate(params):
        if not isinstance(param, DTensor) or home_of(param) is not None:
            continue
        name = f"parameter {number}"
        grad = local_gradient(param, name)
        if grad is not None:
            found.setdefault((param.device_mesh, _divided(name, param)), []).append(grad)
    return [(Team(mesh, dims), grads) for (mesh, dims), grads in found.items()]


def _divided(name: str, param: DTensor) -> tuple[int, ...]:
    """The dimensions of the mesh that the parameter is divided along."""
    if any(placement.is_partial() for placement in param.placements):
        do = f"{name}.redistribute(placements=...) sums it up"
        raise ValueError(got(f"{name}.placements", tuple(param.placements), "Shard and Replicate", do))
    return tuple(dim for dim, placement in enumerate(param.placements) if not placement.is_replicate())


def _local_of(name: str, param: DTensor) -> Tensor:
    """The tensor within, without the padding that FSDP2 keeps behind it."""
    local = param._local_tensor
    if type(local) not in _PLAIN:
        raise TypeError(got(f"{name}.to_local()", type(local).__name__, "torch.Tensor", "pass the tensor it wraps"))
    if not local.is_contiguous():
        do = "make the DTensor of a contiguous local tensor"
        raise ValueError(got(f"{name}.to_local().stride()", tuple(local.stride()), "a contiguous one", do))
    return local
