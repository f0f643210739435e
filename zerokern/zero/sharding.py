"""Shards one model: makes its buckets, shards and units, and hooks them into its forward and backward."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from zerokern.comm import Group
from zerokern.core.errors import ShardError, StateError, got, whole_number
from zerokern.core.units import BUCKET_BYTES
from zerokern.kernels.flat import warm
from zerokern.memory.addresses import TensorBodies
from zerokern.memory.heap import keep_freed, mmap_large_blocks
from zerokern.memory.order import TierOrder
from zerokern.memory.room import exceeds_half_of_memory
from zerokern.memory.staging import EMULATED_DRIVERS
from zerokern.memory.tier import DevicePool
from zerokern.zero import checks, hooks
from zerokern.zero.changed_spans import Take
from zerokern.zero.checks import check_policy
from zerokern.zero.containers import cast_floats
from zerokern.zero.gradients import GradientBucket
from zerokern.zero.kinds import local_of, version_of, without_waiting
from zerokern.zero.params import BucketEntry, BucketMemory, place
from zerokern.zero.partition import partition, shards_parameters, shards_state
from zerokern.zero.publishing import Publisher
from zerokern.zero.reduction import Reduction
from zerokern.zero.registrations import Registration
from zerokern.zero.runner import UnitRunner
from zerokern.zero.shard import Shard, seen_versions
from zerokern.zero.spilling import kind_of_bucket
from zerokern.zero.tiers import check_tier, keep_driver, reserve, rests_on, take_driver
from zerokern.zero.unit import Unit
from zerokern.zero.units import (
    PLACE,
    GroupsOf,
    Units,
    UnitSpec,
    UnitWrapper,
    Whole,
    members,
    one_group,
    owners_of,
    units_of,
    whole_of,
)

__all__ = ["Sharding"]

# of the arguments of zk.shard all others are the same on all ranks, as they are given or as it reads them
_NOT_COMPARED = ("self", "__class__", "module", "group", "groups", "wrapper", "materialize")
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
        bucket_bytes: int = BUCKET_BYTES,
        tier: Any = "device",
        wrapper: UnitWrapper | None = None,
        materialize: Callable[[UnitSpec], None] | None = None,
        reduce: str = "mean",
        groups: GroupsOf = one_group,
        whole: Whole = None,
        publish: str = "all",
    ) -> None:
        """`wrapper`: what else wraps the forward of units; `groups`: which ranks share which parameters."""
        given = {name: str(value) for name, value in locals().items() if name not in _NOT_COMPARED}
        hooks.import_compiler()
        # the hooks of the root keep this; whatever else of the model calls it, or is referred to by it, does so weakly
        self._module = weakref.ref(module)
        self.stage, self.group = stage, group
        averages = checks.reduce(reduce) == "mean"
        self.replicated = not shards_state(stage)
        self.policy = check_policy(mp_policy)
        whole_number("bucket_bytes", bucket_bytes, "a whole number of bytes from 1 on")
        order = check_tier(tier, stage)
        self.rests = rests_on(order, group.everyone)
        self._waits_for_updates = False
        self._nodes: list[object] = []  # what autograd asks before it accumulates; it lives as long as it is here
        found = units_of(module, units)
        checks.no_other_wrapper(module)
        device = checks.model(module, found, group, built=materialize is not None)
        if shards_parameters(stage):
            checks.warn_of_large_units(found)
        params = [pair for unit in found for pair in unit.params]
        apart = device.type != "cpu" or any(param in EMULATED_DRIVERS for _, param in params)
        self.publishes_changes = checks.publish(publish, stage, apart=apart) == "delta"
        wrapped = {} if wrapper is None else wrapper.check(found)
        self.groups = groups(module, params, group, self.replicated)
        self.teams, ranks = self.groups.teams, self.groups.each[0]
        self.everyone = ranks.everyone
        if not self.replicated:
            checks.refuse_max_norm(module, group.everyone)
        uncut = whole_of(whole, found)
        uncut = {} if self.replicated else uncut
        if uncut and shards_parameters(stage):
            do = "a unit's few matrices would fill its shards unevenly, and gathers would move the padding, too"
            allowed = "None at stage 3, where zk.Muon takes cut ones; stages 1 and 2 keep them whole"
            raise ValueError(got("whole", "matrices", allowed, do))
        settings = {
            **given,
            **wrapped,
            "mp_policy": str(self.policy),
            "tier": order.name,
            "units": [unit.name for unit in found],
            "whole": {name: uncut[id(param)] for name, param in params if id(param) in uncut},
            PLACE: ranks.place,
        }
        checks.same_on_all_ranks(group.everyone, settings, found)
        for one in self.groups.each[1:]:
            checks.same_on_all_ranks(one.group.everyone, {PLACE: one.place}, [])
        with torch.no_grad():
            self._broadcast_buffers()
            self._fill_buckets(found, device, bucket_bytes, materialize, order, uncut)
        self._hook_gradients(self.groups.losses if averages else None)
        self.groups.watch_gradients(self)
        self.wrapper = wrapper
        if wrapper is not None:  # within the hooks that follow
            wrapper.begin(found)
        self._hook_forwards(found)
        for memory in self.memories:
            if memory.rest is not None:
                memory.rest.is_viewed()
        self.guard = checks.Guard(self)
        checks.install()
        # nobody waits for an update of a model that is gone, and its optimizer is not kept for that
        weakref.finalize(module, hooks.weakly(self.publisher.retire)).atexit = False

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise StateError("these parameters are of a sharded model that is gone; keep the model as long as these")
        return module

    def _fill_buckets(
        self,
        units: Sequence[UnitSpec],
        device: torch.device,
        bucket_bytes: int,
        materialize: Callable[[UnitSpec], None] | None,
        order: TierOrder,
        uncut: dict[int, int],
    ) -> None:
        """Moves parameters into buckets, one bucket at a time."""
        named = [(name, param, unit) for unit in units for name, param in unit.params]
        listed = members(units, self.stage, self.policy.param_dtype, self.groups.number, uncut)
        itemsize = max(getattr(torch, member.dtype).itemsize for member in listed)
        buckets = partition(listed, self.groups.sizes, max(1, bucket_bytes // itemsize))
        self.memories: list[BucketMemory] = []
        shards: dict[int, Shard] = {}
        owners = owners_of(self.module)
        self._owners: dict[int, list[Registration]] = {}
        pool, divided = DevicePool(device), shards_parameters(self.stage)
        prepared: set[int] = set()
        driver = take_driver(device, [param for _, param, _ in named])
        # whether some buckets may be on the device, and others off it: the same on all ranks, whatever their budgets
        self.splits = driver is not None and order.tiers[0] == "device" and len(order.tiers) > 1
        for bucket, room in zip(buckets, reserve(order, self.rests, driver, buckets), strict=True):
            present = {id(named[spot.param][2]) for spot in bucket.places} - prepared
            prepared |= present
            for unit in units:  # in their order: what a constructor draws at random depends on the seed alone
                if materialize is not None and id(unit) in present:
                    materialize(unit)
            group = self.groups.each[bucket.ranks].group
            memory = BucketMemory(bucket, group, sharded=divided, pool=pool, **room)
            memory.label = (units[bucket.unit].name or "root") if divided else f"bucket {bucket.index}"
            there = [(spot, *named[spot.param]) for spot in bucket.places]
            entries = [BucketEntry.of(name, param, spot) for spot, name, param, _ in there]
            lost = memory.fill(entries, keeps_initial=bucket.trainable, replicated=self.replicated)
            for entry, shard in zip(entries, place(self, memory, lost, owners), strict=True):
                shards[entry.place.param] = shard
                places = [(owner.module._parameters, owner.attribute) for owner in owners[id(entry.param)]]
                self._owners[id(entry.param)] = places  # not the modules, which would be kept
            self.memories.append(memory)
        # whether any parameters rest on a disk: the same on all ranks, whatever their budgets
        self.at_rest = any(memory.rest is not None for memory in self.memories)
        if self.rests is not None and len(order.tiers) > 1:
            self.at_rest = any(self.group.everyone.exchange(self.at_rest))
        self.shards = [shards[number] for number in range(len(named))]
        self.seen_versions = seen_versions(self.shards)
        self._has_dtensors = any(shard.placed is not None for shard in self.shards)
        for memory in self.memories:
            if memory.host is None:
                numbers = [entry.place.param for entry in memory.entries]
                keep_driver(driver, [one for n in numbers for one in (named[n][1], self.shards[n].piece)])
        self.zero_order: list[nn.Parameter] = [param for _, param, _ in named]
        self._bodies = TensorBodies(self.zero_order)
        entries = [entry for memory in self.memories for entry in memory.entries]
        self.entries = {id(one): entry for entry in entries for one in (entry.param, entry.leaf)}
        self._unit_modules = [weakref.ref(unit.module) for unit in units]
        in_parts = not self.replicated and not shards_parameters(self.stage)
        self.publisher = Publisher(
            units, self.memories, by_gather=in_parts, by_changes=self.publishes_changes and driver is None
        )

    def _broadcast_buffers(self) -> None:
        """Copies rank 0's buffers to all ranks, as bytes, whatever their dtype."""
        for buffer in self.module.buffers():
            group = self.groups.group_of_buffer(buffer)
            if not group.everyone.alone and not buffer.is_meta and buffer.numel():
                flat = local_of(buffer).detach().to(group.device).reshape(-1).contiguous().view(torch.uint8)
                group.broadcast(flat).wait()
                local_of(buffer).copy_(flat.view(buffer.dtype).view(local_of(buffer).shape))

    def _hook_gradients(self, losses: int | None) -> None:
        """`losses`: the number that a mean gradient is of; None: a sum."""
        self.gradient_buckets: list[GradientBucket] = []
        trained = [(one, self.policy.reduce_dtype or one.dtype) for one in self.memories if one.bucket.trainable]
        self._gradients_nbytes = sum(one.bucket.shard_numel * dtype.itemsize for one, dtype in trained)
        kind = kind_of_bucket(self.rests, self.group, self._gradients_nbytes)
        for memory, dtype in trained:
            shards = [self.shards[entry.place.param] for entry in memory.entries]
            bucket = kind(len(self.gradient_buckets), memory, shards, self.stage, dtype, losses)
            self.gradient_buckets.append(bucket)
            for number, (entry, shard) in enumerate(zip(memory.entries, shards, strict=True)):
                shard.gradients, shard.place = bucket, number
                if dtype != memory.dtype:
                    shard.piece.grad_dtype = entry.param.grad_dtype = dtype
        warm(self.group.device, {(bucket.memory.dtype, bucket.dtype) for bucket in self.gradient_buckets})
        self.reduction = Reduction(self.gradient_buckets, self.groups.each, weakref.ref(self))
        for entry, shard in self._trained():
            shard.take_arrived(entry.leaf)
            if entry.leaf is not entry.param:  # a Function can be given the parameter itself
                self._nodes.append(shard.take_from_other_leaf(entry.param))

    def _hook_forwards(self, units: Sequence[UnitSpec]) -> None:
        self.runner: UnitRunner | None = None
        made: list[Unit] = []
        if shards_parameters(self.stage):
            for number, unit in enumerate(units):
                memories = [memory for memory in self.memories if memory.bucket.unit == number]
                made.append(Unit(number, unit, memories, self._owners, hooks.weakly(self._reduce)))
            self.runner = UnitRunner(made, self.group)
            self.runner.begins_backward = hooks.weakly(self.reduction.drop_leftovers)
            if not self.group.everyone.alone:
                self.reduction.turns = self.runner
            self.publisher.keep_writes = hooks.weakly(self.runner.keep_writes)
            if self.group.device.type == "cpu" and (self.rests is not None or not self.group.alone):
                kept = KEPT_UNITS * max(sum(memory.nbytes for memory in unit.memories) for unit in made)
                short = self.rests is not None and exceeds_half_of_memory(self._gradients_nbytes + kept)
                mmap_large_blocks() if short else keep_freed(kept)
        self._buckets_of = [[one for one in self.gradient_buckets if one.memory in unit.memories] for unit in made]
        hooks.wrap_forward(self.module, self._before_root, self._after_root)
        if self.runner is not None:
            self.runner.hook_units([unit.module for unit in units], self.publisher.settle)

    def in_pass(self) -> bool:
        """Whether the backward pass that runs accumulates a gradient of any parameter."""
        leaves = (leaf for bucket in self.gradient_buckets for leaf in bucket.inbox.leaves if leaf.requires_grad)
        with hooks.outside_of_transforms():  # within one, leaves have no graph
            return any(map(hooks.is_accumulated, map(hooks.accumulator, leaves)))

    def has_substitute(self, param: nn.Parameter) -> bool:
        """Whether a module has something that is no parameter in the place of this one (functional_call)."""
        found = [there.get(attribute) for there, attribute in self._owners[id(param)]]
        return any(one is not None and not isinstance(one, nn.Parameter) for one in found)

    def _reduce(self, unit: Unit) -> None:
        if not self.reduction.active and self.in_pass():  # nothing has come yet on this rank
            self.reduction.joins_backward()
        self.reduction.flush(self._buckets_of[unit.number])

    def _before_root(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if not hooks.in_backward():
            self.reduction.abandon()
            if torch.is_grad_enabled():
                checks.not_reduced_by_ddp(self.module)
                self.guard.check()
        if self.runner is not None:
            self.runner.begin_forward()
            self.runner.before_forward(self.runner.root)
        dtype = self.policy.param_dtype
        if dtype is None or not self.policy.cast_forward_inputs:
            return None
        return cast_floats(args, dtype), cast_floats(kwargs, dtype)

    def _trained(self) -> Iterator[tuple[BucketEntry, Shard]]:
        for bucket in self.gradient_buckets:
            yield from zip(bucket.entries, bucket.shards, strict=True)

    def _after_root(self, result: Any) -> Any:
        if result is not None and not hooks.in_backward():
            self.publisher.complete()
        if self.runner is None and torch.is_grad_enabled() and self.gradient_buckets:
            hooks.when_backward_begins(result, hooks.weakly(self._begin_backward, hooks.refuse_gradients))
        if self.policy.output_dtype is not None:
            result = cast_floats(result, self.policy.output_dtype)
        if self.runner is not None:
            self.runner.after_forward(self.runner.root, result)
        if result is not None and not torch.is_grad_enabled():  # no backward follows, which other ranks would wait in
            self.publisher.finish()
        return result

    def _begin_backward(self) -> None:
        """Begins a pass when the gradient of an output is there, if the pass reaches a parameter."""
        if self.in_pass():
            self.reduction.joins_backward()

    def publish(self, among: Callable[[BucketMemory], bool] | None = None, take: Take | None = None) -> None:
        """Let all ranks see what an optimizer has written into the pieces. Every rank calls it.

        `among`: the buckets that it has parameters in, alike on all ranks. None: all are looked at. `take`: see
        `Publisher.gather_all`.
        """
        self.begin_publishing()
        self.publisher.gather_all(among, take)

    def begin_publishing(self) -> None:
        """Publishes without the gathers, which the caller makes in the order of the buckets."""
        self.publisher.finish()
        self._announce()

    def publish_later(self, ready: Callable[[int], None], tears: Callable[[], object]) -> None:
        """Publishes an update that is under way: `ready(i)` returns once it has reached trained bucket i.

        `publisher.prepare()` came before it began; `tears` is called where it turns out that it cannot be published.
        The caller waits for the root's buckets (`publisher.upto(0)`), forwards for those that they need, and all are
        waited for at the latest when the root's forward ends.
        """
        self._announce()
        if not self._waits_for_updates:
            self._waits_for_updates = True
            self._hook_updates()
        self.publisher.begin(ready, tears)

    def _hook_updates(self) -> None:
        """Makes whoever needs parameters or gradients wait for updates, once an optimizer leaves any under way."""
        for bucket in self.gradient_buckets:
            bucket.shown.settle = self.publisher.settle
        if self.runner is not None:
            self.runner.is_updating = hooks.weakly(self.publisher.is_updating)
            for unit in self.runner.units:
                unit.wait_for_update = partial(hooks.weakly(self.publisher.upto), unit.number)
            return
        for number, module in enumerate(self._unit_modules):
            there = module()
            if number and there is not None:
                hooks.wrap_forward(there, partial(hooks.weakly(self.publisher.upto), number))

    def _announce(self) -> None:
        if self.runner is not None:
            self.runner.reshard_all()
        if shards_parameters(self.stage):  # pieces are written, and what is shown of them has no version of its own
            self.publisher.announce()
            return
        with without_waiting():
            seen, before = self.seen_versions, self._versions()
            self.publisher.announce()
            after = self._versions()
            if seen == before:
                seen[:] = after
                return
            for at, known in enumerate(before):
                if seen[at] == known:  # the optimizer that owns what was written by others has yet to notice
                    seen[at] = after[at]

    def _versions(self) -> array[int]:
        return array("q", map(version_of, self.zero_order)) if self._has_dtensors else self._bodies.versions()

    @property
    def has_own_gradients(self) -> bool:
        """Whether all gradients are those that were reduced here, and none was set by hand."""
        return all(bucket.shown.shows(*one) for bucket in self.gradient_buckets for one in bucket.inbox.kept().items())

    def fold(self, factor: float | Tensor) -> None:
        """Scale the gradients by a factor when they are next used."""
        self.reduction.factor.fold(factor)

    def take_fold(self) -> float | Tensor:
        """Takes the pending factor, which the caller applies."""
        return self.reduction.factor.take()

    def folded(self, factor: float | Tensor) -> None:
        """An update has applied the factor that it took."""
        self.reduction.factor.folded(factor)

    def settle(self) -> None:
        """Multiplies the gradients by the pending factor."""
        self.reduction.factor.settle()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager: backward passes within are not reduced."""
        before, self.reduction.synchronizes = self.reduction.synchronizes, False
        try:
            yield
        finally:
            self.reduction.synchronizes = before

    def expose(self) -> list[nn.Parameter]:
        """Returns this rank's pieces of trained parameters, which have gradients of their own from now on."""
        if self.rests is not None:
            raise ShardError(
                f"zk.shards cannot return parts that rest in {self.rests.tier!r}: another optimizer would read and "
                "write memory that is not there. Step the model with an optimizer of zerokern"
            )
        for bucket in self.gradient_buckets:
            bucket.shown.exposed = True
        return [shard.piece for shard in self.shards if shard.gradients is not None]

    def holdings(self) -> dict[str, list[Tensor]]:
        """Returns the tensors that hold memory, by role."""
        reduced = [one.shown.reduced for one in self.gradient_buckets if one.shown.reduced is not None]
        own = [one.buffer for one in self.gradient_buckets if one.buffer is not None and not one.lends_buffer]
        lent = [bucket.buffer for bucket in self.gradient_buckets if bucket.buffer is not None and bucket.local]
        whole = [memory.full for memory in self.memories if memory.sharded and memory.gathered]
        return {
            "parameters": [memory.shard if memory.sharded else memory.full for memory in self.memories],
            "gradients": [*reduced, *own],
            "gathered": whole,
            "buffers": [*self.reduction.memory.buffers, *lent],
            "scratch": self.reduction.memory.scratch,
        }
