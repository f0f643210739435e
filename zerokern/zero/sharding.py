"""One model under zk.shard: its buckets, homes, gradients and units, and what its hooks do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from zerokern.comm import Group
from zerokern.core.errors import ShardError, StateError
from zerokern.kernels.flat import warm
from zerokern.memory.heap import keep_freed, mmap_large_blocks
from zerokern.memory.room import exceeds_half_of_memory
from zerokern.memory.tier import AnyTier, DevicePool, name_of
from zerokern.zero import checks, guards, hooks
from zerokern.zero.awaited import without_waiting
from zerokern.zero.gather import Gatherer
from zerokern.zero.gathered_unit import GatheredUnit, Place
from zerokern.zero.gradients import GradientBucket
from zerokern.zero.groups import PLACE, GroupsOf, one_group
from zerokern.zero.kinds import local_of, version_of
from zerokern.zero.mixed import cast_floats, check_policy, wire_dtype
from zerokern.zero.params import BucketMemory, Tenant, place
from zerokern.zero.partition import partition, shards_parameters, shards_state
from zerokern.zero.publishing import Publisher
from zerokern.zero.reduction import Reduction
from zerokern.zero.resting import check_tier, driver_of, laid_out, lies_on, rests_on
from zerokern.zero.shard import Shard
from zerokern.zero.sharded import Sharded, leaves
from zerokern.zero.sharded_functions import GET_DATA
from zerokern.zero.spilling import kind_of_bucket
from zerokern.zero.stand_ins import exchanged, ids, is_leaf_of_its_own
from zerokern.zero.units import Unit, Units, UnitWrapper, members, owners_of, units_of

__all__ = ["Sharding"]

_seen_version, _version_of = attrgetter("seen_version"), attrgetter("_version")
KEPT_UNITS = 8  # what a step frees and asks for again: two whole, their gradients, as much of activations


class Sharding:
    """What `zk.shard` makes of a module; found again through any of its parameters (`shard_of`)."""

    def __init__(
        self,
        module: nn.Module,
        *,
        stage: int,
        group: Group,
        mp_policy: MixedPrecisionPolicy | None = None,
        units: Units = None,
        bucket_bytes: int = 32 << 20,
        tier: AnyTier = "device",
        wrapper: UnitWrapper | None = None,
        materialize: Callable[[Unit], None] | None = None,
        reduce: str = "mean",
        groups: GroupsOf = one_group,
    ) -> None:
        """`wrapper`: what else wraps the forward of units; `groups`: which ranks share which parameters."""
        hooks.import_compiler()
        # the hooks of the root keep this; whatever else of the model calls it, or is referred to by it, does so weakly
        self._module = weakref.ref(module)
        self.stage, self.group = stage, group
        self.op = checks.reduce(reduce)
        self.replicated = not shards_state(stage)
        self.policy = check_policy(mp_policy)
        self.rests = rests_on(check_tier(tier, stage), group.everyone)
        self._nodes: list[object] = []  # what autograd asks before it accumulates; it lives as long as it is here
        found = units_of(module, units)
        checks.no_other_wrapper(module)
        device = checks.model(module, found, group, built=materialize is not None)
        if shards_parameters(stage):
            checks.one_unit(found)
        params = [pair for unit in found for pair in unit.params]
        wrapped = "None" if wrapper is None else wrapper.check(found)
        self.groups = groups(module, params, group, self.replicated)
        self.teams, ranks = self.groups.teams, self.groups.each[0]
        # those that norms are summed over, those with copies too, and how many copies of what is no DTensor are summed
        self.team, self.everyone, self.copies = ranks.team, ranks.everyone, ranks.copies
        if not self.replicated:
            checks.no_writes_of_one_rank(module, group.everyone)
        settings = {
            "stage": stage,
            "reduce": self.op,
            "bucket_bytes": checks.bucket_bytes(bucket_bytes),
            "mp_policy": str(self.policy),
            "tier": name_of(tier),
            "keep, micro": wrapped,
            "units": [unit.name for unit in found],
            PLACE: ranks.place,
        }
        checks.same_on_all_ranks(group.everyone, settings, found)
        for one in self.groups.each[1:]:
            checks.same_on_all_ranks(one.group.everyone, {PLACE: one.place}, [])
        with torch.no_grad():
            self._broadcast_buffers()
            self._take_in(found, device, bucket_bytes, materialize, tier)
        self._hook_gradients()
        self.groups.watch_gradients(self)
        self.wrapper = wrapper
        if wrapper is not None:  # within the hooks that follow
            wrapper.begin(found)
        self._hook_forwards(found)
        for memory in self.memories:
            if memory.rest is not None:
                memory.rest.is_viewed()
        self.watch = guards.Guard(self)
        guards.install()
        weakref.finalize(module, _ended, weakref.ref(self.publisher)).atexit = False

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise StateError("these parameters are of a sharded model that is gone; keep the model as long as these")
        return module

    def _take_in(
        self,
        units: Sequence[Unit],
        device: torch.device,
        bucket_bytes: int,
        materialize: Callable[[Unit], None] | None,
        tier: AnyTier,
    ) -> None:
        """Parameters into buckets, one bucket at a time."""
        named = [(name, param, unit) for unit in units for name, param in unit.params]
        listed = members(units, self.stage, self.policy.param_dtype, self.groups.number)
        itemsize = max(getattr(torch, member.dtype).itemsize for member in listed)
        buckets = partition(listed, self.groups.sizes, max(1, bucket_bytes // itemsize))
        self.memories: list[BucketMemory] = []
        homes: dict[int, Shard] = {}
        owners = owners_of(self.module)
        self._owners: dict[int, list[Place]] = {}
        pool, divided = DevicePool(device), shards_parameters(self.stage)
        prepared: set[int] = set()
        driver = driver_of(device, [param for _, param, _ in named])
        for bucket, room in zip(buckets, laid_out(tier, self.rests, driver, buckets), strict=True):
            present = {id(named[spot.param][2]) for spot in bucket.places} - prepared
            prepared |= present
            for unit in units:  # in their order: what a constructor draws at random depends on the seed alone
                if materialize is not None and id(unit) in present:
                    materialize(unit)
            group = self.groups.each[bucket.ranks].group
            memory = BucketMemory(bucket, group, sharded=divided, pool=pool, **room)
            there = [(spot, *named[spot.param]) for spot in bucket.places]
            tenants = [Tenant.of(name, param, spot) for spot, name, param, _ in there]
            lost = memory.fill(tenants, keeps_initial=bucket.trainable, replicated=self.replicated)
            for tenant, home in zip(tenants, place(self, memory, lost, owners), strict=True):
                homes[tenant.place.param] = home
                places = [(owner.module._parameters, owner.attribute) for owner in owners[id(tenant.param)]]
                self._owners[id(tenant.param)] = places  # not the modules, which would be kept
            self.memories.append(memory)
        self.homes = [homes[number] for number in range(len(named))]
        if tier == "device":
            lies_on(driver, [*(param for _, param, _ in named), *(home.piece for home in self.homes)])
        self.zero_order: list[nn.Parameter] = [param for _, param, _ in named]
        tenants = [tenant for memory in self.memories for tenant in memory.tenants]
        self.tenants = {id(tenant.param): tenant for tenant in tenants}
        self.tenants.update({id(tenant.full): tenant for tenant in tenants if tenant.full is not None})
        in_parts = not self.replicated and not shards_parameters(self.stage)
        self.publisher = Publisher(units, self.memories, gathers=in_parts)

    def _broadcast_buffers(self) -> None:
        """Buffers begin with rank 0's values too; as bytes, whatever they are made of."""
        for buffer in self.module.buffers():
            group = self.groups.group_of_buffer(buffer)
            if not group.everyone.alone and not buffer.is_meta and buffer.numel():
                flat = local_of(buffer).detach().to(group.device).reshape(-1).contiguous().view(torch.uint8)
                group.broadcast(flat).wait()
                local_of(buffer).copy_(flat.view(buffer.dtype).view(local_of(buffer).shape))

    def _hook_gradients(self) -> None:
        by_name = {home.name: home for home in self.homes}
        self.gradient_buckets: list[GradientBucket] = []
        trained = [(one, wire_dtype(self.policy, one.dtype)) for one in self.memories if one.bucket.trainable]
        self._gradients_nbytes = sum(one.bucket.shard_numel * dtype.itemsize for one, dtype in trained)
        kind = kind_of_bucket(self.rests, self.group, self._gradients_nbytes)
        losses = self.groups.losses if self.op == "mean" else None
        for memory, dtype in trained:
            homes = [by_name[tenant.name] for tenant in memory.tenants]
            bucket = kind(len(self.gradient_buckets), memory, homes, self.stage, dtype, losses)
            self.gradient_buckets.append(bucket)
            for number, (tenant, home) in enumerate(zip(memory.tenants, homes, strict=True)):
                home.gradients, home.place = bucket, number
                if dtype != memory.dtype:
                    home.piece.grad_dtype = tenant.param.grad_dtype = dtype
        warm(self.group.device, {(bucket.memory.dtype, bucket.dtype) for bucket in self.gradient_buckets})
        self.publisher.gradient_buckets = self.gradient_buckets
        self.reduction = Reduction(self.gradient_buckets, self.groups.each, weakref.ref(self))
        for tenant, home in self._trained():
            home.land(tenant.param if tenant.full is None else tenant.full)
            if tenant.full is not None:  # a Function can be given the parameter itself
                self._nodes.append(home.hand_over(tenant.param))

    def _hook_forwards(self, units: Sequence[Unit]) -> None:
        self.gatherer: Gatherer | None = None
        whole: list[GatheredUnit] = []
        if shards_parameters(self.stage):
            for number, unit in enumerate(units):
                memories = [memory for memory in self.memories if memory.bucket.unit == number]
                whole.append(GatheredUnit(number, unit, memories, self._owners))
            self.gatherer = self.publisher.gatherer = Gatherer(whole, self.group, hooks.weakly(self._flush))
            if self.group.device.type == "cpu" and (self.rests is not None or not self.group.alone):
                kept = KEPT_UNITS * max(sum(memory.nbytes for memory in unit.memories) for unit in whole)
                short = self.rests is not None and exceeds_half_of_memory(self._gradients_nbytes + kept)
                mmap_large_blocks() if short else keep_freed(kept)
            for number, gathered in enumerate(whole):
                for tenant in gathered.tenants:
                    body = tenant.param
                    assert isinstance(body, Sharded)
                    body.use = partial(_use, weakref.ref(self), number)
                    body.in_forward = partial(_in_forward, weakref.ref(self))
                    body.settle = self.publisher.settle
        hooks.wrap_forward(self.module, self._before_root, self._after_root)
        self._buckets_of = [[one for one in self.gradient_buckets if one.memory in unit.memories] for unit in whole]
        for unit, gathered in zip(units[1:], whole[1:], strict=False):
            before, after = hooks.weakly(self._before_unit, _refuse_gone), hooks.weakly(self._after_unit)
            hooks.wrap_forward(unit.module, partial(before, gathered), partial(after, gathered))

    def in_pass(self) -> bool:
        """Whether the backward pass that runs accumulates a gradient of any parameter."""
        leaves = (leaf for bucket in self.gradient_buckets for leaf in bucket.leaves if leaf.requires_grad)
        with hooks.outside_of_transforms():  # within one, leaves have no graph
            return any(map(hooks.is_accumulated, map(hooks.accumulator, leaves)))

    def has_substitute(self, param: nn.Parameter) -> bool:
        """Whether something that is no parameter stands in one of its places."""
        found = [there.get(attribute) for there, attribute in self._owners[id(param)]]
        return any(one is not None and not isinstance(one, nn.Parameter) for one in found)

    def _flush(self, unit: GatheredUnit) -> None:
        self.reduction.flush(self._buckets_of[unit.number])

    def _before_root(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if not hooks.in_backward():
            self.reduction.abandon()
            if torch.is_grad_enabled():
                checks.not_reduced_by_ddp(self.module)
                self.watch.look()
        if self.gatherer is not None:
            self.gatherer.begin()
            self.gatherer.before_forward(self.gatherer.root)
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return None
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    def _trained(self) -> Iterator[tuple[Tenant, Shard]]:
        for bucket in self.gradient_buckets:
            yield from zip(bucket.tenants, bucket.homes, strict=True)

    def _after_root(self, result: Any) -> Any:
        if result is not None and not hooks.in_backward():
            self.publisher.complete()
        if self.gatherer is None and torch.is_grad_enabled() and self.gradient_buckets:
            for output in hooks.graph_tensors(result):
                hooks.when_gradient_is_there(output, partial(_backward_begins, weakref.ref(self)))
        if self.policy.output_dtype is not None:
            result = cast_floats(result, self.policy.output_dtype)
        if self.gatherer is not None:
            self._after_unit(self.gatherer.root, result)
        if result is not None and not torch.is_grad_enabled():  # no backward follows, which other ranks would wait in
            self.publisher.finish()
        return result

    def _before_unit(self, unit: GatheredUnit, args: tuple, kwargs: dict[str, Any]) -> None:
        assert self.gatherer is not None
        self.gatherer.before_forward(unit)

    def _after_unit(self, unit: GatheredUnit, result: Any) -> None:
        assert self.gatherer is not None
        begins = partial(hooks.weakly(self._unit_backward_begins, _refuse_gradients), unit, [-1])
        for output in self.gatherer.after_forward(unit, result):
            hooks.when_gradient_is_there(output, begins)

    def _unit_backward_begins(self, unit: GatheredUnit, told: list[int]) -> None:
        """`told`: the pass that this was last called in, which does nothing for further outputs."""
        task = hooks.current_pass()
        if task != told[0]:
            told[0] = task
            assert self.gatherer is not None
            self.gatherer.before_backward(unit)

    def use_outside(self, unit: GatheredUnit, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A function was given a parameter of a unit that is not at work: gathered, for as long as the pass lasts."""
        assert self.gatherer is not None
        if torch.is_grad_enabled() and any(map(is_leaf_of_its_own, leaves((args, kwargs)))):
            return NotImplemented
        if func is torch.autograd.grad:  # looks at the graph, and not at values
            with torch._C.DisableTorchFunctionSubclass():
                return func(*exchanged(args, self.tenants), **exchanged(kwargs, self.tenants))
        given = ids((args, kwargs))
        for one in self.gatherer.units:
            if any(id(tenant.param) in given and isinstance(tenant.param, Sharded) for tenant in one.tenants):
                self.gatherer.use_outside(one)
        hearing = torch.is_grad_enabled() and self.gatherer.reads.begin()
        try:
            func = Tensor.detach if func == GET_DATA else func  # so that writes to it count
            return func(*exchanged(args, self.tenants), **exchanged(kwargs, self.tenants))
        finally:
            if hearing:
                self.gatherer.reads.end()

    def publish(self) -> None:
        """Let all ranks see what an optimizer has written into the pieces. Every rank calls it."""
        self.begin_publishing()
        self.publisher.gather_all()

    def begin_publishing(self) -> None:
        """As `publish`, but for the gathers, which the caller makes in the order of the buckets."""
        self.publisher.finish()
        self._announce()

    def publish_later(self, ready: Callable[[int], None], tears: Callable[[], object]) -> None:
        """As `publish`, of an update that is under way: `ready(i)` returns once it has reached trained bucket i.

        `publisher.prepare()` came before it began; `tears` is called where it turns out that it cannot be published.
        The caller waits for the root's buckets (`publisher.upto(0)`), forwards for those that they need, and all are
        waited for at the latest when the root's forward ends.
        """
        self._announce()
        self.publisher.begin(ready, tears)

    def _announce(self) -> None:
        if self.gatherer is not None:
            self.gatherer.settle()
        if shards_parameters(self.stage):  # pieces are written, and what is shown of them has no version of its own
            self.publisher.announce()
            return
        with without_waiting():
            version = version_of if any(home.placed is not None for home in self.homes) else _version_of
            seen, versions = list(map(_seen_version, self.homes)), list(map(version, self.zero_order))
            with self.watch.following():
                self.publisher.announce()
            now = map(version, self.zero_order)
            for home, known, before, after in zip(self.homes, seen, versions, now, strict=True):
                if known == before:  # the optimizer that owns what was written by others has yet to notice
                    home.seen_version = after

    @property
    def holds_unreduced(self) -> bool:
        """Whether any gradients are of passes under `no_sync` alone."""
        return any(bucket.local for bucket in self.gradient_buckets)

    def fold(self, factor: float | Tensor) -> None:
        """Scale the gradients by a factor when they are next used."""
        self.reduction.factor = self.reduction.factor * factor

    def take_fold(self) -> float | Tensor:
        """The pending factor, which is the caller's to apply from now on."""
        factor, self.reduction.factor = self.reduction.factor, 1.0
        return factor

    def folded(self, factor: float | Tensor) -> None:
        """An update has applied the factor that it took."""
        self.reduction.is_applied(factor)

    def settle(self) -> None:
        """Apply the pending factor to the gradients themselves."""
        self.reduction.settle()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within are not reduced."""
        before, self.reduction.synchronizes = self.reduction.synchronizes, False
        try:
            yield
        finally:
            self.reduction.synchronizes = before

    def expose(self) -> list[nn.Parameter]:
        """The pieces of all parameters that are trained, with gradients of their own from now on."""
        if self.rests is not None:
            raise ShardError(
                f"zk.shards was asked for spans that rest in {self.rests.tier!r}, and an optimizer that knows nothing "
                "of that would read and write memory that is not there; step the model with an optimizer of zerokern"
            )
        for bucket in self.gradient_buckets:
            bucket.exposed = True
        return [home.piece for home in self.homes if home.gradients is not None]

    def holdings(self) -> dict[str, list[Tensor]]:
        """The tensors that memory is held by, by role."""
        reduced = [one.reduced for one in self.gradient_buckets if one.reduced is not None]
        own = [one.buffer for one in self.gradient_buckets if one.buffer is not None and not one.lends_buffer]
        lent = [bucket.buffer for bucket in self.gradient_buckets if bucket.buffer is not None and bucket.local]
        whole = [memory.full for memory in self.memories if memory.sharded and memory.gathered]
        return {
            "parameters": [memory.shard if memory.sharded else memory.full for memory in self.memories],
            "gradients": [*reduced, *own],
            "gathered": whole,
            "buffers": [*self.reduction.buffers, *lent],
            "scratch": self.reduction.scratch,
        }


def _backward_begins(sharding: weakref.ref[Sharding]) -> None:
    """The gradient of an output is there. Passes that reach no parameter are none of ours."""
    there = sharding()
    if there is None:
        _refuse_gradients()
    elif there.in_pass():
        there.reduction.joins_backward()


def _use(sharding: weakref.ref[Sharding], number: int, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a parameter is told of, which must not keep its model: see `Shard`."""
    there = sharding()
    if there is None or there.gatherer is None:
        return NotImplemented
    return there.use_outside(there.gatherer.units[number], func, args, kwargs)


def _ended(publisher: weakref.ref[Publisher]) -> None:
    """The model is gone, and nobody waits for an update of it that is under way: its optimizer is not kept for that."""
    there = publisher()
    if there is not None:
        there.retire()


def _refuse_gradients(*_: Any) -> None:
    raise StateError("these are gradients of a sharded model that is gone; keep the model until its backward")


def _refuse_gone(unit: GatheredUnit, *_: Any) -> None:
    raise StateError(f"{unit.called} is of a sharded model that is gone; keep the model as long as its parts")


def _in_forward(sharding: weakref.ref[Sharding]) -> bool:
    there = sharding()
    return there is not None and there.gatherer is not None and there.gatherer.root.computing > 0
