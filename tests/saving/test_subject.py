"""What is saved goes back into place: any world size, stage, tier and schedule; training goes on with the same bits.

torch's own file writer and reader stand between; `zk.save` and `zk.load` have tests of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from state_cases import Net, bits, gathered, model_of, put, step, steps, take
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from worlds import World, built, on_ranks, ranked

import zerokern as zk
from zerokern.core.errors import StateError

BF16, FP32 = torch.bfloat16, torch.float32
RING = 1 << 20

ALONE: dict[str, tuple[torch.dtype, Any, dict[str, Any], dict[str, Any]]] = {
    "adamw": (FP32, zk.AdamW, {}, {}),
    "bf16 int8 split8": (BF16, zk.AdamW, *[{"state_format": "int8", "master_format": "split8"}] * 2),
    "bf16 bf16 master": (BF16, zk.AdamW, *[{"state_format": "bf16", "master_format": "fp32"}] * 2),
    "lion": (BF16, zk.Lion, {}, {}),
    "adagrad": (FP32, zk.Adagrad, {}, {}),
    "sgd with momentum": (FP32, zk.SGD, *[{"momentum": 0.9, "dampening": 0.5}] * 2),
    "sgd without state": (BF16, zk.SGD, *[{"master_format": "none"}] * 2),
    "torch's": (FP32, torch.optim.AdamW, {}, {}),
    "torch's sgd": (FP32, torch.optim.SGD, *[{"momentum": 0.9}] * 2),
    "device to cpu": (BF16, zk.AdamW, {}, {"tier": "cpu"}),
    "cpu to nvme": (BF16, zk.AdamW, {"tier": "cpu"}, {"tier": "nvme"}),
    "nvme to nvme": (BF16, zk.AdamW, *[{"tier": "nvme", "state_format": "int8"}] * 2),
    "nvme to device": (FP32, zk.AdamW, {"tier": "nvme"}, {}),
    "sgd on nvme": (BF16, zk.SGD, *[{"tier": "nvme", "momentum": 0.9}] * 2),
}
DELAYED = [(0, 1), (0, 4), (3, 2), (3, 5)]


def made(path: Path, model: nn.Module, kind: Any, settings: dict[str, Any], lr: float = 1e-2) -> torch.optim.Optimizer:
    settings = dict(settings)
    if settings.get("tier") == "nvme":
        settings["tier"] = zk.Nvme(path, ring_nbytes=RING)
    return kind(model.parameters(), lr=lr, **settings)


@pytest.mark.parametrize("case", ALONE)
def test_it_goes_on_with_the_same_bits(case: str, tmp_path: Path) -> None:
    dtype, kind, saves, loads = ALONE[case]
    model, other = model_of(dtype), model_of(dtype, seed=5)
    opt, used = made(tmp_path / "a", model, kind, saves), made(tmp_path / "b", other, kind, loads, lr=5e-2)
    steps(model, opt, range(3))
    steps(other, used, range(50, 52))
    put(tmp_path / "kept", model, opt)
    take(tmp_path / "kept", other, used)
    bits(gathered(other, used), gathered(model, opt))
    for number in range(3, 6):
        assert step(other, used, number) == step(model, opt, number)
    bits(gathered(other, used), gathered(model, opt))


@pytest.mark.parametrize(("after", "count"), DELAYED)
def test_a_pending_update_is_saved_and_published_later(after: int, count: int, tmp_path: Path) -> None:
    settings = {"tier": "cpu", "schedule": zk.Delayed(after=after)}
    model, other = model_of(BF16), model_of(BF16, seed=5)
    opt, used = made(tmp_path, model, zk.AdamW, settings), made(tmp_path, other, zk.AdamW, settings)
    steps(model, opt, range(count))
    steps(other, used, range(50, 53))
    put(tmp_path / "kept", model, opt)
    take(tmp_path / "kept", other, used)
    for number in range(count, count + 4):
        assert step(other, used, number) == step(model, opt, number)
    opt.flush()
    used.flush()
    bits(gathered(other, used), gathered(model, opt))
    if count > after:
        with pytest.raises(StateError, match="saved while a delayed update was pending"):
            take(tmp_path / "kept", other, made(tmp_path, other, zk.AdamW, {}))


def test_groups_counters_and_values_that_are_no_tensors_come_back(tmp_path: Path) -> None:
    def build(seed: int, lr: float) -> tuple[nn.Module, Any]:
        model = model_of(seed=seed)
        groups = [
            {"params": [model.first.weight, model.scale], "lr": torch.tensor(lr), "betas": (0.8, 0.95)},
            {"params": [model.first.bias, model.gain, *model.norm.parameters(), model.last.weight], "lr": lr},
        ]
        return model, zk.AdamW(groups, max_grad_norm=1.0)

    model, opt = build(0, 1e-3)
    steps(model, opt, range(2))
    model.gain.grad = torch.tensor(float("nan"))
    opt.step()
    opt.param_groups[1]["initial_lr"] = float("inf")
    put(tmp_path, model, opt)
    other, used = build(1, 2e-3)
    take(tmp_path, other, used)
    assert used.skipped_steps == 1 and used.grad_norm != used.grad_norm
    assert torch.equal(used.param_groups[0]["lr"], torch.tensor(1e-3)) and used.param_groups[0]["betas"] == (0.8, 0.95)
    assert used.param_groups[1]["initial_lr"] == float("inf") and used.param_groups[1]["lr"] == 1e-3
    bits(gathered(other, used), gathered(model, opt))


def test_a_parameter_without_state_stays_without(tmp_path: Path) -> None:
    model, other = model_of(), model_of(seed=1)
    opt, used = zk.AdamW(model.parameters()), zk.AdamW(other.parameters())
    model.last.weight.requires_grad_(False)
    steps(model, opt, range(2))
    steps(other, used, range(2))
    put(tmp_path, model, opt)
    take(tmp_path, other, used)
    assert not used.state.get(other.last.weight)
    bits(gathered(other, used), gathered(model, opt))


def test_tied_and_wrapped_parameters_are_found_under_any_name(tmp_path: Path) -> None:
    def tied(first: str, second: str) -> nn.Module:
        model = nn.Module()
        setattr(model, first, nn.Linear(3, 3, bias=False))
        setattr(model, second, nn.Linear(3, 3, bias=False))
        getattr(model, second).weight = getattr(model, first).weight
        return model

    model, other = tied("head", "tail"), tied("tail", "head")
    opt, used = zk.SGD(model.parameters(), momentum=0.9), zk.SGD(other.parameters(), momentum=0.9)
    model.head.weight.grad = torch.ones(3, 3)
    opt.step()
    put(tmp_path, torch.compile(model), opt)
    take(tmp_path, other, used)
    assert torch.equal(other.head.weight, model.head.weight)
    assert torch.equal(used.state[other.head.weight]["momentum_buffer"], torch.ones(3, 3))


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(2)), {"calls": 3, "mean": [0.5, float("inf")]}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_what_modules_keep_beside_tensors_is_saved(tmp_path: Path) -> None:
    model, other = nn.Sequential(Kept()), nn.Sequential(Kept())
    model[0].seen["calls"] = 7
    put(tmp_path, model)
    take(tmp_path, other)
    assert other[0].seen["calls"] == 7 and list(other[0].seen["mean"]) == [0.5, float("inf")]


def changes(model: nn.Module) -> None:
    model.last = nn.Linear(37, 8, bias=False)
    model.added = nn.Parameter(torch.ones(1))
    del model.scale


def test_everything_that_differs_is_named_before_anything_is_changed(tmp_path: Path) -> None:
    model, other = model_of(), model_of(seed=1)
    opt = zk.AdamW(model.parameters())
    steps(model, opt, range(1))
    put(tmp_path, model, opt)
    changes(other)
    used = zk.AdamW(other.parameters())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(StateError) as refused:
        take(tmp_path, other, used)
    message = str(refused.value)
    for words in (
        "added: missing",
        "last.weight: shape (7, 37); the model has (8, 37)",
        "scale: unexpected",
        "param_groups[0]: other parameters",
        "nothing was changed",
    ):
        assert words in message, message
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items()) and not used.state
    again = model_of()
    both = [zk.AdamW([again.gain]), zk.AdamW([p for p in again.parameters() if p is not again.gain])]
    lion, foreign = zk.Lion(again.parameters()), torch.optim.RMSprop(again.parameters())
    with pytest.raises(StateError, match="exp_avg_sq' is unexpected; Lion keeps exp_avg"):
        take(tmp_path, again, lion)
    with pytest.raises(StateError, match="it holds 1 optimizers; 2 were passed"):
        take(tmp_path, again, both)
    with pytest.raises(StateError, match="state is that of AdamW, and RMSprop means other things"):
        take(tmp_path, again, foreign)
    put(tmp_path / "alone", model)
    with pytest.raises(StateError, match="holds no optimizer"):
        take(tmp_path / "alone", again, lion)
    stranger = zk.AdamW([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="steps 1 parameters that are not in the model"):
        put(tmp_path / "other", model, stranger)


@pytest.mark.parametrize("kind", ["ours", "nvme", "torch's"])
def test_after_a_load_that_was_broken_off_nothing_steps_or_saves_until_another(kind: str, tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, Any]:
        model = model_of(seed=seed)
        tier = zk.Nvme(tmp_path / f"tier{seed}", ring_nbytes=RING) if kind == "nvme" else "device"
        return model, torch.optim.AdamW(model.parameters()) if kind == "torch's" else zk.AdamW(
            model.parameters(), tier=tier
        )

    model, opt = build(0)
    steps(model, opt, range(2))
    put(tmp_path / "kept", model, opt)
    other, used = build(1)
    steps(other, used, range(2))
    with pytest.raises(InterruptedError):
        take(tmp_path / "kept", other, used, stop=0)
    with pytest.raises(StateError, match="load a checkpoint"):
        step(other, used, 0)
    with pytest.raises(StateError, match="load a checkpoint"):
        put(tmp_path / "torn", other, used)
    used.zero_grad()
    take(tmp_path / "kept", other, used)
    assert step(other, used, 2) == step(model, opt, 2)
    bits(gathered(other, used), gathered(model, opt))


# ranks -------------------------------------------------------------------------------------------------------------

LATE: dict[str, Any] = {"schedule": zk.Delayed(after=1), "tier": "cpu"}
HALF: dict[str, Any] = {"state_format": "int8", "master_format": "split8"}


def sharded(world: World, stage: Any, dtype: torch.dtype, seed: int, bucket: int) -> nn.Module:
    model = model_of(dtype, seed, gain=[1.5])  # FSDP2 takes no scalars
    if stage == "ddp":
        return model if world.size == 1 else nn.parallel.DistributedDataParallel(model)
    if stage == "fsdp2":
        mesh = init_device_mesh("cpu", (world.size,))
        for module in (model.first, model.last):
            fully_shard(module, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return zk.shard(model, stage=stage, bucket_bytes=bucket)


@ranked
def saved(world: World, path: str, stage: Any, dtype: torch.dtype, settings: dict[str, Any]) -> dict[str, Any]:
    """Train, save, and return all that there is."""
    folder = Path(path)
    model = sharded(world, stage, dtype, 0, 1 << 12)
    opt = made(folder / f"disk{world.rank}", model, zk.AdamW, settings)
    steps(model, opt, range(3))
    put(folder / "kept", model, opt)
    found = gathered(model, opt)
    steps(model, opt, range(3, 5))
    return {"then": found, "later": gathered(model, opt)}


@ranked
def loaded(
    world: World, path: str, stage: Any, dtype: torch.dtype, settings: dict[str, Any], lossy: bool
) -> dict[str, Any]:
    folder = Path(path)
    model = sharded(world, stage, dtype, 9, 1 << 14)
    opt = made(folder / f"other{world.rank}", model, zk.AdamW, settings, lr=0.5)
    steps(model, opt, range(60, 61))
    take(folder / "kept", model, opt, lossy=lossy)
    found = gathered(model, opt)
    steps(model, opt, range(3, 5))
    return {"then": found, "later": gathered(model, opt)}


WAYS: dict[str, Any] = {
    "1 to 2, stage 3": (1, 0, {}, 2, 3, {}),
    "2 to 1, stage 3": (2, 3, {}, 1, 0, {}),
    "2, stage 1 to 3": (2, 1, HALF, 2, 3, HALF),
    "2, stage 3 to 2": (2, 3, HALF, 2, 2, HALF),
    "2 to 3, stage 3, cpu": (2, 3, {"tier": "cpu"}, 3, 3, {}),
    "2, stage 2, to nvme": (2, 2, {}, 2, 2, {"tier": "nvme"}),
    "2 to 3, nvme, stage 3": (2, 3, {"tier": "nvme"}, 3, 3, {"tier": "nvme"}),
    "2, nvme int8 to device": (2, 3, {"tier": "nvme", **HALF}, 1, 3, HALF),
    "fsdp2 to stage 3": (2, "fsdp2", {}, 2, 3, {}),
    "stage 3 to fsdp2": (3, 3, {}, 2, "fsdp2", {}),
    "ddp to stage 2": (2, "ddp", {}, 2, 2, {}),
    "ddp nvme to fsdp2": (2, "ddp", {"tier": "nvme"}, 2, "fsdp2", {}),
    "fsdp2, nvme": (2, "fsdp2", {"tier": "nvme"}, 2, "fsdp2", {"tier": "nvme"}),
    "overlap": (2, 3, {"schedule": "overlap"}, 2, 3, {"schedule": "overlap"}),
    "delayed": (2, 3, LATE, 2, 3, LATE),
    "delayed, 2 to 3": (2, 2, LATE, 3, 3, LATE),
}
OFTEN = {"2 to 3, nvme, stage 3", "fsdp2 to stage 3", "delayed, 2 to 3"}


@pytest.mark.parametrize("way", [w if w in OFTEN else pytest.param(w, marks=pytest.mark.slow) for w in WAYS])
def test_any_world_goes_into_any_other(way: str, tmp_path: Path) -> None:
    size, stage, settings, other, into, loads = WAYS[way]
    first = on_ranks(size, saved, str(tmp_path), stage, BF16, settings)
    second = on_ranks(other, loaded, str(tmp_path), into, BF16, loads, False)
    for found in second:
        bits(found["then"], first[0]["then"])
    same = size == other and stage not in ("ddp", "fsdp2") and into not in ("ddp", "fsdp2")
    for found in second:
        if same or (stage == into and size == other):
            bits(found["later"], first[0]["later"])
        else:
            assert found["later"].keys() == first[0]["later"].keys()


@ranked
def before_the_first_step(world: World, path: str) -> None:
    """What a model began with is known exactly, until an optimizer takes it."""
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=BF16)

    def plain(seed: int) -> nn.Module:
        return built(lambda: nn.Sequential(nn.Linear(16, 37), nn.Tanh(), nn.Linear(37, 7)), seed)

    def build(stage: int, seed: int) -> tuple[nn.Module, Any]:
        model = world.shard(plain(seed), stage=stage, mp_policy=policy)
        return model, zk.AdamW(model.parameters())

    for stage in (3, 2):
        model, opt = build(stage, 0)
        put(Path(path), model, opt)
        other, used = build(stage, 1)
        take(Path(path), other, used)
        steps(model, opt, range(2))
        steps(other, used, range(2))
        bits(gathered(other, used), gathered(model, opt))
        alone = plain(2)
        take(Path(path), alone)
        assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), plain(0).parameters(), strict=True))


def test_a_model_that_has_not_stepped_goes_on_from_its_exact_values(tmp_path: Path) -> None:
    on_ranks(2, before_the_first_step, str(tmp_path))


@ranked
def straight_through_torch(world: World, path: str) -> bool:
    """`dcp.save(model.state_dict())` of a sharded model needs nothing of ours."""
    from torch.distributed import checkpoint as dcp

    model = sharded(world, 3, FP32, 0, 1 << 12)
    opt = zk.AdamW(model.parameters())
    steps(model, opt, range(2))
    names = [name for name, _ in model.named_parameters()]
    state = dict(zip(names, opt.state_dict()["state"].values(), strict=True))
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=path)
    other = sharded(world, 3, FP32, 1, 1 << 14)
    used = zk.AdamW(other.parameters())
    steps(other, used, range(1))
    entries = used.state_dict()["state"]
    there = {"model": other.state_dict(), "optim": dict(zip(names, entries.values(), strict=True))}
    dcp.load(there, checkpoint_id=path)
    bits(gathered(other, used), gathered(model, opt))
    return True


def test_torchs_own_save_and_load_know_what_is_sharded(tmp_path: Path) -> None:
    assert on_ranks(2, straight_through_torch, str(tmp_path / "kept")) == [True, True]
    model = Net(gain=[1.5])
    torch.distributed.checkpoint.load({"model": (state := model.state_dict())}, checkpoint_id=str(tmp_path / "kept"))
    model.load_state_dict(state)
    assert not torch.equal(model.first.weight, model_of(gain=[1.5]).first.weight)
