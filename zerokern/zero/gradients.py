"""The gradients of one bucket: from autograd's tensors into a buffer in one pass, from there into this rank's shard.

What gradients are added to is decided by what the user left in `.grad`: None begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from zerokern.comm import Handle
from zerokern.core.errors import StateError
from zerokern.kernels import Flattener
from zerokern.zero.homes import Home, alias
from zerokern.zero.params import BucketMemory, Tenant
from zerokern.zero.sharded import Sharded
from zerokern.zero.stage import shards_gradients, shards_state

__all__ = ["GradientBucket"]


class GradientBucket:
    """What arrived of a bucket's gradients, where they are gathered up (`buffer`) and where they end (`reduced`)."""

    def __init__(self, number: int, memory: BucketMemory, homes: list[Home], stage: int, dtype: torch.dtype) -> None:
        self.number, self.memory, self.homes, self.dtype = number, memory, homes, dtype
        self.group = memory.group
        self.bucket = memory.bucket
        self.tenants: list[Tenant] = memory.tenants
        self.replicated = not shards_state(stage)
        # one rank's shard is the bucket: the gradients are flattened where they stay
        self.lends_buffer = shards_gradients(stage) and self.group.size > 1
        # on a device gradients are kept until one launch flattens them all; on a CPU each goes to its place at once, so
        # that the memory it came in, and the cache, serve the next
        self.keeps = memory.device.type != "cpu"
        self.opened = False
        self._kept: set[int] = set()
        self._adds = False
        self.arrived: dict[int, Tensor | None] = {}
        self.arrived_places: tuple[int, ...] = ()
        self.local: set[int] = set()  # places with gradients of passes under no_sync
        self.held: set[int] = set()  # places whose reduced span holds a reduced gradient
        self.buffer: Tensor | None = None
        self.reduced: Tensor | None = None
        self.shown: list[Tensor] = []
        self.launched = False
        self._expected = len(self.tenants)
        self.settle: Callable[[], None] | None = None  # returns once no update reads what is shown
        self.listeners: list[Callable[[], None]] = []  # are told whenever a pass has reduced this bucket
        self._guards: list[Callable[[], None]] = []
        self.exposed = False  # zk.shards: the pieces' own .grad is what the user sees and drops
        self._flatteners: dict[tuple, Flattener] = {}

    @property
    def nbytes(self) -> int:
        return self.bucket.padded_numel * self.dtype.itemsize

    def begin(self) -> None:
        """A pass begins."""
        self._expected = sum(tenant.param.requires_grad for tenant in self.tenants)

    @property
    def complete(self) -> bool:
        """Whether every parameter that wanted a gradient when the pass began has one."""
        return self._expected <= len(self.arrived)

    def take(self, place: int, grad: Tensor) -> None:
        """A gradient of this pass, as autograd made it."""
        tenant = self.tenants[place]
        if grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {tenant.name!r} is {grad.layout}; allowed: dense gradients (Embedding: sparse=False)"
            )
        if grad.requires_grad:
            raise StateError(
                f"the gradient of {tenant.name!r} was computed with create_graph=True, and its graph would be lost in "
                "reducing it; take gradients of gradients by torch.autograd.grad, and of the sum a plain backward()"
            )
        if self.launched:
            raise StateError(
                f"a gradient of {tenant.name!r} arrived after its bucket had been reduced: it is used in a way that "
                "the order of the units does not show; put the modules that use it into one unit (units=)"
            )
        if self.keeps:
            self.arrived[place] = grad.detach()
            return
        self.arrived[place] = None
        assert self.buffer is not None
        span = self._span(self.buffer, place)
        span.add_(grad.detach()) if place in self._kept else span.copy_(grad.detach())

    def live(self, place: int) -> bool:
        """Whether the user kept what `.grad` held, so that it is to be added to."""
        if self.exposed:
            return self.homes[place].piece.grad is not None
        grad = self.tenants[place].param.grad
        if grad is None:
            return False
        if not self.shown or grad is not self.shown[place]:
            self._adopt(place, grad)
        return True

    def _adopt(self, place: int, grad: Tensor) -> None:
        """A gradient that was set by hand: it counts as reduced already."""
        home, param = self.homes[place], self.tenants[place].param
        span = home.local_gradient(param)
        assert span is not None and grad is not None
        self._show()
        into = self.reduced_span(place)
        into.copy_(span.reshape(-1) if self.replicated else span)
        param.grad = self.shown[place]
        self.held.add(place)

    def reduced_span(self, place: int) -> Tensor:
        """This rank's part of what is reduced of a parameter, as `.grad` shows it."""
        shown = self.shown[place]
        return shown.local if isinstance(shown, Sharded) else shown.view(-1)

    def open(self, buffer: Tensor) -> None:
        """What arrives in this pass goes into `buffer`, beside what passes under no_sync left there."""
        self._guard()
        self._guards.clear()
        self.buffer = buffer
        lives = {place for place in range(len(self.tenants)) if self.live(place)}
        self.local &= lives
        self.held &= lives
        in_buffer = self.replicated or self.group.size == 1
        if self.held and self.in_place and not in_buffer:
            self._move_out()
        self._kept = lives if in_buffer else set(self.local)
        self._adds = not in_buffer and bool(self.held)
        self.opened = True

    def close(self, *, reduces: bool) -> bool:
        """No more will arrive: zeros where nothing did and nothing was left. Whether to add to `reduced`."""
        assert self.buffer is not None
        waiting = {place: grad for place, grad in self.arrived.items() if grad is not None}
        self._flatten({place: grad for place, grad in waiting.items() if place not in self._kept}, self.buffer)
        for place, grad in waiting.items():
            if place in self._kept:
                self._span(self.buffer, place).add_(grad)
        for place in range(len(self.tenants)):
            if place not in self.arrived and place not in self._kept:
                self._span(self.buffer, place).zero_()
        if self._adds or not reduces:
            self._begin_anew()
        if not reduces:
            self.local |= set(self.arrived)
        return self._adds

    def _begin_anew(self) -> None:
        """Zero what nothing is to be added to, where something else is, or where it is to be shown unreduced."""
        self._show()
        if not self.in_place:
            for place in range(len(self.tenants)):
                if place not in self.held:
                    self.reduced_span(place).zero_()

    def _flatten(self, grads: dict[int, Tensor], buffer: Tensor) -> None:
        if not grads:
            return
        tensors = list(grads.values())
        key = (tuple(grads), tuple((g.shape, g.stride(), g.dtype) for g in tensors))
        flattener = self._flatteners.get(key)
        if flattener is None:
            self._flatteners.clear()
            offsets = [self.tenants[place].place.offset for place in grads]
            flattener = self._flatteners[key] = Flattener(tensors, self.dtype, offsets=offsets)
        flattener.flatten(tensors, buffer)

    def _span(self, buffer: Tensor, place: int) -> Tensor:
        tenant = self.tenants[place]
        return buffer[tenant.place.offset : tenant.place.offset + tenant.place.numel].view(tenant.shape)

    @property
    def in_place(self) -> bool:
        """Whether the reduced shard lies in the buffer."""
        return self.reduced is not None and self.buffer is not None and self._shares(self.reduced, self.buffer)

    @staticmethod
    def _shares(left: Tensor, right: Tensor) -> bool:
        return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()

    def _move_out(self) -> None:
        """The buffer is about to be written, and what was reduced into it is to be added to."""
        assert self.reduced is not None
        self.reduced = self.reduced.clone()
        self._make_shown()
        for place in self.held:
            self._give(place)

    def reduce(self, buffer: Tensor, add: bool, scratch: Tensor | None) -> Handle | None:
        """Send the buffer on its way; None where there is nothing to wait for."""
        self.launched = True
        self.local.clear()
        self._show()
        if self.group.size == 1:
            return None
        mean = 1.0 / self.group.size
        if self.replicated:
            buffer.mul_(mean)
            return self.group.all_reduce(buffer, scratch=scratch)
        assert self.reduced is not None
        return self.group.reduce_scatter(buffer, self.reduced, scale=mean, add=add, scratch=scratch)

    def _show(self) -> None:
        if self.reduced is None:
            self.reduced = self._room()
            self._make_shown()

    def _room(self) -> Tensor:
        if self.replicated or self.group.size == 1:
            return self.whole_buffer()
        if self.lends_buffer:
            return torch.zeros(self.bucket.shard_numel, dtype=self.dtype, device=self.memory.device)
        return alias(self.whole_buffer(), self.group.rank * self.bucket.shard_numel, (self.bucket.shard_numel,))

    def whole_buffer(self) -> Tensor:
        """A buffer of this bucket's own, for as long as it is needed."""
        if self.buffer is None:
            self.buffer = torch.zeros(self.bucket.padded_numel, dtype=self.dtype, device=self.memory.device)
        return self.buffer

    def _make_shown(self) -> None:
        assert self.reduced is not None
        self.shown = []
        spans = {piece.param: piece for piece in self.bucket.pieces(self.group.rank)}
        for tenant, home in zip(self.tenants, self.homes, strict=True):
            if self.replicated:
                self.shown.append(alias(self.reduced, tenant.place.offset, tenant.shape))
                continue
            piece = spans.get(tenant.place.param)
            local = alias(self.reduced, 0 if piece is None else piece.offset, (home.numel,))
            named = Sharded(local, home.shape, home.start, name=home.name, kind="gradient", group=self.group)
            named.settle = self.settle
            self.shown.append(named)

    def tell(self) -> None:
        """What is reduced is there: for the caller, or, on a device, for its current stream."""
        for listener in self.listeners:
            listener()

    def reads_until(self, wait: Callable[[], None]) -> None:
        """Something reads what is reduced: whoever writes it calls `wait` first."""
        self._guards.append(wait)
        if self.settle is None:
            for shown in self.shown:
                if isinstance(shown, Sharded):
                    shown.settle = self._guard

    def _guard(self) -> None:
        for wait in self._guards:
            wait()

    def settles(self, settle: Callable[[], None]) -> None:
        """From now on updates may be under way: who does anything with a gradient that is shown waits for them."""
        self.settle = settle
        for shown in self.shown:
            if isinstance(shown, Sharded):
                shown.settle = settle

    def give(self, places: Iterable[int], *, reduced: bool) -> None:
        """Put the gradients where the user looks for them."""
        self._show()
        for place in places:
            self._give(place)
            if reduced:
                self.held.add(place)

    def _give(self, place: int) -> None:
        home = self.homes[place]
        if self.exposed:
            shown = self.shown[place]
            home.piece.grad = shown.local if isinstance(shown, Sharded) else shown.view(-1)
        else:
            self.tenants[place].param.grad = self.shown[place]

    def refuse_unreduced(self) -> None:
        """A step on gradients that other ranks know nothing of would let the ranks drift apart."""
        if self.local and not self.replicated and self.group.size > 1:
            names = ", ".join(repr(self.tenants[place].name) for place in sorted(self.local)[:3])
            raise StateError(
                f"gradients of {names} were accumulated under zk.no_sync and never reduced; run the last backward "
                "before step() outside of it, or drop them with zero_grad()"
            )

    def reset(self) -> None:
        """Forget a pass, or be ready for the next one."""
        self.arrived.clear()
        self.arrived_places = ()
        self.launched = self.opened = False
        if self.lends_buffer and not self.local:
            self.buffer = None
