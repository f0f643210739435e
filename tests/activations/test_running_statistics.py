"""Units that are computed again in backward count a batch once in the running statistics of their norms."""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable

import pytest
import torch
from torch import nn
from worlds import World, everywhere

import zerokern as zk


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), norm(4), nn.GELU())
            for norm in (nn.BatchNorm1d, lambda width: nn.BatchNorm1d(width, momentum=None))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@everywhere(1, stage=[0, 2, 3], keep=["device", "cpu", "nvme"])
def test_a_batch_counts_once(world: World, stage: int, keep: str) -> None:
    torch.manual_seed(3)
    plain = Normed()
    ours = copy.deepcopy(plain)
    with tempfile.TemporaryDirectory() as place:
        world.shard(ours, stage=stage, keep=zk.Nvme(f"{place}/kept") if keep == "nvme" else keep)
        for step in range(3):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            losses = [model(x).square().sum() for model in (plain, ours)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses)
        for (name, mine), theirs in zip(ours.named_buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, theirs), name
        del ours, losses


def replaced(block: nn.Module) -> None:
    forward = block.forward
    block.forward = functools.wraps(forward)(lambda x: forward(x))


def compiled(block: nn.Module) -> None:
    block.compile(backend="eager")


@pytest.mark.parametrize("change", [replaced, compiled])
def test_a_forward_that_was_replaced_or_compiled(change: Callable[[nn.Module], None]) -> None:
    """The unit is known, whatever function computes it."""
    plain, ours, cut = (Normed() for _ in range(3))
    ours.load_state_dict(plain.state_dict())
    for block in (*ours.blocks, *cut.blocks):
        change(block)
    zk.shard(ours, stage=2, keep="device")
    for step in range(2):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        for model in (plain, ours):
            model(x).square().sum().backward()
    for mine, theirs in zip(ours.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    zk.shard(cut, stage=2, micro=2)
    with pytest.raises(zk.StateError, match=r"BatchNorm1d.* computes over the whole batch"):
        cut(x).sum().backward()


def test_of_zk_recompute_too() -> None:
    norm, plain = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = torch.randn(5, 4, requires_grad=True)
    zk.recompute(norm, x).sum().backward()
    plain(x).sum().backward()
    assert norm.num_batches_tracked == 1
    assert torch.equal(norm.running_mean, plain.running_mean) and torch.equal(norm.running_var, plain.running_var)


class Codebook(nn.Module):
    """Buffers that its forward writes to, one in place and one anew, and computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("constant", torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale.clone() * self.constant
        with torch.no_grad():
            self.scale.mul_(0.5).add_(y.mean(0))
            self.count = self.count + len(x)
        return y.tanh()


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


@pytest.mark.parametrize("build", [Codebook, Spectral])
def test_a_recomputation_begins_with_the_buffers_of_its_forward(build: Callable[[], nn.Module]) -> None:
    """Also where two forwards come before their backwards, and where a graph is passed through twice."""
    torch.manual_seed(1)
    plain = build()
    ours = copy.deepcopy(plain)
    x = torch.randn(3, 5, 4)
    for run, module in ((lambda module, x: module(x), plain), (zk.recompute, ours)):
        for step in range(3):
            losses = [run(module, (x[number] + step).requires_grad_()).square().sum() for number in range(2)]
            losses[0].backward(retain_graph=True)
            losses[0].backward()
            losses[1].backward()
    for mine, theirs in zip([*ours.parameters()], [*plain.parameters()], strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    for (name, mine), theirs in zip(ours.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs), name
