"""Training with optimizers of which only the schedule differs, and the loop of the paper that `Delayed` is held to.

A `Row` says what is trained: wrapped how, in which dtype, clipped how often. It is trained on a `World` of tests/zero:
alone, on threads that play ranks, or on real ranks.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zero"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from optim_cases import MAKERS, same_bits
from worlds import World, built
from zero_cases import IN, OUT, Block, batch

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.zero.shard import shard_of

BUCKET_NBYTES = 1024  # several buckets at every stage
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCHEDULES = {"sync": "sync", "overlap": "overlap", "delayed": zk.Delayed(), "delayed after 2": zk.Delayed(after=2)}
# The norm of the gradients of `Small` is between 0.02 and 30, for `loss_scale` draws from two decades.
LIMITS = {"none": None, "never": 1e9, "random": 0.7, "often": 0.1}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Ranks share the machine; and sums of the same order have the same bits only with the same threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def exact_calls(schedule: Any) -> int:
    """How many calls of step() a schedule makes exactly."""
    return schedule.after if isinstance(schedule, zk.Delayed) else 10**9


class Small(nn.Module):
    """A root with parameters of its own and two units, none of whose sizes fits anything."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(IN, 10)
        self.blocks = nn.ModuleList([Block(7), Block(23)])
        self.leave = nn.Linear(10, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


@dataclass(frozen=True)
class Row:
    """What is trained. `dtype` "mixed": fp32 parameters and torch's MixedPrecisionPolicy in bf16.

    `scaled`: through a GradScaler. `broken`: steps whose gradients are not finite.
    """

    wrap: str = "plain"
    dtype: str = "fp32"
    clip: str = "random"
    accumulate: int = 1
    steps: int = 200
    name: str = "adamw"
    formats: tuple[tuple[str, Any], ...] = ()
    scaled: bool = False
    broken: tuple[int, ...] = ()
    make: Callable[[], nn.Module] = Small

    def __str__(self) -> str:
        formats = [str(value) for _, value in self.formats] + ["scaled"] * self.scaled
        name = [self.name] * (self.name != "adamw")
        return ", ".join(
            [*name, self.wrap, self.dtype, f"clipped {self.clip}", f"{self.accumulate} at a time", *formats]
        )

    def model(self, world: World, seed: int = 0) -> nn.Module:
        model = built(self.make, seed)
        if self.dtype in NARROW:
            model.to(NARROW[self.dtype])
        if self.wrap.startswith("stage"):
            return world.shard(model, stage=int(self.wrap[-1]), mp_policy=self._policy(), bucket_bytes=BUCKET_NBYTES)
        if self.wrap == "fsdp2":
            fully_sharded(world, model, self._policy())
        return model

    def _policy(self) -> Any:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        given = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if self.dtype == "mixed" else {}
        return MixedPrecisionPolicy(**given)


def fully_sharded(world: World, model: nn.Module, policy: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world.size,))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)


def optimizer_of(row: Row, model: nn.Module, **settings: Any) -> Any:
    """With two groups, as models are trained: matrices decay, the rest does not."""
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.ndim >= 2]},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]
    return MAKERS[row.name](groups, **{"max_grad_norm": LIMITS[row.clip], **dict(row.formats), **settings})


class Late:
    """The paper's loop: an exact optimizer over parameters that are one update ahead of those that are seen.

    The first `after` calls show what they have just made, later ones what the call before had made.
    """

    def __init__(self, seen: Iterable[Tensor], ahead: Iterable[Tensor], optimizer: Any, after: int) -> None:
        self.pairs = list(zip(seen, ahead, strict=True))
        self.optimizer, self.after, self.calls = optimizer, after, 0

    def step(self, step: Callable[[Any], Any] = lambda optimizer: optimizer.step()) -> None:
        self.calls += 1
        before = [ahead.detach().clone() for _, ahead in self.pairs]
        for seen, ahead in self.pairs:
            ahead.grad = seen.grad
        step(self.optimizer)
        self.show(before if self.calls > self.after else [ahead for _, ahead in self.pairs])

    def flush(self) -> None:
        self.show([ahead for _, ahead in self.pairs])

    def show(self, values: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for (seen, _), value in zip(self.pairs, values, strict=True):
                seen.copy_(value.detach())

    def zero_grad(self) -> None:
        for seen, _ in self.pairs:
            seen.grad = None


class ByHand(Late):
    """The same for what a row says. Its tier is the device: what an optimizer does in a step has its own tests."""

    def __init__(self, row: Row, world: World, after: int, model: nn.Module | None = None, seed: int = 0) -> None:
        self.model = row.model(world, seed) if model is None else model
        self.ahead = row.model(world, seed)
        super().__init__(self.model.parameters(), self.ahead.parameters(), optimizer_of(row, self.ahead), after)


@dataclass
class Trace:
    """What a run showed: each loss, each norm, and what there is at the end, of this rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    skipped: int = 0
    values: list[Tensor] = field(default_factory=list)
    state: dict[Any, Any] = field(default_factory=dict)


def loss_scale(step: int) -> float:
    """Two decades up and down, so that a limit between them clips some steps."""
    return 10 ** (2 * torch.rand((), generator=torch.Generator().manual_seed(step)).item() - 1)


def forward(world: World, row: Row, model: nn.Module, number: int) -> Tensor:
    x, y = batch(number, world.rank)
    return nn.functional.mse_loss(model(x.to(NARROW.get(row.dtype, torch.float32))).float(), y)


def backward(world: World, row: Row, model: nn.Module, step: int, scaler: Any = None) -> float:
    """The gradients of one step, accumulated; the loss."""
    factor = math.inf if step in row.broken else loss_scale(step) / row.accumulate
    total = []
    for micro in range(row.accumulate):
        with held(row, model, step, last=micro == row.accumulate - 1):
            loss = forward(world, row, model, row.accumulate * step + micro)
            weighted = loss * factor
            (weighted if scaler is None else scaler.scale(weighted)).backward()
        total.append(loss.item())
    if row.wrap == "plain" and world.size > 1:
        world.average_gradients(model.parameters())
    return math.fsum(total)


def scaled_step(row: Row, scaler: Any, step: int) -> Callable[[Any], None]:
    """What a loop with a GradScaler does to its optimizer; every other step unscales by itself before."""

    def run(optimizer: Any) -> None:
        if step % 2 and row.dtype != "fp16":  # that is for fp32 gradients, torch says
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return run


def held(row: Row, model: nn.Module, step: int, last: bool) -> contextlib.AbstractContextManager:
    """Every other step reduces once for all micro-batches."""
    once = step % 2 == 0
    if row.wrap == "fsdp2":
        model.set_requires_gradient_sync(last or not once)
    elif row.wrap != "plain" and once and not last:
        return zk.no_sync(model)
    return contextlib.nullcontext()


def on_device(device: PlayedDevice, row: Row, model: nn.Module) -> None:
    """The memory that a model's parameters have here plays being the device's."""
    for param in model.parameters():
        home = shard_of(param)
        for one in (param,) if home is None else (param, home.piece):
            device.own(one)
        if row.wrap == "fsdp2":
            device.own(param._local_tensor)


def train(
    world: World,
    row: Row,
    model: nn.Module,
    optimizer: Any,
    steps: range | None = None,
    between: Callable[[int], object] = lambda step: None,
) -> Trace:
    """`optimizer`: one of ours over the model's parameters, or a `ByHand`. Its learning rate goes down and up again."""
    trace = Trace()
    by_hand = isinstance(optimizer, ByHand)
    inner = optimizer.optimizer if by_hand else optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4) if row.scaled else None
    with one_thread():
        for step in range(row.steps) if steps is None else steps:
            trace.losses.append(backward(world, row, model, step, scaler))
            for group in inner.param_groups:
                group["lr"] = 1e-2 * (1 + (step % 5)) / 5
            work = (lambda one: one.step()) if scaler is None else scaled_step(row, scaler, step)
            optimizer.step(work) if by_hand else work(optimizer)
            trace.norms.append(inner.grad_norm)
            model.zero_grad()
            between(step)
    trace.skipped = inner.skipped_steps
    if inner.schedule == "overlap":  # what this rank has is read from where it lies, where no forward waits for it
        inner.flush()
    trace.values = values(model)
    trace.state = copied(inner.state_dict())
    return trace


def values(model: nn.Module) -> list[Tensor]:
    """Copies of what this rank has of the parameters."""
    return [local(param).clone() for param in model.parameters()]


def local(value: Any) -> Any:
    """What this rank has of a value, plain."""
    if hasattr(value, "to_local"):
        value = value.to_local()
    return getattr(value, "local", value).detach()


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """A state_dict of its own memory, with this rank's part of each tensor."""
    entries = {
        number: {key: local(value).clone() for key, value in entry.items()} for number, entry in state["state"].items()
    }
    return {"state": entries, "param_groups": copy.deepcopy(state["param_groups"])}


def agree(ours: Trace, reference: Trace, *, ahead: bool = False) -> None:
    """The same bits in everything. `ahead`: but for values of our state that are not published yet."""
    pairs = enumerate(zip(ours.losses, reference.losses, strict=True))
    differs = [step for step, (mine, theirs) in pairs if mine != theirs]
    assert not differs, f"the loss of step {differs[0]} is the first that differs"
    assert repr(ours.norms) == repr(reference.norms), "norms differ"  # some of them are no numbers
    assert ours.skipped == reference.skipped
    assert same_bits(ours.values, reference.values), "parameters differ at the end"
    same_states(ours.state, reference.state, ahead=ahead)


def same_states(ours: dict[str, Any], reference: dict[str, Any], *, ahead: bool = False) -> None:
    """Entry for entry, key for key, bit for bit."""
    mine, theirs = ours["state"], reference["state"]
    assert mine.keys() == theirs.keys()
    for number, entry in mine.items():
        entry = {key: value for key, value in entry.items() if not (ahead and key == "pending")}
        assert entry.keys() == theirs[number].keys(), number
        differ = [key for key, value in entry.items() if not same_bits([value], [theirs[number][key]])]
        assert not differ, f"{differ} of parameter {number} differ"


def kept_of(optimizer: Any) -> dict[str, Any]:
    """A state_dict with memory of its own, of what ranks have of it."""
    state = optimizer.state_dict()
    entries = {number: {key: value.clone() for key, value in entry.items()} for number, entry in state["state"].items()}
    return {**state, "state": entries, "param_groups": copy.deepcopy(state["param_groups"])}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    with zk.gathered(model):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def loads_back(world: World, row: Row, model: nn.Module, optimizer: Any) -> None:
    """A checkpoint of three steps is loaded while an update is under way: what follows is what followed it."""
    train(world, row, model, optimizer, range(3))
    weights, kept, rest = weights_of(model), kept_of(optimizer), range(3, row.steps)
    expected = train(world, row, model, optimizer, rest)
    with one_thread():
        backward(world, row, model, 50)
        optimizer.step()
        model.zero_grad()
    model.load_state_dict(weights)
    optimizer.load_state_dict(kept)
    agree(train(world, row, model, optimizer, rest), expected)
