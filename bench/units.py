"""Python of a unit at stage 3, forward and backward, over the plain model: zk.shard and FSDP2 on one rank, in turns.

A GPT of 12 tiny blocks, so that the host is all there is. Collectives go to torch's `fake` backend, through the classes
that serve a device, as for a group of one that is told that it is not alone; no kernel is launched for them. Calls are
exact; CPU time of the thread is not, and wants a quiet machine. Two floors say how much of it any stage 3 needs.

    python -m zerokern.bench.units [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import zerokern as zk
from zerokern.comm import joining
from zerokern.comm.device import DeviceGroup
from zerokern.zero.partition import Piece
from zerokern.zero.reducing import Flattening
from zerokern.zero.shard import shard_of

PLAIN, OURS, FSDP2, FSDP2_KEEPS = "plain", "zk.shard, stage 3", "FSDP2", "FSDP2, gathered until backward"
FLOOR, FLOOR_WITHOUT_HOOKS = "floor", "floor, no hooks for tensors"
BLOCKS, WIDTH, WORDS, STEPS, WARM_ROUNDS = 12, 16, 64, 5, 2
UNITS = BLOCKS + 1
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).chunk(3, -1)
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).view(-1, WORDS), tokens.view(-1))


def model_of(name: str) -> Gpt:
    torch.manual_seed(0)
    model = Gpt().bfloat16()
    if name == OURS:
        zk.shard(model, stage=3, units=list(model.blocks), mesh=_group())
        reduction = shard_of(model.head.weight).sharding.reduction  # type: ignore[union-attr]
        reduction._on_host = reduction.memory.needs_scratch = False  # as on a device
    elif name in (FLOOR, FLOOR_WITHOUT_HOOKS):
        Floor(model, list(model.blocks), dist.group.WORLD, hooks=name == FLOOR)
    elif name != PLAIN:
        for one in (*model.blocks, model):
            fully_shard(one, reshard_after_forward=name == FSDP2)
    return model


def _group() -> DeviceGroup:
    pg: Any = dist.group.WORLD
    common = joining._common(pg, CPU)
    group = DeviceGroup(pg, common, CPU, "played")
    joining._meet(pg, group, common)
    return group


class Floor:
    """Shards a model with the calls of torch that no library of the kind can leave out, and with no others.

    A unit allocates its flat parameters, gathers them, waits, and registers views of them in its modules; its gradients
    are copied in one native call, reduced, and put into `.grad` when the next unit's backward begins. `hooks`: autograd
    calls Python for each tensor that it saves and reads, and for each gradient, which is counted. Without a group, as
    on one rank, nothing is gathered or reduced. `swaps`: False below stage 3, where modules keep their parameters.

    Left out is what makes this right: versions of saved tensors; units used outside of their modules, twice or in
    another order; gathers ahead; frozen and shared parameters; gradients that are missing, late or added to; whatever
    the user keeps or writes; other dtypes; agreement and messages between ranks; errors.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], group: Any, *, hooks: bool, swaps: bool = True):
        taken: set[int] = set()
        self.units = [FloorUnit(self, one, taken, group, hooks, swaps) for one in (*blocks, model)]
        self.last: list[FloorUnit] = []  # those whose gradients are yet to be reduced
        self.works: list[Any] = []

    def begin_backward(self, unit: FloorUnit) -> None:
        if unit is self.units[-1]:
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)
            return
        if self.last:
            self.last.pop().collect()
        unit.unshard()
        self.last.append(unit)

    def end_backward(self) -> None:
        for unit in (*self.last, self.units[-1]):
            unit.collect()
        for work in self.works:
            work.wait()
        self.last, self.works = [], []


class FloorUnit:
    def __init__(self, floor: Floor, module: nn.Module, taken: set[int], group: Any, hooks: bool, swaps: bool) -> None:
        self.floor, self.group, self.packs, self.arrived = floor, group, hooks and group is not None, 0
        tables = [one._parameters for one in module.modules() if one._parameters]
        tables = [one for one in tables if not taken.intersection(map(id, one.values()))]
        self.params: list[Any] = [param for table in tables for param in table.values()]
        taken.update(map(id, self.params))
        numels = [param.numel() for param in self.params]
        self.full = torch.cat([param.detach().view(-1) for param in self.params])
        self.shard, self.buffer = self.full.clone(), torch.zeros_like(self.full)
        self.gathered = self.full.data  # which has a version of its own
        self.reduced = self.buffer if group is None else self.buffer.clone()
        fulls, spans, self.shown = (
            [view.view_as(param) for view, param in zip(one.split(numels), self.params, strict=True)]
            for one in (self.full, self.shard if group is not None else self.full, self.reduced)
        )
        for param, span in zip(self.params, spans, strict=True):
            param.data = span
        self.leaves = list(map(nn.Parameter, fulls)) if swaps else self.params
        full_of = dict(zip(map(id, self.params), self.leaves, strict=True))
        self.tables = [
            (table, dict(table), {name: full_of[id(param)] for name, param in table.items()})
            for table in (tables if swaps else ())
        ]
        offsets = accumulate(numels, initial=0)
        pieces = [Piece(at, 0, numel, offset) for at, (numel, offset) in enumerate(zip(numels, offsets, strict=False))]
        self.flattening = Flattening(pieces, self.full.dtype, dict(enumerate(self.leaves)))
        for leaf in self.leaves if hooks else ():
            leaf.register_post_accumulate_grad_hook(self.count)
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)

    def count(self, _: Tensor) -> None:
        self.arrived += 1

    def unshard(self) -> None:
        if self.group is not None and not self.full.untyped_storage().nbytes():
            self.full.untyped_storage().resize_(self.full.nbytes)
            dist.all_gather_single(self.gathered, self.shard, group=self.group, async_op=True).wait()

    def before_forward(self, *_: Any) -> None:
        self.unshard()
        for table, _, full in self.tables:
            table.update(full)
        if self.packs:
            torch._C._autograd._push_saved_tensors_default_hooks(_same, _same)

    def after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.packs:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for table, sharded, _ in self.tables:
            table.update(sharded)
        if self.group is not None and self not in self.floor.units[-2:]:  # backward begins with these
            self.full.untyped_storage().resize_(0)
        output.register_hook(lambda _: self.floor.begin_backward(self))

    def collect(self) -> None:
        assert self.flattening.of_all(self.buffer)
        for leaf, param, shown in zip(self.leaves, self.params, self.shown, strict=True):
            leaf.grad, param.grad = None, shown
        if self.group is not None:
            work = dist.reduce_scatter_single(self.reduced, self.buffer, group=self.group, async_op=True)
            self.floor.works.append(work)
            self.full.untyped_storage().resize_(0)


def _same(saved: Tensor) -> Tensor:
    return saved


class Trained:
    """A model that is trained."""

    def __init__(self, name: str) -> None:
        self.model, self.tokens = model_of(name), torch.randint(0, WORDS, (1, 8))
        for _ in range(3):
            self.step()

    def step(self) -> tuple[float, float]:
        """Returns the CPU seconds of forward and backward."""
        begun = time.thread_time()
        loss = self.model(self.tokens)
        between = time.thread_time()
        loss.backward()
        ended = time.thread_time()
        self.model.zero_grad()
        return between - begun, ended - between

    def calls(self) -> int:
        """Returns how many Python functions forward and backward call."""
        count = 0

        def counted(frame: Any, event: str, arg: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(counted)
        try:
            self.model(self.tokens).backward()
        finally:
            sys.setprofile(None)
        self.model.zero_grad()
        return count


def started() -> None:
    torch.set_num_threads(1)
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  it registers the backend

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)


def calls_of_units(*names: str) -> dict[str, float]:
    """Returns by name the Python calls of a unit over those of the plain model."""
    plain = Trained(PLAIN).calls()
    return {name: (Trained(name).calls() - plain) / UNITS for name in names}


def main(rounds: int) -> None:
    started()
    names = (OURS, FSDP2, FSDP2_KEEPS, FLOOR, FLOOR_WITHOUT_HOOKS)
    for name, calls in calls_of_units(*names).items():
        print(f"{name:31} {calls:6.1f} calls of Python functions a unit")
    trained = {name: Trained(name) for name in (PLAIN, *names)}
    turns: dict[str, list[float]] = {name: [] for name in trained}
    for _ in range(WARM_ROUNDS + rounds):
        for name, one in trained.items():
            phases = zip(*(one.step() for _ in range(STEPS)), strict=True)
            turns[name].append(sum(map(statistics.median, phases)))
    plain, *others = (found[WARM_ROUNDS:] for found in turns.values())
    over = {
        name: [own - base for own, base in zip(found, plain, strict=True)]
        for name, found in zip(names, others, strict=True)
    }
    for name, found in over.items():
        ratio = statistics.median(one / other for one, other in zip(found, over[FSDP2], strict=True))
        print(f"{name:31} {1e6 * statistics.median(found) / UNITS:6.0f} us of CPU time a unit, {ratio:.2f} of FSDP2's")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
