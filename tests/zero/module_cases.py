"""What people do with modules, one case each: `CASES` are programs of tests/conformance, and follow meshes here."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from worlds import World
from zero_cases import IN, OUT, WIDTH, Block, Case, Net, batch, mse

WORDS = 11


class Tied(nn.Module):
    """Output weights are the embedding's, as in a GPT: read in the root's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(33) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_word(model: nn.Module, step: int, world: World) -> Tensor:
    words = torch.randint(WORDS, (3, 6), generator=torch.Generator().manual_seed(100 * step + world.rank))
    return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def tied_across() -> Net:
    net = Net()
    net.blocks[2] = Block(37)
    net.blocks[2].up.weight = net.blocks[0].up.weight
    return net


def frozen() -> Net:
    net = Net()
    net.blocks[1].requires_grad_(False)
    net.enter.bias.requires_grad_(False)
    net.blocks[2].up.weight.requires_grad_(False)
    return net


class Unused(Net):
    """A parameter of the root, one inside of a unit that is used, and a whole unit: none of them in forward."""

    def __init__(self) -> None:
        super().__init__(4)
        self.extra = nn.Linear(5, 5)
        self.blocks[0].extra = nn.Parameter(torch.randn(200))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = block(x)
        return x


class Gate(nn.Module):
    """Experts that only some ranks choose, in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("left", "right")})

    def forward(self, x: Tensor, choice: str) -> Tensor:
        return x + self.experts[choice](x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)
        self.gates = nn.ModuleList(Gate() for _ in range(2))

    def forward(self, x: Tensor, choice: str) -> Tensor:
        x = self.enter(x)
        for gate in self.gates:
            x = gate(x, choice)
        return self.leave(x)


def routed(model: nn.Module, step: int, world: World) -> Tensor:
    """Rank 0 alone chooses `left` in steps 0 and 1, nobody does in step 2, rank 1 does in step 3."""
    x, y = batch(step, world.rank)
    chosen = {0: 0, 1: 0, 2: -1, 3: 1}[step] == world.rank
    return F.mse_loss(model(x, "left" if chosen else "right"), y)


class UnusedUnitHere(Net):
    """A whole unit that only rank 0 runs: right where nothing is gathered."""

    rank = 0

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks[: 3 if self.rank == 0 else 2]:
            x = block(x)
        return x


def with_rank(model: nn.Module, step: int, world: World) -> Tensor:
    model.rank = world.rank
    return mse(model, step, world)


class External(Net):
    """The root reads weights of its units outside of their forward, before and after they have run."""

    def body(self, x: Tensor) -> Tensor:
        y = F.linear(F.linear(x, self.blocks[2].up.weight), self.blocks[2].down.weight)
        x = super().body(x)
        return x + y + F.linear(x @ self.blocks[0].up.weight.t(), self.blocks[1].up.weight[:37].t())


class Repeated(Net):
    """Blocks run several times in one forward, and one of them is in the list twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(self.blocks[0])

    def body(self, x: Tensor) -> Tensor:
        for number in (0, 1, 1, 3, 2, 0):
            x = self.blocks[number](x)
        return x


class Nested(nn.Module):
    """Units inside of units, and parameters between them."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(Net(2) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.nets[0](x) * self.scale + self.nets[1](x)


class Adapted(nn.Module):
    """LoRA: a frozen Linear and a low-rank addition that is trained."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def lora() -> Net:
    net = Net()
    net.requires_grad_(False)
    for block in net.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return net


class Reordered(Net):
    """The order of the units changes with the step; so do those that are left out."""

    order: tuple[int, ...] = (0, 1, 2)

    def body(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


def in_another_order(model: nn.Module, step: int, world: World) -> Tensor:
    model.order = [(0, 1, 2), (2, 0, 1), (1,), (2, 1, 0, 2)][step]
    return mse(model, step, world)


class Checkpointed(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class CheckpointedReentrantly(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class CheckpointedInside(Net):
    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(lambda x, b=block: b.down(F.gelu(b.up(x))), block.norm(x), use_reentrant=False)
        return x


def autocast(model: nn.Module, step: int, world: World) -> Tensor:
    x, y = batch(step, world.rank)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    return F.mse_loss(out.float(), y)


@dataclasses.dataclass
class Output:
    hidden: Tensor
    kept: dict[str, Tensor]


class Wrapping(Block):
    """Takes and returns what is no tensor, as models of a hub do."""

    def forward(self, *, state: Output) -> Output:
        x = super().forward(state.hidden)
        return Output(x, {**state.kept, f"of {len(state.kept)}": x})


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)
        self.blocks = nn.ModuleList(Wrapping(30 + number) for number in range(3))

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        state = Output(self.enter(x), {})
        for block in self.blocks:
            state = block(state=state)
        return {"outs": [self.leave(state.kept["of 1"]), self.leave(state.hidden)]}


def structured(model: nn.Module, step: int, world: World) -> Tensor:
    x, y = batch(step, world.rank)
    return sum(F.mse_loss(out, y) for out in model(x)["outs"])


def twice(loss: Tensor) -> None:
    """Two passes through one graph."""
    loss.backward(retain_graph=True)
    loss.backward()


@torch.inference_mode()
def generated(model: nn.Module, step: int) -> Tensor:
    """Inference tensors must not be left behind for the next step to trip over."""
    words = torch.ones(1, 1, dtype=torch.long)
    for _ in range(4):
        words = torch.cat([words, model(words)[:, -1:].argmax(-1)], dim=1)
    return words.clone()


class Odd(nn.Module):
    """A scalar, an empty parameter, parameters in containers, buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(WIDTH, IN))
        self.several = nn.ParameterList([torch.randn(WIDTH), torch.randn(1, WIDTH)])
        self.named = nn.ParameterDict({"out": torch.randn(OUT, WIDTH)})
        self.norm = nn.BatchNorm1d(WIDTH)
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.linear(x, self.turned) * self.scale + self.several[0] + self.several[1])
        x = x + self.conv(x[:, None, None]).mean((1, 2)) + self.empty.sum()
        return F.linear(x, self.named["out"])


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 17, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(IN, 8), nn.Unflatten(0, (1, -1)), encoder, nn.Flatten(0, 1), nn.Linear(8, OUT))


class Recurrent(nn.Module):
    """Recurrent layers keep lists of, and weak references to, their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(IN, IN, batch_first=True), nn.GRU(IN, IN, batch_first=True)])
        self.leave = nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 3, -1)
        for block in self.blocks:
            x, _ = block(x)
        return self.leave(x[:, -1])


class Summed(Net):
    """Gradients that autograd expands, with strides of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.all = nn.Parameter(torch.randn(5, OUT)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.rows.sum(0) + self.all.sum()


CASES = [
    Case("plain", Net),
    Case("tied", Tied, next_word),
    Case("tied across units", tied_across),
    Case("frozen in part", frozen),
    Case("unused everywhere", Unused),
    Case("experts chosen by some ranks", Mixture, routed, steps=4),
    Case("a unit unused on some ranks", UnusedUnitHere, with_rank, stages=(0, 1, 2)),
    Case("used outside of its module", External),
    Case("repeated", Repeated),
    Case("nested units", Nested),
    Case("LoRA on a frozen base", lora),
    Case("units in another order", Reordered, in_another_order, steps=4),
    Case("checkpointed", Checkpointed),
    Case("checkpointed inside", CheckpointedInside),
    Case("autocast", Net, autocast),
    Case("structured outputs", Structured, structured),
    Case("two backward passes", Net, backward=twice, one_order=False),
    Case("odd parameters", Odd),
    Case("torch's transformer", transformer),
    Case("recurrent", Recurrent),
    Case("expanded gradients", Summed),
]
