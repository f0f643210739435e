"""Context parallelism: ranks of a flattened dp x cp mesh divide a model whose sequences they share.

torch's ring attention has no kernel for a CPU (its dispatcher knows flash, efficient and cuDNN attention of CUDA), so
that attention is done by hand here: keys and values of all ranks of a sequence are gathered.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from worlds import World, on_ranks, ranked, step_and_zero

import zerokern as zk

WORDS, DIM, LENGTH, ROWS, CLIP = 32, 16, 8, 2, 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # no bias: that of keys has no gradient but rounding, of which Adam makes whole steps
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, places: Tensor, cp: DeviceMesh | None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        everywhere = torch.arange(LENGTH)
        if cp is not None:
            k, v = (all_gather_tensor_autograd(one.contiguous(), 2, cp.get_group()) for one in (k, v))
        mask = places[:, None] >= everywhere[None, :]
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, rows: Tensor, places: Tensor, cp: DeviceMesh | None = None) -> Tensor:
        x = self.words(rows) + self.places(places)
        for block in self.blocks:
            x = block(x, places, cp)
        return self.head(x)


def batch(seed: int, number: int) -> tuple[Tensor, Tensor]:
    """Of all ranks; some targets are left out, so that ranks have different numbers of them."""
    rng = torch.Generator().manual_seed(1000 * seed + number)
    rows = torch.randint(WORDS, (2 * ROWS, LENGTH + 1), generator=rng)
    targets = rows[:, 1:].masked_fill(torch.rand(2 * ROWS, LENGTH, generator=rng) < 0.2, -100)
    return rows[:, :-1], targets


def summed(made: Tensor, targets: Tensor, count: Tensor) -> Tensor:
    return nn.functional.cross_entropy(made.flatten(0, 1), targets.flatten(), reduction="sum") / count


@ranked
def as_one_process(world: World, stage: int, seed: int, steps: int, accumulated: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    dp, cp = mesh["dp"], mesh["cp"]
    torch.manual_seed(seed)
    ours, plain = GPT(), GPT()
    plain.load_state_dict(ours.state_dict())
    zk.shard(ours, stage=stage, mesh=mesh["dp", "cp"]._flatten("dp_cp"), reduce="sum")
    pairs = [zk.AdamW(ours.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2)]
    here = slice(dp.get_local_rank() * ROWS, (dp.get_local_rank() + 1) * ROWS)
    places = torch.arange(LENGTH).chunk(2)[cp.get_local_rank()]
    for step in range(steps):
        batches = [batch(seed, step * accumulated + number) for number in range(accumulated)]
        count = sum((targets != -100).sum() for _, targets in batches)
        total = torch.zeros(())
        expected = torch.zeros(())
        for rows, targets in batches:
            loss = summed(ours(rows[here][:, places], places, cp), targets[here][:, places], count)
            loss.backward()
            total += loss.detach()
            loss = summed(plain(rows, torch.arange(LENGTH)), targets, count)
            loss.backward()
            expected += loss.detach()
        torch.testing.assert_close(world.total(total), expected, rtol=2e-5, atol=0.0)
        with zk.gathered(ours):
            values = [param.detach().clone() for param in ours.parameters()]
        for mine, theirs in zip(values, plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-4, atol=2e-4)
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None
            grad, span = mine.grad, theirs.grad
            if stage > 0:
                grad, span = grad.local, grad.span_of(span)
            torch.testing.assert_close(grad, span, rtol=1e-4, atol=1e-5)
        norms = [zk.clip_grad_norm_(ours, CLIP), nn.utils.clip_grad_norm_(plain.parameters(), CLIP)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=0.0)
        step_and_zero(*pairs)


def test_flattened_dp_and_cp_are_one_process() -> None:
    on_ranks(4, as_one_process, 3, 1, 3, 2, timeout=120)


@pytest.mark.slow
def test_more_steps_at_other_stages() -> None:
    for stage in (0, 1):
        on_ranks(4, as_one_process, stage, 2, 10, 1 + 3 * stage, timeout=230)
