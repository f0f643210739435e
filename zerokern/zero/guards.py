"""What would train on without the other ranks, and is refused: strange optimizers, and a model that has changed."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zerokern.core.errors import ShardError, StateError
from zerokern.zero import hooks
from zerokern.zero.awaited import without_waiting
from zerokern.zero.computing import stands_for
from zerokern.zero.kinds import local_of, shardings_of
from zerokern.zero.partition import shards_parameters
from zerokern.zero.shard import Shard, give_shard, shard_of

if TYPE_CHECKING:
    from zerokern.zero.sharding import Sharding

__all__ = ["Guard", "install", "is_trained", "refuse_lent", "refuse_stranger"]

# torch's optimizers whose update of an element depends on others
MIXING = tuple(getattr(torch.optim, name) for name in ("LBFGS", "Adafactor", "Muon") if hasattr(torch.optim, name))

_pointer_of = torch.Tensor.data_ptr
_version_of = operator.attrgetter("_version")
_is_trained = operator.attrgetter("requires_grad")
_loan_of = operator.attrgetter("loan")
_reference_of = operator.attrgetter("_zk_shard")


@functools.cache
def install() -> None:
    """Once for the process, when the first model is sharded."""
    hooks.on_optimizer_steps(before=_before, after=_after)
    hooks.on_registration(_known_to_the_user)


def _known_to_the_user(param: torch.Tensor) -> torch.Tensor | None:
    """A module that keeps another's parameter in its forward keeps the one that lasts, not what stands for it there."""
    return stands_for(param)


def _homes(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Shard]]:
    everyone = ((param, shard_of(param)) for group in optimizer.param_groups for param in group["params"])
    return [(param, home) for param, home in everyone if home is not None]


def _before(optimizer: torch.optim.Optimizer) -> None:
    if getattr(optimizer, "_zk_shards", False):
        return
    homes = _homes(optimizer)
    for param, home in homes:
        if param is home.piece:
            if isinstance(optimizer, MIXING):
                kind = type(optimizer).__name__
                raise StateError(
                    f"{kind} mixes elements, of a parameter or of all, and got {home.name!r} by zk.shards(model), "
                    "of which each rank has a flat part alone; allowed: optimizers that take each element by itself. "
                    f"For {kind} use stage 0 and model.parameters()"
                )
            home.local_gradient(param)
        elif not home.sharding.replicated:
            raise StateError(
                f"{type(optimizer).__name__} was given {home.name!r}, which is sharded at stage {home.sharding.stage}: "
                "it would update parts of it that are not this rank's. Use zk.AdamW (or Adam, Lion, Adagrad, SGD) on "
                f"model.parameters(), or give {type(optimizer).__name__} the parameters zk.shards(model)"
            )
    refuse_lent(home for _, home in homes)
    for sharding in shardings_of(home for _, home in homes):
        sharding.settle()


def refuse_lent(homes: Iterable[Shard | None]) -> None:
    """A step within zk.gathered would not be seen there, and be overwritten at its end."""
    known = [home for home in homes if home is not None]
    for home in known if list(map(_loan_of, known)).count(None) < len(known) else ():
        if home.loan is not None:
            raise StateError(
                f"{home.name!r} is whole within zk.gathered, where a step would not be seen, and be lost with "
                "write=True; call step() after the context has ended"
            )


def _after(optimizer: torch.optim.Optimizer) -> None:
    if not getattr(optimizer, "_zk_shards", False):
        for sharding in shardings_of(home for param, home in _homes(optimizer) if param is home.piece):
            sharding.publish()


class Guard:
    """Whether a model still consists of what zk.shard divided, and gradients still come to it: asked at every forward.

    All of it is compared by loops that are not Python's; only what differs is looked at.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = weakref.ref(sharding)
        self._tables: list[dict[str, Any]] = []
        self._found: list[Any] = []
        tenants = [tenant for memory in sharding.memories for tenant in memory.tenants]
        frozen = [tenant for memory in sharding.memories if not memory.bucket.trainable for tenant in memory.tenants]
        self._frozen = [tenant.param for tenant in frozen]
        self.before_forward: list[Callable[[], None]] = []  # other checks of a forward with gradients
        # at stage 3 bodies are exchanged all the time, and gradients come through the gathered ones
        self._plain = [] if shards_parameters(sharding.stage) else tenants
        self._params = [tenant.param for tenant in self._plain]
        homes = {home.name: home for home in sharding.homes}
        self._homes = [homes[tenant.name] for tenant in self._plain]
        self._references = list(map(_reference_of, self._params))
        self._addresses = self._whereabouts()
        self._versions = list(map(_version_of, self._params))
        if self._params:
            for module in sharding.module.modules():
                hooks.after_loading(module, partial(_attend, weakref.ref(self)))

    @property
    def sharding(self) -> Sharding:
        sharding = self._sharding()
        assert sharding is not None
        return sharding

    def look(self) -> None:
        """Parameters that were added, exchanged, moved or unfrozen are refused; what only left our hands comes back."""
        for check in self.before_forward:
            check()
        found = list(chain.from_iterable(map(dict.values, self._tables)))
        if not self._tables or len(found) != len(self._found) or not all(map(operator.is_, found, self._found)):
            self._walk()
        if any(map(_is_trained, self._frozen)):
            self._refuse_unfrozen()
        with without_waiting():
            self.attend()

    def _walk(self) -> None:
        """What takes a parameter's place and is none (functional_call puts plain tensors there) is to compute."""
        known = self.sharding.tenants
        there = set()
        for name, module in self.sharding.module.named_modules():
            for attribute, param in module._parameters.items():
                tenant = known.get(id(param))
                if tenant is not None:
                    there.add(tenant.name)
                elif is_trained(param):
                    refuse_stranger(f"{name}.{attribute}" if name else attribute, param)
        missing = {tenant.name: tenant.param for tenant in known.values() if tenant.name not in there}
        lost = [name for name, param in missing.items() if not self.sharding.has_substitute(param)]
        if lost:
            raise ShardError(
                f"{lost[0]!r} is no longer a parameter of the model, and is still in a bucket of zk.shard; build the "
                "model as it is to be, then shard it (to compute with other values for a while, give functional_call "
                "plain tensors)"
            )
        if missing:
            return
        modules = list(self.sharding.module.modules())
        self._tables = [table for module in modules for table in (module._parameters, module._modules)]
        self._found = list(chain.from_iterable(map(dict.values, self._tables)))

    def _refuse_unfrozen(self) -> None:
        tenants = [tenant for memory in self.sharding.memories for tenant in memory.tenants]
        known = set(map(id, self._frozen))
        name = next(one.name for one in tenants if id(one.param) in known and one.param.requires_grad)
        raise ShardError(
            f"{name!r} was frozen when the model was sharded, and has no place for gradients; "
            "shard it with requires_grad=True, and freeze it afterwards for as long as it is to be frozen"
        )

    def _whereabouts(self) -> list[int]:
        placed = any(tenant.placed is not None for tenant in self._plain)
        return list(map(_pointer_of, map(local_of, self._params) if placed else self._params))

    def attend(self) -> None:
        """Parameters are where they were; what was exchanged over the same memory (`set_`) is ours again."""
        addresses = self._whereabouts()
        if addresses != self._addresses:
            known = zip(self._plain, addresses, self._addresses, strict=True)
            moved = next(tenant.name for tenant, address, before in known if address != before)
            raise ShardError(
                f"the memory of {moved!r} was exchanged after zk.shard (by .data, set_, .to(), .half() or resize_, or "
                "by a parametrization that computes its original); allowed: writing into it (copy_, load_state_dict). "
                "Move, convert and parametrize a model before it is sharded. Under Hugging Face use "
                "zerokern.integrations.transformers.Trainer or TrainerMixin: plain Trainer moves its model"
            )
        versions = list(map(_version_of, self._params))
        try:
            here = all(map(operator.is_, map(_reference_of, self._params), self._references))
        except AttributeError:  # one of them lost it
            here = False
        if here and versions == self._versions:
            return
        whose = list(map(shard_of, self._params))
        for place, (param, home) in enumerate(zip(self._params, self._homes, strict=True)):
            if versions[place] != self._versions[place] or whose[place] is not home:
                self._take_back(param, home)
        self._versions = versions

    def _take_back(self, param: nn.Parameter, home: Shard) -> None:
        if shard_of(param) is home:
            return
        give_shard(param, home)  # with it went what hears of its gradients
        if home.gradients is None:
            return
        dtype, trained = home.piece.grad_dtype, param.requires_grad
        param.requires_grad_()
        if param.grad_dtype != dtype:
            param.grad_dtype = dtype
        home.land(param)
        param.requires_grad_(trained)

    @contextmanager
    def following(self) -> Iterator[None]:
        """The versions that rise within are no sign of anything."""
        before = list(map(_version_of, self._params))
        yield
        after = map(_version_of, self._params)
        pairs = zip(self._versions, before, after, strict=True)
        self._versions = [now if known == was else known for known, was, now in pairs]


def _attend(watch: weakref.ref[Guard]) -> None:
    there = watch()
    if there is not None:
        there.attend()


def is_trained(param: Tensor | None) -> bool:
    """Whether this is a parameter that would be trained; functional_call's plain tensors are their owners' affair."""
    return isinstance(param, nn.Parameter) and param.requires_grad


def refuse_stranger(name: str, param: Tensor) -> None:
    raise ShardError(
        f"{name!r}, of shape {tuple(param.shape)}, is no parameter that the model had when it was sharded, and would "
        "be trained on this rank alone; write into the parameters that are there (zk.gathered(..., write=True)), or "
        "build the model anew and shard that. To compute with other values, give functional_call detached tensors"
    )
