"""What saving, loading and exporting take beside what rests, as the kernel counts it: rings and pieces, never a whole.

Whatever is converted on its way is so a bounded part at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from tries import best
from weight_cases import BF16, MIB, SINGLE, large_things_apart, load_pretrained, peak, restart_peak
from worlds import World, built, on_ranks, ranked

import zerokern as zk
from zerokern.io.tier import NvmeTier

WIDTH, DEPTH = 1536, 6
UNIT = WIDTH * WIDTH * 2
RING = 8 * MIB
STAGING = 8 * MIB
CONVERTED = 32 * MIB  # a batch of what is read, and what is made of it
SMALL = {"state_format": "int8", "master_format": "split8"}


class Deep(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=BF16) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def grown(work: Callable[[], object]) -> int:
    """By how much a process has more than before at most, while it works."""
    large_things_apart()
    restart_peak()
    before = peak()
    work()
    return peak() - before


def lived(folder: Path, rank: int, width: int) -> dict[str, int]:
    """What each part of a model's life took."""
    took: dict[str, int] = {}
    models: list[tuple[nn.Module, torch.optim.Optimizer]] = []

    def begin(name: str, **settings: str) -> None:
        model = zk.build(lambda: Deep(width), stage=3)
        tier = zk.Nvme(folder / f"{name}{width}.{rank}", ring_nbytes=RING)
        models.append((model, zk.AdamW(model.parameters(), tier=tier, max_grad_norm=1.0, **settings)))

    def step() -> None:
        model, opt = models[-1]
        model(torch.ones(2, width, dtype=BF16)).float().square().mean().backward()
        took["step"] = grown(opt.step)
        opt.zero_grad()

    took["build"] = grown(lambda: begin("first"))
    step()
    del took["step"]  # the first one takes the ring
    step()
    saved, exported = folder / f"saved{width}", folder / f"exported{width}"
    took["save"] = grown(lambda: zk.save(saved, *models[-1]))
    took["export"] = grown(lambda: zk.export(exported, models[-1][0], dtype=torch.float32, opt=models[-1][1]))
    models.clear()
    begin("second", **SMALL)
    took["load converted"] = grown(lambda: zk.load(saved, *models[-1], lossy=True)) - RING
    models.clear()
    begin("third", **SMALL)
    took["load_pretrained"] = grown(lambda: zk.load_pretrained(models[-1][0], exported))
    step()
    took["first step"] = took.pop("step") - RING
    return took


@ranked
def lives(world: World, folder: Path) -> dict[str, int]:
    lived(folder, world.rank, 64)  # what a first call imports, and the pages of its code
    return lived(folder, world.rank, WIDTH)


def test_nothing_is_as_large_as_the_model_but_what_rests(tmp_path: Path) -> None:
    own = UNIT * DEPTH
    for took in on_ranks(1, lives, tmp_path):
        allowed = {
            "build": own + 2 * UNIT,  # one as it was made, one in its bucket
            "save": STAGING + UNIT,
            "export": STAGING,
            "load converted": STAGING + CONVERTED,
            "load_pretrained": own + CONVERTED,  # what bf16 rounds away, for the optimizer
            "first step": UNIT,
        }
        assert took.keys() == allowed.keys()
        beyond = {what: took[what] - most - 4 * MIB for what, most in allowed.items()}
        assert max(beyond.values()) <= 0, {what: nbytes // MIB for what, nbytes in took.items()}


@pytest.mark.parametrize("stage, master_format", [(3, "split16"), (2, "split8"), (3, "fp32")])
def test_masters_that_come_and_go_in_pieces_are_the_exact_values(
    stage: int, master_format: str, tmp_path: Path
) -> None:
    """Records are smaller than parameters; some values are nearer to the next bf16 once they have 24 bits."""
    values, found = built(layers), []
    odd = torch.tensor([0x3F807FFF, 0x3F807F80, 0x3F807F7F], dtype=torch.int32)
    values[1].weight.data[0, :3] = odd.view(torch.float32)
    zk.export(tmp_path / "files", values)
    for name, tier in (("here", "cpu"), ("there", zk.Nvme(tmp_path / "tier", ring_nbytes="1M"))):
        model = zk.shard(built(layers).bfloat16(), stage=stage)
        zk.load_pretrained(model, tmp_path / "files")
        opt = zk.AdamW(model.parameters(), lr=2.0**-20, tier=tier, master_format=master_format)
        for step in range(2):
            model(torch.full((2, 300), 0.5 + step, dtype=BF16)).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
            zk.export(tmp_path / f"{name} {step}", model, dtype=torch.float32, opt=opt)
            found.append(load_file(tmp_path / f"{name} {step}" / SINGLE))
    for mine, expected in zip(found[2:], found[:2], strict=True):
        assert all(torch.equal(mine[name], expected[name]) for name in expected)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 170), nn.Linear(170, 20))


def test_what_rests_on_disk_is_not_read_for_each_parameter_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several parameters rest together: bytes of theirs that are read to build, save, load and export."""
    read = 0
    fetch = NvmeTier.fetch

    def counted(place: NvmeTier, kept: Any, out: torch.Tensor, after: Any = None) -> Any:
        nonlocal read
        read += kept.wanted.nbytes * (kept.wanted.role == "parameters")
        return fetch(place, kept, out, after)

    monkeypatch.setattr(NvmeTier, "fetch", counted)
    found, folder = {}, tmp_path / "saved"

    def counting(name: str, work: Callable[[], Any]) -> Any:
        nonlocal read
        read = 0
        result = work()
        found[name] = read / own
        return result

    own = sum(param.nbytes for param in layers().parameters()) / 2  # in bf16
    model = counting(
        "build", lambda: zk.build(lambda: layers().bfloat16(), stage=3, tier=zk.Nvme(tmp_path / "parameters"))
    )
    opt = zk.AdamW(model.parameters(), tier=zk.Nvme(tmp_path / "state", ring_nbytes=RING), **SMALL)
    model(torch.ones(2, 300, dtype=BF16)).float().square().mean().backward()
    opt.step()
    counting("save", lambda: zk.save(folder, model, opt))
    counting("load", lambda: zk.load(folder, model, opt))
    counting("export", lambda: zk.export(tmp_path / "exported", model))
    most = {"build": 0, "save": 1, "load": 2, "export": 1}  # by a load once more, for what remainders belong to
    assert all(found[what] <= times + 0.1 for what, times in most.items()), found


class Wide(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=BF16) for _ in range(depth))


@ranked
def peaks(world: World, path: Path, width: int, depth: int) -> tuple[int, int]:
    large_things_apart()
    first, model = (zk.build(lambda: Wide(width, depth), stage=3) for _ in range(2))
    load_pretrained(first, path)  # what a first call imports, and the pages of its code
    del first
    large_things_apart()
    restart_peak()
    before = peak()
    load_pretrained(model, path)
    return peak() - before, sum(getattr(p, "local", p).nbytes for p in model.parameters())


def test_no_rank_has_a_tensor_whole(tmp_path: Path) -> None:
    """As the kernel counts: two ranks load 8 tensors of 4 MiB; each may take the half of one, and what is kept."""
    width, depth = 1024, 8
    state = Wide(width, depth).state_dict()
    whole = width * width * 4
    save_file({name: tensor.float() for name, tensor in state.items()}, tmp_path / "weights")

    def most_grown() -> float:
        """Pages of code that the system had taken away come back, and count; so the least of several loads."""
        found = on_ranks(2, peaks, tmp_path / "weights", width, depth)
        assert [own for _, own in found] == [width * width * depth] * 2
        return max(grown for grown, _ in found)

    # what bf16 rounds away is kept; half a tensor as it is read, and split
    allowed = width * width * depth + whole + 2 * MIB
    assert best(most_grown, allowed) < allowed


@ranked
def peak_of_a_tensor(world: World) -> int:
    large_things_apart()
    restart_peak()
    before = peak()
    torch.ones(20 * MIB, dtype=torch.uint8)
    return peak() - before


def test_the_peak_would_show_a_whole_tensor() -> None:
    """In a process of its own: the heap of this one may have had room for it already."""
    assert on_ranks(1, peak_of_a_tensor)[0] > 19 * MIB


STATE_MIB = 64


@ranked
def loaded_over(world: World, folder: Path, kind: str) -> tuple[int, bool]:
    """64 MiB of state are loaded into 64 MiB of state."""
    large_things_apart()

    def begun(width: int, count: int) -> tuple[nn.Module, Any]:
        model = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        if kind == "sharded":
            zk.shard(model, stage=2)
        opt = (torch.optim.AdamW if kind == "theirs" else zk.AdamW)(model.parameters())
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.01)
        opt.step()
        opt.zero_grad(set_to_none=True)
        return model, opt

    small, used = begun(4, 1)
    zk.save(folder / "warm", small, used)
    zk.load(folder / "warm", small, used)
    model, opt = begun(1024, 8)
    zk.save(folder / "kept", model, opt)

    def state() -> list[torch.Tensor]:
        entries = opt.state_dict()["state"].values()
        return [getattr(one, "local", one).detach() for entry in entries for one in entry.values()]

    expected = [one.clone() for one in state()]
    for one in state():
        one.fill_(5)
    del one
    took = grown(lambda: zk.load(folder / "kept", model, opt))
    found = state()
    return took // MIB, len(found) == len(expected) == 24 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", ["sharded", pytest.param("theirs", marks=pytest.mark.slow)])
def test_loading_into_state_takes_no_second_state(kind: str, tmp_path: Path) -> None:
    ((took, same),) = on_ranks(1, loaded_over, tmp_path, kind)
    assert same and took < STATE_MIB * 0.7
