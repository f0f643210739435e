"""A small GPT, trained by zk.Muon and zk.AdamW: how far from float64 it ends, and what memory a step takes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tables import each
from torch import Tensor, nn
from torch.nn import functional

import zerokern as zk
from zerokern.optim import matrices, small_matrices

WIDTH, WORDS, LENGTH, STEPS = 16, 13, 8, 200


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)]
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Exactly(torch.optim.Optimizer):
    """torch.optim.Muon's rule with every number in float64."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        a, b, c = 3.4445, -4.775, 2.0315
        for param in (param for group in self.param_groups for param in group["params"]):
            average = self.state[param].setdefault("average", torch.zeros_like(param))
            average.lerp_(param.grad, 0.05)
            x = param.grad.lerp(average, 0.95)
            x = x / x.norm()
            x = x.T if (tall := x.shape[0] > x.shape[1]) else x
            for _ in range(5):
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            rate = 0.02 * max(1.0, param.shape[0] / param.shape[1]) ** 0.5
            param.mul_(1.0 - 0.02 * 0.1).sub_(x.T if tall else x, alpha=rate)


def trained(model: nn.Module, *optimizers: Any) -> tuple[list[Tensor], float]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        begins, strides = (torch.randint(1, WORDS, (8, 1), generator=generator) for _ in range(2))
        text = (begins + strides * torch.arange(LENGTH + 1)) % WORDS
        loss = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [param.detach().double() for param in model.parameters()], float(loss.detach())


def rest_of(model: nn.Module) -> Any:
    return torch.optim.AdamW(zk.muon_groups(model, matrices=["*.qkv.weight"])[1], lr=0.01)


def matrices_of(model: nn.Module) -> Any:
    return zk.muon_groups(model, matrices=["*.qkv.weight"])[0]


def plain(groups: Any) -> Any:
    return [param for group in groups for _, param in group["params"]]


def test_no_further_from_float64_than_torch() -> None:
    torch.manual_seed(0)
    model = Gpt()
    exact, ours, theirs = copy.deepcopy(model).double(), copy.deepcopy(model), copy.deepcopy(model)
    truth, loss = trained(exact, Exactly(plain(matrices_of(exact))), rest_of(exact))
    one, _ = trained(ours, zk.Muon(matrices_of(ours), lr=0.02), rest_of(ours))
    other, _ = trained(theirs, torch.optim.Muon(plain(matrices_of(theirs)), lr=0.02), rest_of(theirs))
    assert loss < 1.0, "it learns"

    def distance(values: list[Tensor]) -> float:
        pairs = zip(values, truth, strict=True)
        return float(sum((value - exactly).square().sum() for value, exactly in pairs) ** 0.5)

    print(f"from float64: {distance(one):.3g}, torch {distance(other):.3g}, loss {loss:.3g}")
    assert distance(one) <= distance(other)


@each("together", [0, 65536])
def test_one_matrix_or_one_batch_is_there_at_a_time(together: int, monkeypatch: Any) -> None:
    """Of many: a step allocates as much as for the largest alone, or for the equal ones below the bound, and frees it.

    0: none are small.
    """
    monkeypatch.setattr(small_matrices, "BATCH_NUMEL", together)
    held: list[int] = []
    iterate_ = matrices.iterate_

    def measured(*given: Any) -> None:
        held.append(optimizer.held.nbytes)
        iterate_(*given)

    class Held:
        def __init__(self, opt: Any) -> None:
            self.opt = opt

        @property
        def nbytes(self) -> int:
            spare = self.opt.holdings.bound.binding.compute.table.spare
            return spare._memory.nbytes + spare._sums.nbytes

    params = [nn.Parameter(torch.randn(size, 96)) for size in (32, 300, 64, 300)]
    optimizer = zk.Muon(params, ns_dtype="fp32")
    optimizer.held = Held(optimizer)
    for param in params:
        param.grad = torch.randn_like(param)
    monkeypatch.setattr(matrices, "iterate_", measured)
    optimizer.step()
    assert held == ([4 * 2 * 300 * 96 + 8] * 3 if together else [4 * 300 * 96 + 8] * 4)
    assert optimizer.held.nbytes == 0
