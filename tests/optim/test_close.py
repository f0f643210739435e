"""An optimizer ends by close(), with `with`, or when a later one of this process takes over its folder; and says so."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

import zerokern as zk
from zerokern.examples.played_device import PlayedDevice
from zerokern.io import Store

GONE = "this optimizer is closed: another one, which was built later in this process, has taken over its folder"
CLOSED = r"this optimizer is closed: close\(\) was called"
TOLD = "built earlier in this process"


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 4)).to(torch.bfloat16)


def train(one: Callable[..., torch.Tensor], opt: Any, steps: int = 1) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.full((2, 40), 0.1 + step, dtype=torch.bfloat16)
        loss = one(x).float().square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def built(one: nn.Module, folder: Path, **settings: Any) -> zk.AdamW:
    return zk.AdamW(one.parameters(), lr=1e-2, tier=zk.Nvme(folder, ring_nbytes="1M"), **settings)


def open_below(folder: Path) -> list[Path]:
    """What this process has open below a folder; swap has no name there."""
    links = [link for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
    return [link for link in links if os.readlink(link).startswith(f"{os.path.realpath(folder)}/")]


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


USES: dict[str, Callable[[zk.AdamW, nn.Module], Any]] = {
    "step": lambda opt, one: train(one, opt),
    "a step with a closure": lambda opt, one: opt.step(lambda: pytest.fail("the closure ran")),
    "state_dict": lambda opt, one: opt.state_dict(),
    "load_state_dict": lambda opt, one: opt.load_state_dict({"state": {}, "param_groups": []}),
    "state": lambda opt, one: opt.state[next(one.parameters())],
    "flush": lambda opt, one: opt.flush(),
    "refresh_masters": lambda opt, one: opt.refresh_masters(),
    "pickle": lambda opt, one: pickle.dumps(opt),
    "deepcopy": lambda opt, one: copy.deepcopy(opt),
}


def says_so_whatever_is_asked(opt: zk.AdamW, one: nn.Module, why: str, folder: Path) -> None:
    before = [param.detach().clone() for param in one.parameters()]
    for use in USES.values():
        with pytest.raises(zk.StateError, match=why):
            use(opt, one)
    with pytest.raises(zk.StateError, match=why):
        zk.save(folder / "saved", one, opt)
    one.zero_grad()
    opt.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), before, strict=True)), "nothing was written"
    assert repr(opt).startswith("AdamW (closed, tier=") and opt.statistics()["state_bytes/disk"] == 0
    opt.close()  # once more is no error


@pytest.mark.usefixtures("no_warning")
def test_close_gives_the_folder_back_and_keeps_the_parameters(tmp_path: Path) -> None:
    one, twin = model(), model()
    opt, plain = built(one, tmp_path), zk.AdamW(twin.parameters(), lr=1e-2)
    train(one, opt, 3), train(twin, plain, 3)
    assert open_below(tmp_path) and opt.statistics()["state_bytes/disk"] > 0
    opt.close()
    assert not open_below(tmp_path) and list(tmp_path.iterdir()) == []
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), twin.parameters(), strict=True))
    again = built(one, tmp_path)
    again.load_state_dict(plain.state_dict())
    assert train(one, again, 2) == train(twin, plain, 2)
    says_so_whatever_is_asked(opt, one, CLOSED, tmp_path)


@pytest.mark.parametrize("tier", ["device", "cpu"])
def test_any_tier_can_be_closed(tier: str, tmp_path: Path) -> None:
    one = model()
    with zk.AdamW(one.parameters(), lr=1e-2, tier=tier) as opt:
        train(one, opt)
    says_so_whatever_is_asked(opt, one, CLOSED, tmp_path)


@pytest.mark.usefixtures("no_warning")
def test_an_optimizer_that_never_stepped_can_be_closed(tmp_path: Path) -> None:
    with built(model(), tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", [None, 2])
def test_close_publishes_what_zk_delayed_kept_back(stage: Any, tmp_path: Path) -> None:
    one, twin = model(), model()
    if stage is not None:
        zk.shard(one, stage=stage), zk.shard(twin, stage=stage)
    with built(one, tmp_path, schedule=zk.Delayed(after=1)) as opt:
        train(one, opt, 3)
    other = zk.AdamW(twin.parameters(), lr=1e-2, schedule=zk.Delayed(after=1))
    train(twin, other, 3)
    other.flush()
    assert all(torch.equal(a.detach(), b.detach()) for a, b in zip(values(one), values(twin), strict=True))


def values(one: nn.Module) -> list[torch.Tensor]:
    with zk.gathered(one):
        return [param.detach().clone() for param in one.parameters()]


def test_an_exception_in_the_block_closes_it_and_is_raised(tmp_path: Path) -> None:
    one = model()
    opt = built(one, tmp_path, schedule=zk.Delayed(after=0))
    with pytest.raises(KeyError, match="mine"), opt:
        train(one, opt, 2), {}["mine"]
    assert not open_below(tmp_path)
    with pytest.raises(zk.StateError, match=CLOSED):
        opt.step()


@pytest.mark.parametrize("schedule", ["sync", "overlap", zk.Delayed(after=1)], ids=str)
@pytest.mark.parametrize("wrap", ["plain", "stage 1", "stage 3"])
@pytest.mark.filterwarnings("ignore:schedule=:UserWarning")
def test_a_cell_that_runs_again_has_the_folder(schedule: Any, wrap: str, tmp_path: Path) -> None:
    """`Out` refers to each optimizer that a cell has shown. The later one begins as one with a new folder would."""
    one, twin = model(), model()
    if wrap != "plain":
        zk.shard(one, stage=int(wrap[-1])), zk.shard(twin, stage=int(wrap[-1]))
    out: list[zk.AdamW] = []
    for run in range(3):
        out.append(opt := built(one, tmp_path / "swap", schedule=schedule))
        other = built(twin, tmp_path / f"of its own {run}", schedule=schedule)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = train(one, opt, 3)
        told = [one for one in told if TOLD in str(one.message)]
        assert len(told) == (run > 0)
        assert found == train(twin, other, 3)
        if isinstance(schedule, zk.Delayed):  # what a new run of the cell finds is what was published
            opt.flush(), other.flush()
        assert all(torch.equal(a, b) for a, b in zip(values(one), values(twin), strict=True))
    for earlier in out[:-1]:
        with pytest.raises(zk.StateError, match=GONE):
            earlier.step()
    before = values(one)
    says_so_whatever_is_asked(out[0], one, GONE, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(values(one), before, strict=True))
    assert train(one, out[-1], 2) == train(twin, other, 2), "the last one goes on"


@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_a_cell_that_makes_the_model_too_runs_again(schedule: Any, tmp_path: Path) -> None:
    """Parameters and state on disk, and an update that may be under way when the cell runs again."""
    out: list[tuple[nn.Module, zk.AdamW]] = []
    found = []
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", TOLD)
            one = zk.shard(nn.ModuleList(model()), stage=3, tier=zk.Nvme(tmp_path, ring_nbytes="1M"))
            out.append((one, opt := built(one, tmp_path / "state", schedule=schedule)))
            found.append([loss for _ in range(3) for loss in train_in_order(one, opt)])
    assert found[0] == found[1] == found[2]
    for earlier, its in out[:-1]:
        with pytest.raises(zk.StateError, match=GONE):
            its.step()
        with pytest.raises(zk.ShardError, match="these parameters are gone"):
            train_in_order(earlier, its)
    train_in_order(*out[-1])


def train_in_order(one: nn.ModuleList, opt: Any) -> list[float]:
    return train(lambda x: one[1](one[0](x)), opt)


def test_an_update_that_was_kept_back_is_not_lost_in_silence(tmp_path: Path) -> None:
    one = model()
    earlier = built(one, tmp_path, schedule=zk.Delayed(after=0))
    train(one, earlier)
    later = built(one, tmp_path)
    with pytest.warns(UserWarning, match=TOLD):
        train(one, later)
    with pytest.raises(zk.StateError, match=r"gone, with an update that zk\.Delayed had yet to publish"):
        earlier.flush()


@pytest.mark.usefixtures("no_warning")
def test_until_the_later_one_needs_the_folder_the_earlier_one_works(tmp_path: Path) -> None:
    """So that its state can be handed over: a cell that fails, or only builds, has destroyed nothing."""
    one = model()
    earlier = built(one, tmp_path)
    train(one, earlier, 2)
    later = built(one, tmp_path)
    train(one, earlier)
    kept = earlier.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        later.load_state_dict(kept)
    found = later.state_dict()["state"]
    for key, entry in kept["state"].items():
        assert all(torch.equal(value, found[key][name]) for name, value in entry.items())
    with pytest.raises(zk.StateError, match=GONE):
        earlier.state_dict()


def test_of_two_that_were_built_before_either_was_used_the_second_is_refused(tmp_path: Path) -> None:
    """As where a generator and a discriminator have one path: both are wanted, and nothing is taken from either."""
    one, other = model(1), model(2)
    first, second = built(one, tmp_path), built(other, tmp_path)
    train(one, first)
    with pytest.raises(zk.IoError, match=r"in use by this process \(pid \d+\) itself.*its own folder"):
        train(other, second)
    train(one, first)


@pytest.mark.usefixtures("no_warning")
def test_one_that_nobody_refers_to_is_replaced_without_a_word(tmp_path: Path) -> None:
    """Also from within a cycle, and where the garbage collector is switched off."""
    one = model()
    opt = built(one, tmp_path)
    train(one, opt)
    cycle: list[Any] = [opt]
    cycle.append(cycle)
    gc.disable()
    try:
        del opt, cycle
        later = built(one, tmp_path)
        train(one, later)
    finally:
        gc.enable()


def test_one_that_is_in_a_step_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = model(1), model(2)
    first = built(one, tmp_path)
    train(one, first)
    second = built(other, tmp_path)
    inside, leave = threading.Event(), threading.Event()
    update = first._update

    def held(*of: Any) -> bool:
        inside.set()
        assert leave.wait(60)
        return update(*of)

    monkeypatch.setattr(first, "_update", held)
    thread = threading.Thread(target=train, args=(one, first))
    thread.start()
    assert inside.wait(60)
    try:
        with pytest.raises(zk.IoError, match="in use by this process"):
            train(other, second)
        with pytest.raises(zk.StateError, match=r"close\(\) was called while step\(\) runs"):
            first.close()
    finally:
        leave.set()
        thread.join()
    monkeypatch.undo()
    train(one, first)


def test_a_step_that_ctrl_c_left_at_its_last_line_does_not_count_as_running(tmp_path: Path) -> None:
    class Interrupted(dict[object, Any]):
        def pop(self, *_: Any) -> Any:
            raise KeyboardInterrupt

    weight = nn.Parameter(torch.ones(4))
    optimizer = zk.SGD([weight], lr=0.25, tier=zk.Nvme(tmp_path))
    optimizer._stepping = Interrupted()
    kept: list[object] = []  # as notebooks keep it, with its frames
    for steps in (1, 2):
        weight.grad = torch.ones(4)
        try:
            optimizer.step()
        except KeyboardInterrupt as error:
            kept.append(error)
            optimizer._stepping = dict(optimizer._stepping)
        assert weight.eq(1.0 - 0.25 * steps).all() and len(kept) == 1
    optimizer.close()


def test_a_torn_optimizer_has_said_so_and_is_closed_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = model()
    opt = built(one, tmp_path)
    train(one, opt)
    monkeypatch.setattr(Store, "put", broken)
    with pytest.raises(zk.IoError, match="the disk is gone"):
        train(one, opt)
    monkeypatch.undo()
    with pytest.raises(zk.StateError, match="broken off"):
        opt.state_dict()
    opt.close()
    assert not open_below(tmp_path)


def broken(*_: Any) -> Any:
    raise zk.IoError("the disk is gone")


def test_a_disk_is_given_back_before_the_later_one_takes_its_budget(tmp_path: Path) -> None:
    """A folder whose budget is most of a disk has no room for two."""
    one, out = model(), []
    for _ in range(2):
        tier = zk.Nvme(tmp_path, budget="64M", ring_nbytes="1M")
        out.append(zk.AdamW(one.parameters(), tier=tier))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train(one, out[-1])
        taken = {(found.st_ino, found.st_blocks * 512) for found in map(os.stat, open_below(tmp_path))}
        assert 64 << 20 <= sum(nbytes for _, nbytes in taken) < 65 << 20


def on_ranks(rank: int, folder: str) -> list[str]:
    """Ranks of one folder: each closes, or takes over, its own below it."""
    one, said = zk.shard(model(), stage=2), []
    out = []
    for _ in range(2):
        out.append(opt := built(one, Path(folder)))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train(one, opt, 2)
        said.append(str(sum(TOLD in str(one.message) for one in told)))
    try:
        out[0].step()
    except zk.StateError as error:
        said.append(str(GONE in str(error)))
    train(one, out[1], 1)
    out[1].close()
    with built(one, Path(folder), schedule=zk.Delayed(after=0)) as opt:
        train(one, opt, 2)
    said.append(str(sorted(path.name for path in Path(folder, f"state-{rank}").iterdir())))
    return said


def test_ranks_close_and_take_over_together(tmp_path: Path) -> None:
    assert run_ranks(2, on_ranks, str(tmp_path)) == [["0", "1", "True", "[]"]] * 2


@pytest.mark.parametrize("settings", [
    {"tier": "cpu", "update": "device", "schedule": "overlap"},
    {"tier": ["device:40KiB", "cpu"], "schedule": "overlap"},
    {"tier": ["device:40KiB", "cpu"], "schedule": zk.Delayed(after=0)},
])  # fmt: skip
def test_host_memory_goes_at_once(settings: dict[str, Any], device: PlayedDevice) -> None:
    """Not when the garbage collector comes: it is what the next optimizer needs."""
    weights = [device.own(nn.Parameter(torch.ones(64, 64))) for _ in range(3)]
    gc.disable()
    try:
        for closes in (True, False):
            opt = zk.AdamW(weights, **settings)
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            opt.step()
            opt.flush()
            device.synchronize()
            room = opt.holdings.room
            assert room.nbytes > 0
            memory = weakref.ref(room.arenas[0])
            if closes:
                opt.close()
                assert not room.nbytes
            del opt, room
            assert memory() is None
    finally:
        gc.enable()
