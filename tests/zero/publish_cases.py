"""Programs that train a model under `zk.shard(publish=...)`: what they do is what others foresee least."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from worlds import World, built
from zero_cases import Net

import zerokern as zk

STEPS = 9


def same_bits(ones: list[Tensor], others: list[Tensor]) -> bool:
    pairs = zip(ones, others, strict=True)
    return all(torch.equal(*(one.reshape(-1).view(torch.uint8) for one in pair)) for pair in pairs)


class Partial(Net):
    """May leave out its last layer."""

    leaves = True

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(self.enter(x))
        return self.leave(found) if self.leaves else found[:, :3]


class Program:
    """A model that is trained by AdamW, step by step; others differ in what they override."""

    settings: ClassVar[dict[str, Any]] = {}
    given: ClassVar[dict[str, Any]] = {}
    dtype = torch.bfloat16
    steps = STEPS

    def __init__(self, world: World, publish: str) -> None:
        self.world = world
        self.model = self.net()
        self.wrap(publish)
        self.optimizers = self.make()

    def net(self) -> nn.Module:
        return built(Net).to(self.dtype)

    def wrap(self, publish: str) -> None:
        settings = {"stage": 2, "bucket_bytes": 2048, **self.settings}
        self.world.shard(self.model, publish=publish, **settings)

    def make(self) -> list[Any]:
        return [self.adamw(self.model.parameters())]

    def adamw(self, params: Any, **given: Any) -> Any:
        return zk.AdamW(params, **{"lr": 1e-3, "max_grad_norm": 1.0, **self.given, **given})

    def loss(self, step: int) -> Tensor:
        x, y = batch(step, self.world.rank, self.dtype)
        return (self.model(x) - y).float().square().mean()

    def before(self, step: int) -> None:
        """What the program does before a step."""

    def after(self, step: int) -> None:
        """What it does after one."""

    def step(self, step: int) -> None:
        self.before(step)
        self.loss(step).backward()
        for one in self.optimizers:
            one.step()
        self.after(step)
        self.model.zero_grad()
        for one in self.optimizers:
            one.zero_grad()

    def run(self) -> list[Tensor]:
        for step in range(self.steps):
            self.step(step)
        for one in self.optimizers:
            getattr(one, "flush", lambda: None)()
        with zk.gathered(self.model):
            return [param.detach().clone() for param in self.model.parameters()]


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 6, generator=generator).to(dtype), torch.randn(4, 3, generator=generator).to(dtype)


class Rates(Program):
    """The learning rate goes down and up again."""

    def before(self, step: int) -> None:
        for group in self.optimizers[0].param_groups:
            group["lr"] = (1e-3, 1e-6, 1e-6, 0.0, 1e-6, 1e-7, 1e-3, 1e-2, 1e-6)[step]


class Slow(Program):
    given: ClassVar[dict[str, Any]] = {"lr": 1e-6}


class Overlap(Rates):
    given: ClassVar[dict[str, Any]] = {"schedule": "overlap"}


class Late(Rates):
    given: ClassVar[dict[str, Any]] = {"schedule": zk.Delayed(after=2)}


class LateReloaded(Late):
    def after(self, step: int) -> None:
        if step in (3, 5):
            kept = copy.deepcopy(self.optimizers[0].state_dict())
            self.optimizers[0].load_state_dict(kept)
        if step == 6:
            self.optimizers[0].flush()


class Loaded(Slow):
    """State is loaded before the first step and between others; the model is loaded too."""

    def make(self) -> list[Any]:
        made = super().make()
        fresh = built(Net).to(self.dtype)
        zk_opt = zk.AdamW(fresh.parameters(), lr=1e-6)
        fresh(batch(0, 0, self.dtype)[0]).float().sum().backward()
        zk_opt.step()
        made[0].load_state_dict(zk_opt.state_dict())
        return made

    def after(self, step: int) -> None:
        if step == 4:
            kept = {name: value * 0.5 for name, value in self.model.state_dict().items()}
            self.model.load_state_dict(kept)
            self.optimizers[0].load_state_dict(self.optimizers[0].state_dict())


class LoadedEmpty(Slow):
    """An optimizer's state_dict of before the first step is loaded."""

    def make(self) -> list[Any]:
        made = super().make()
        made[0].load_state_dict(made[0].state_dict())
        return made


class WrittenByAll(Slow):
    def before(self, step: int) -> None:
        with torch.no_grad():
            for param in list(self.model.parameters())[step % 3 :: 3]:
                param.mul_(0.5)


class WrittenByOne(Slow):
    """With "all" other ranks see what an owner has written, and nobody what another has."""

    def before(self, step: int) -> None:
        if step % 2 and self.world.rank == step % self.world.size:
            with torch.no_grad():
                for param in self.model.parameters():
                    param.mul_(0.5)


class WrittenAndRefreshed(Slow):
    def before(self, step: int) -> None:
        if step % 3 == 1:
            for param in self.model.parameters() if self.world.rank == step % self.world.size else ():
                param.data.mul_(0.5)
            self.optimizers[0].refresh_masters()


class WrittenUncounted(Slow):
    """All ranks write what no version counts, the same; then one of them writes something else, if it is to."""

    alike = True

    def before(self, step: int) -> None:
        for param in self.model.parameters() if step == 3 and (self.alike or not self.world.rank) else ():
            param.data.mul_(0.5)


class Pieces(Slow):
    """The optimizer has the pieces, and the program clamps them."""

    def make(self) -> list[Any]:
        return [self.adamw(zk.shards(self.model))]

    def after(self, step: int) -> None:
        with torch.no_grad():
            for piece in zk.shards(self.model) if step < STEPS - 1 else ():
                piece.mul_(0.75)


class PiecesInOverlap(Pieces):
    given: ClassVar[dict[str, Any]] = {"lr": 1e-6, "schedule": "overlap"}

    def after(self, step: int) -> None:
        self.optimizers[0].flush()
        super().after(step)


class OnePiece(Pieces):
    """One rank alone writes to what it owns."""

    def after(self, step: int) -> None:
        if self.world.rank == step % self.world.size:
            super().after(step)


class Torchs(Program):
    def make(self) -> list[Any]:
        return [torch.optim.SGD(zk.shards(self.model), lr=1e-2)]


class TorchsBeside(Slow):
    """torch's optimizer has some pieces, ours the others."""

    def make(self) -> list[Any]:
        pieces = zk.shards(self.model)
        return [self.adamw(pieces[::2]), torch.optim.SGD(pieces[1::2], lr=1e-2)]


class Two(Slow):
    def make(self) -> list[Any]:
        params = list(self.model.parameters())
        return [self.adamw(params[::2], max_grad_norm=None), zk.Lion(params[1::2], lr=1e-6)]


class TwoInOverlap(Two):
    given: ClassVar[dict[str, Any]] = {"lr": 1e-6, "schedule": "overlap"}


class InTurns(Two):
    """Two optimizers step in turns; the other's parameters have no gradients then."""

    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.optimizers[step % 2].step()
        self.model.zero_grad()


class Groups(Rates):
    def make(self) -> list[Any]:
        params = list(self.model.parameters())
        return [self.adamw([{"params": params[:5], "lr": 1e-6}, {"params": params[5:], "weight_decay": 0.5}])]


class Skipped(Slow):
    def loss(self, step: int) -> Tensor:
        return super().loss(step) * (float("inf") if step % 3 == 1 else 1.0)


class SkippedInOverlap(Skipped):
    given: ClassVar[dict[str, Any]] = {"lr": 1e-6, "schedule": "overlap"}


class Absent(Slow):
    """Units have no gradients in some steps."""

    def loss(self, step: int) -> Tensor:
        x, y = batch(step, self.world.rank, self.dtype)
        blocks = self.model.blocks[:: 1 + step % 2]
        x = self.model.enter(x)
        for block in blocks:
            x = block(x)
        return (self.model.leave(x) - y).float().square().mean()


class Frozen(Slow):
    def before(self, step: int) -> None:
        for param in self.model.blocks[1].parameters():
            param.requires_grad_(step % 3 != 1)


class FrozenLate(Frozen):
    given: ClassVar[dict[str, Any]] = {"lr": 1e-6, "schedule": zk.Delayed(after=1)}


class Fp32(Rates):
    dtype = torch.float32


class Fp16(Rates):
    dtype = torch.float16


class Stochastic(Slow):
    given: ClassVar[dict[str, Any]] = {"lr": 1e-5, "master_format": "none"}


class Masters(Rates):
    given: ClassVar[dict[str, Any]] = {"master_format": "fp32"}


class MastersByHand(Slow):
    """The program writes masters, after the first publications, all of which are whole."""

    replaces, when = False, STEPS - 2
    given: ClassVar[dict[str, Any]] = {"lr": 1e-6, "master_format": "fp32"}

    def written(self) -> Iterable[nn.Parameter]:
        return self.model.parameters()

    def after(self, step: int) -> None:
        state = self.optimizers[0].state
        with torch.no_grad():
            for param in self.written() if step == self.when else ():
                if self.replaces:
                    state[param]["master"] = state[param]["master"].detach() * 1.5
                else:
                    state[param]["master"].mul_(1.5)


class MastersReplaced(MastersByHand):
    replaces = True


class MastersOfNoGradient(MastersByHand):
    """In the step after that the last layer has no gradient: what its master was is of use in the one behind it."""

    settings: ClassVar[dict[str, Any]] = {"bucket_bytes": 1 << 20}  # so that the last layer's is sent in that step, too
    steps, when = 16, 11  # once changes alone are sent

    def written(self) -> Iterable[nn.Parameter]:
        return self.model.leave.parameters()  # so few that others see changes alone in that step, too

    def net(self) -> nn.Module:
        return built(Partial).to(self.dtype)

    def loss(self, step: int) -> Tensor:
        self.model.leaves = step != self.when + 1
        return super().loss(step)


class MastersOfNoGradientLater(MastersOfNoGradient):
    given: ClassVar[dict[str, Any]] = {**MastersByHand.given, "schedule": "overlap"}


class Split8(Rates):
    given: ClassVar[dict[str, Any]] = {"master_format": "split8"}


class Mixed(Rates):
    dtype = torch.float32
    settings: ClassVar[dict[str, Any]] = {"mp_policy": None}

    def wrap(self, publish: str) -> None:
        for param in self.model.blocks.parameters():
            param.data = param.data.bfloat16()
        super().wrap(publish)

    def loss(self, step: int) -> Tensor:
        x, y = batch(step, self.world.rank, self.dtype)
        x = self.model.body(self.model.enter(x).bfloat16()).float()
        return (self.model.leave(x) - y).square().mean()


class Large(Rates):
    settings: ClassVar[dict[str, Any]] = {"bucket_bytes": 8 << 20}


class Tiny(Rates):
    settings: ClassVar[dict[str, Any]] = {"bucket_bytes": 64, "stage": 1}


class Muons(Program):
    settings: ClassVar[dict[str, Any]] = {}

    def wrap(self, publish: str) -> None:
        matrices = [param for param in self.model.parameters() if param.ndim == 2]
        self.world.shard(self.model, publish=publish, stage=2, bucket_bytes=2048, whole=matrices)

    def make(self) -> list[Any]:
        rest = [param for param in self.model.parameters() if param.ndim != 2]
        matrices = [param for param in self.model.parameters() if param.ndim == 2]
        return [zk.Muon(matrices, lr=1e-6, ns_dtype="fp32"), self.adamw(rest, lr=1e-6)]


class InHost(Rates):
    given: ClassVar[dict[str, Any]] = {"tier": "cpu", "schedule": "overlap"}


class Copied(Slow):
    """The optimizer is taken over by its state in another one."""

    def after(self, step: int) -> None:
        if step == 4:
            old = self.optimizers[0]
            self.optimizers = self.make()
            self.optimizers[0].load_state_dict(old.state_dict())
            old.close()


class Gathered(Slow):
    def after(self, step: int) -> None:
        with zk.gathered(self.model, write=True), torch.no_grad():
            for param in self.model.parameters():
                param.add_(0.01)


class Followed(Rates):
    """Somebody follows by deltas at the same time."""

    def make(self) -> list[Any]:
        made = super().make()
        self.follower = zk.deltas(self.model, made[0])
        with zk.gathered(self.model):
            self.copy = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        return made

    def after(self, step: int) -> None:
        if step % 2 == 0:
            self.follower.take().apply_(self.copy)
            with zk.gathered(self.model):
                for name, param in self.model.named_parameters():
                    assert torch.equal(self.copy[name], param), name


class FollowedInOverlap(Followed):
    given: ClassVar[dict[str, Any]] = {"schedule": "overlap"}


class FollowedLate(Followed):
    given: ClassVar[dict[str, Any]] = {"schedule": zk.Delayed(after=1)}


class TwoModels(Slow):
    """One optimizer has two models, of which one publishes all."""

    def make(self) -> list[Any]:
        self.other = self.world.shard(built(Net, 5).to(self.dtype), stage=2)
        return [self.adamw([*self.model.parameters(), *self.other.parameters()])]

    def loss(self, step: int) -> Tensor:
        x, y = batch(step, self.world.rank, self.dtype)
        return ((self.model(x) - y) * self.other(x)).float().square().mean()


PROGRAMS = [
    one for one in list(globals().values()) if isinstance(one, type) and issubclass(one, Program) and one is not Program
]
