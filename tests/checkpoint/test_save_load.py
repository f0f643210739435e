"""zk.save and zk.load on one rank: what comes back, what is refused by its name, and that nothing is changed then."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cases import BF16, Case, Small, digest, gathered, load, same, save
from raw_cases import flip
from state_cases import model_of, steps
from torch import nn
from torch.distributed import checkpoint as dcp
from worlds import World, built, on_ranks, ranked

import zerokern as zk
from zerokern.checkpoint.folder import read_published
from zerokern.core.errors import IoError, StateError

PLACES = {
    "plain": Case(),
    "delayed": Case(tier="cpu", schedule=zk.Delayed(after=1)),
    "disk": Case(tier="nvme", dtype=BF16, state_format="int8", master_format="split8"),
    "stage 3": Case(stage=3),
}


def test_saving_changes_nothing(tmp_path: Path) -> None:
    for name, case in PLACES.items():
        expected = case.begin(tmp_path / name).train(4).whole()
        run = case.begin(tmp_path / f"{name} saved")
        for _ in range(4):
            run.train(1).save(tmp_path / "last")
        same(run.whole(), expected)
    assert len(list((tmp_path / "last").iterdir())) == 3  # the newest alone
    assert run.load(tmp_path / "last")["step"] == 4


def values_of(run: Any) -> dict[str, torch.Tensor]:
    whole = run.whole()
    return {name: whole[name] for name, _ in run.model.named_parameters()}


def test_a_model_is_read_alone_and_by_torch(tmp_path: Path) -> None:
    """With and without its optimizer in the checkpoint."""
    for case in (Case(stage=3), Case(dtype=BF16), Case(stage=3, dtype=BF16)):
        first = case.begin(tmp_path / "swap").train(2)
        first.save(tmp_path / "both")
        save(tmp_path / "model", first.model)
        for name in ("both", "model"):
            other = Small().to(case.dtype)
            assert set(load(tmp_path / name, other)) == ({"step", "lr", "scaler"} if name == "both" else set())
            same({key: param.detach() for key, param in other.named_parameters()}, values_of(first))
        items = {f"model.{key}": torch.zeros_like(param) for key, param in other.named_parameters()}
        dcp.load(items, checkpoint_id=tmp_path / "both")
        same({key.removeprefix("model."): one for key, one in items.items()}, values_of(first))


def test_two_optimizers(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        opts = [zk.AdamW(model[0].parameters()), zk.SGD(model[1].parameters(), lr=0.1, momentum=0.9)]
        for number in range(2):
            model(torch.full((2, 3), 1.0 + number)).sum().backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
        return model, opts

    model, opts = made(0)
    save(tmp_path / "two", model, opts)
    other, theirs = made(1)
    load(tmp_path / "two", other, theirs)
    for one, two in zip(opts, theirs, strict=True):
        for mine, their in zip(one.state_dict()["state"].values(), two.state_dict()["state"].values(), strict=True):
            assert all(torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(their[k])) for k in mine)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a * x + 10 * self.b * x + 100 * self.c * x).sum()


def test_parameters_regrouped_since_the_last_step_keep_their_own_state(tmp_path: Path) -> None:
    """Reversed, replaced or added before the next step looks at them, which had saved one's state as another's."""
    moments = {"a": 0.1, "b": 1.0, "c": 10.0}
    edits: dict[str, tuple[str, Any]] = {
        "abc": ("cba", lambda m, group: group.reverse()),
        "ab": ("cb", lambda m, group: group.__setitem__(0, m.c)),
        "a": ("abc", lambda m, group: group.extend([m.b, m.c])),
    }
    places = [("device", "sync"), ("device", zk.Delayed(after=0)), ("cpu", "overlap"), ("nvme", "sync")]
    for number, (stage, (tier, schedule), had) in enumerate(itertools.product((None, 1, 3), places, edits)):
        model = Weights()
        if stage is not None:
            zk.shard(model, stage=stage)
        where = zk.Nvme(tmp_path / f"state {number}") if tier == "nvme" else tier
        with zk.AdamW([getattr(model, name) for name in had], tier=where, schedule=schedule) as opt:
            model(torch.ones(4)).backward()
            opt.step()
            opt.flush()
            edits[had][1](model, opt.param_groups[0]["params"])
            save(tmp_path / f"{number}", model, opt)
        has = edits[had][0]
        other = Weights()
        loaded = zk.AdamW([getattr(other, name) for name in has])
        load(tmp_path / f"{number}", other, loaded)
        found = {name: loaded.state[getattr(other, name)].get("exp_avg") for name in has}
        assert {name: one is not None for name, one in found.items()} == {name: name in had for name in has}
        for name in set(had) & set(has):
            torch.testing.assert_close(found[name], torch.full((4,), moments[name]), msg=f"{number}: {name}")


def everything(model: nn.Module, opt: Any) -> dict[str, torch.Tensor]:
    names = [name for name, _ in model.named_parameters()]
    found = dict(model.state_dict())
    for number, entry in opt.state_dict()["state"].items():
        found |= {f"{names[number]}.{key}": one for key, one in entry.items() if isinstance(one, torch.Tensor)}
    return gathered({key: one.detach() for key, one in found.items()})


def test_groups_counters_and_values_that_are_no_tensors_come_back(tmp_path: Path) -> None:
    def build(seed: int, lr: float) -> tuple[nn.Module, Any]:
        model = model_of(seed=seed)
        groups = [
            {"params": [model.first.weight, model.scale], "lr": torch.tensor(lr), "betas": (0.8, 0.95)},
            {"params": [model.first.bias, model.gain, *model.norm.parameters(), model.last.weight], "lr": lr},
        ]
        return model, zk.AdamW(groups, max_grad_norm=1.0)

    (model, opt), (other, used) = build(0, 1e-3), build(1, 2e-3)
    model.last.weight.requires_grad_(False)  # a parameter without state stays without
    steps(model, opt, range(2))
    steps(other, used, range(2))
    model.gain.grad = torch.tensor(float("nan"))
    opt.step()
    opt.param_groups[1]["initial_lr"] = float("inf")
    save(tmp_path / "x", model, opt)
    load(tmp_path / "x", other, used)
    assert used.skipped_steps == 1 and used.grad_norm != used.grad_norm
    assert torch.equal(used.param_groups[0]["lr"], torch.tensor(1e-3)) and used.param_groups[0]["betas"] == (0.8, 0.95)
    assert used.param_groups[1]["initial_lr"] == float("inf") and used.param_groups[1]["lr"] == 1e-3
    assert not used.state.get(other.last.weight) and opt.state[model.gain]
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        same(dict(used.state.get(mine, {})), dict(opt.state.get(theirs, {})))


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
    save(tmp_path / "x", model)
    load(tmp_path / "x", other)
    assert other[0].seen["calls"] == 7 and list(other[0].seen["mean"]) == [0.5, float("inf")]


def test_extra_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "step": 7,
        "loss": 0.1 + 0.2,
        "best": -math.inf,
        "names": ["a", ("b", None, True)],
        "by number": {1: "one", (2, 3): b"\0\xff"},
        "tensor": torch.arange(6, dtype=torch.int16).view(2, 3),
        "half": torch.randn(3).to(BF16),
        "dtype": BF16,
    }
    save(tmp_path / "x", nn.Linear(1, 1), extra=extra)
    found = load(tmp_path / "x", nn.Linear(1, 1))
    assert list(found) == list(extra)
    for name, value in extra.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype
        else:
            assert found[name] == value and type(found[name]) is type(value)


def test_extra_that_is_missing_is_named(tmp_path: Path) -> None:
    run = Case().begin(tmp_path).train(1)
    run.save(tmp_path / "x")
    before = run.train(1).whole()
    with pytest.raises(StateError, match="no extra 'sampler'; it has") as refused:
        run.load(tmp_path / "x", extra={"sampler": run.lr})
    assert "'scaler'" in str(refused.value)
    with pytest.raises(TypeError, match=r"extra\['step'\]"):
        run.load(tmp_path / "x", extra={"step": 3})
    same(run.whole(), before)


def drawn() -> list[float]:
    return [random.random(), float(numpy.random.rand()), torch.rand(()).item()]


def unlike(some: list[float], others: list[float]) -> bool:
    return all(one != other for one, other in zip(some, others, strict=True))


def test_random_numbers_go_on_unless_asked_not_to(tmp_path: Path) -> None:
    """Python's, NumPy's and torch's."""
    model = nn.Linear(1, 1)
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    save(tmp_path / "x", model)
    expected = drawn()
    load(tmp_path / "x", model, rng=False)
    assert unlike(drawn(), expected)
    load(tmp_path / "x", model)
    assert drawn() == expected
    save(tmp_path / "y", model, rng=False)
    load(tmp_path / "y", model)
    assert unlike(drawn(), expected)


def damage(folder: Path) -> Path:
    (data,) = folder.glob("*.distcp")
    flip(data, data.stat().st_size // 2)
    return data


def test_damage_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    for name in ("plain", "stage 3", "disk"):
        run = PLACES[name].begin(tmp_path / name).train(2)
        run.save(tmp_path / "x")
        data = damage(tmp_path / "x")
        before = run.train(1).whole()
        with pytest.raises(IoError, match=data.name) as refused:
            run.load(tmp_path / "x")
        assert refused.value.key or any(word in str(refused.value) for word in ("model.", "optim.")), str(refused.value)
        same(run.whole(), before)
        run.train(1)


@pytest.mark.parametrize("kind", ["ours", "disk", "torch"])
def test_damage_that_is_found_while_reading_leaves_an_optimizer_that_refuses(kind: str, tmp_path: Path) -> None:
    """Of several blocks: what is read first, beside the state, is sound. Another load makes it good."""
    model = nn.Linear(600, 600)
    tier = zk.Nvme(tmp_path / "tier", ring_nbytes=1 << 20) if kind == "disk" else "device"
    opt = torch.optim.AdamW(model.parameters()) if kind == "torch" else zk.AdamW(model.parameters(), tier=tier)

    def step() -> None:
        model(torch.ones(2, 600)).sum().backward()
        opt.step()

    step()
    for name in ("x", "whole"):
        save(tmp_path / name, model, opt)
    saved = digest(model.state_dict())
    damage(tmp_path / "x")
    with pytest.raises(IoError, match=r"distcp.*optim\.state\.weight"):
        load(tmp_path / "x", model, opt, verify="reading")
    for work in (step, lambda: save(tmp_path / "again", model, opt)):
        with pytest.raises(StateError, match=r"broken off|load a checkpoint"):
            work()
    assert not (tmp_path / "again").exists()
    opt.zero_grad()
    load(tmp_path / "whole", model, opt, verify="reading")
    assert digest(model.state_dict()) == saved
    step()


def changes(model: nn.Module) -> None:
    model.last = nn.Linear(37, 8, bias=False)
    model.added = nn.Parameter(torch.ones(1))
    del model.scale


def test_everything_that_differs_is_named_before_anything_is_changed(tmp_path: Path) -> None:
    model, other = model_of(), model_of(seed=1)
    opt = zk.AdamW(model.parameters())
    steps(model, opt, range(1))
    save(tmp_path / "x", model, opt)
    changes(other)
    used = zk.AdamW(other.parameters())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(StateError) as refused:
        load(tmp_path / "x", other, used)
    for words in (
        "added: missing", "last.weight: shape (7, 37); the model has (8, 37)", "scale: unexpected",
        "param_groups[0]: other parameters", "nothing was changed",
    ):  # fmt: skip
        assert words in str(refused.value), str(refused.value)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items()) and not used.state
    again = model_of()
    both = [zk.AdamW([again.gain]), zk.AdamW([p for p in again.parameters() if p is not again.gain])]
    lion, foreign = zk.Lion(again.parameters()), torch.optim.RMSprop(again.parameters())
    with pytest.raises(StateError, match="exp_avg_sq' is unexpected; Lion keeps exp_avg"):
        load(tmp_path / "x", again, lion)
    with pytest.raises(StateError, match="it holds 1 optimizer; 2 were passed"):
        load(tmp_path / "x", again, both)
    with pytest.raises(StateError, match="state is that of AdamW, and RMSprop means other things"):
        load(tmp_path / "x", again, foreign)
    save(tmp_path / "alone", model)
    with pytest.raises(StateError, match="holds no optimizer"):
        load(tmp_path / "alone", again, lion)
    late = zk.AdamW(model.parameters(), tier="cpu", schedule=zk.Delayed(after=0))
    steps(model, late, range(2))
    save(tmp_path / "late", model, late)
    with pytest.raises(StateError, match="saved while a delayed update was pending"):
        load(tmp_path / "late", again, zk.AdamW(again.parameters()))
    stranger = zk.AdamW([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="steps 1 parameters that are not in the model"):
        save(tmp_path / "other", model, stranger)


def test_progress_reaches_its_end(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    seen: list[tuple[int, int]] = []
    save(tmp_path / "x", model, progress=lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] >= 512 * 512 * 4
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_arguments_are_checked(tmp_path: Path) -> None:
    model: Any = nn.Linear(1, 1)
    for words, kind, work in [
        ("wait", TypeError, lambda: save(tmp_path / "x", model, wait=1)),
        ("staging_budget", ValueError, lambda: save(tmp_path / "x", model, staging_budget=10)),
        ("staging_budget", TypeError, lambda: save(tmp_path / "x", model, staging_budget="1G", wait=False)),
        ("group", ValueError, lambda: save(tmp_path / "x", model, group=object())),
        ("progress", TypeError, lambda: save(tmp_path / "x", model, progress="yes")),
        ("keys are strings", TypeError, lambda: save(tmp_path / "x", model, extra={1: 2})),
        (r"extra=\[1\]", TypeError, lambda: save(tmp_path / "x", model, extra=[1])),
        ("model=None", TypeError, lambda: save(tmp_path / "x", None)),
        ("model=None", TypeError, lambda: load(tmp_path / "x", None)),
        ("verify='never'", ValueError, lambda: load(tmp_path / "x", model, verify="never")),
        ("lossy", TypeError, lambda: load(tmp_path / "x", model, lossy="yes")),
        ("does not exist", IoError, lambda: load(tmp_path / "y", model)),
    ]:
        with pytest.raises(kind, match=words):
            work()
        assert not (tmp_path / "x").exists()


@ranked
def before_the_first_step(world: World, folder: Path) -> None:
    """What a model began with is known exactly, until an optimizer takes it."""
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=BF16)

    def plain(seed: int) -> nn.Module:
        return built(lambda: nn.Sequential(nn.Linear(16, 37), nn.Tanh(), nn.Linear(37, 7)), seed)

    def build(stage: int, seed: int) -> tuple[nn.Module, Any]:
        model = world.shard(plain(seed), stage=stage, mp_policy=policy)
        return model, zk.AdamW(model.parameters())

    def stepped(model: nn.Module, opt: Any) -> dict[str, torch.Tensor]:
        for number in range(2):
            x = torch.randn(6, 16, generator=torch.Generator().manual_seed(10 * number + world.rank))
            model(x.to(BF16)).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
        return everything(model, opt)

    for stage in (3, 2):
        model, opt = build(stage, 0)
        save(folder / "x", model, opt)
        other, used = build(stage, 1)
        load(folder / "x", other, used)
        same(stepped(other, used), stepped(model, opt))
        load(folder / "x", alone := plain(2))
        assert all(map(torch.equal, alone.parameters(), plain(0).parameters()))


@ranked
def straight_through_torch(world: World, folder: Path) -> None:
    """`dcp.save(model.state_dict())` of a sharded model needs nothing of ours."""
    found = []
    for seed in (0, 1):
        model = zk.shard(model_of(seed=seed, gain=[1.5]), stage=3, bucket_bytes=1 << (12 + 2 * seed))
        opt = zk.AdamW(model.parameters())
        steps(model, opt, range(2 - seed))
        names = [name for name, _ in model.named_parameters()]
        state = dict(zip(names, opt.state_dict()["state"].values(), strict=True))
        (dcp.load if seed else dcp.save)(
            {"model": model.state_dict(), "optim": state}, checkpoint_id=str(folder / "dcp")
        )
        found.append(everything(model, opt))
    same(*found)
    alone = model_of(seed=3, gain=[1.5])
    dcp.load({"model": (shown := alone.state_dict())}, checkpoint_id=str(folder / "dcp"), no_dist=True)
    assert torch.equal(shown["first.weight"], found[0]["first.weight"])


@ranked
def both_of_these(world: World, folder: Path) -> None:
    before_the_first_step(world, folder)
    straight_through_torch(world, folder)


def test_exact_values_before_the_first_step_and_torchs_own_save_on_ranks(tmp_path: Path) -> None:
    on_ranks(2, both_of_these, tmp_path)


def test_optimizers_on_disks_are_written_in_their_order(tmp_path: Path) -> None:
    """Whatever the addresses of their disks are: two saves of one state are the same bytes."""
    model = nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(5)))
    tiers = [zk.Nvme(tmp_path / str(number), ring_nbytes="1M") for number in range(5)]
    opts = [zk.AdamW(layer.parameters(), tier=tier) for layer, tier in zip(model, tiers, strict=True)]
    model(torch.ones(1, 20)).sum().backward()
    for opt in opts:
        opt.step()
    save(tmp_path / "c", model, opts)
    tensors = read_published(tmp_path / "c").tensors
    offsets = [tensors[f"optim.state.{number}.weight.exp_avg"].boxes[0].offset for number in range(5)]
    assert offsets == sorted(offsets)
