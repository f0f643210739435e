"""Lightning trains as a plain loop does, bit for bit, and goes on from its checkpoints as if nothing had been."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.fabric.utilities.optimizer as moving
import pytest
import torch
from light_cases import (
    CLIP,
    ByHand,
    Case,
    Task,
    batches,
    everything,
    fitted,
    left_clean,
    looped,
    one_of_two,
    resumed,
    run_ranks,
    same,
    trainer,
    whole,
)
from torch import nn

import zerokern as zk
from zerokern.integrations.lightning import ZerokernStrategy

FITS = {
    "fp32": Case(),
    "bf16": Case(precision="bf16-mixed", clip=None),  # Lightning clips no optimizer that knows GradScaler
    "int8": Case(state_format="int8"),
    "2 fp16": Case(stage=2, precision="16-mixed", accumulated=1),
    "3 in net": Case(stage=3, inside="net"),
    "3 in self": Case(stage=3, inside="self"),
    "muon": Case(muon=True),
    "1 muon": Case(stage=1, muon=True),
    "2 muon fp16": Case(stage=2, muon=True, precision="16-mixed", accumulated=1),
    "2 muon in net": Case(stage=2, muon=True, inside="net", schedule=zk.Delayed(after=1)),
}
RESUMED = {
    "plain": Case(),
    "nvme": Case(settings={"tier": "nvme"}),
    "3 built": Case(stage=3, dropout=0.2, shuffle=True, inside="build"),
    "3 bf16 int8": Case(stage=3, precision="bf16-mixed", state_format="int8"),
    "3 delayed": Case(stage=3, schedule=zk.Delayed(after=1)),
    "muon": Case(muon=True, precision="bf16-mixed", clip=None),
    "2 muon": Case(stage=2, muon=True, dropout=0.2, shuffle=True),
    "3 muon": Case(stage=3, muon=True, inside="self"),
}
STAGE_3 = Case(stage=3)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with left_clean():
        yield


@pytest.mark.slow  # each rank imports Lightning, for seconds
def test_two_ranks_have_the_same_bits_as_a_plain_loop_and_resume(tmp_path: Path) -> None:
    """Also at another stage, and on fewer ranks."""
    both = run_ranks(2, everything, str(tmp_path), timeout=240, patience=60)
    for found in both:
        for one, other in [*found["fits"].values(), *found["resumed"].values()]:
            same(one, other)
        one, other = found["restaged"]
        torch.testing.assert_close(other[0], one[0], rtol=1e-6, atol=0)
    assert both[0]["fits"]["3"][0][0] != both[1]["fits"]["3"][0][0]  # each had its own batches
    losses, params = run_ranks(1, one_of_two, str(tmp_path))[0]
    assert losses == []
    same(([], params), ([], both[0]["smaller"][1]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run at stage 3, of its first epoch, and of a plain one."""
    at = tmp_path_factory.mktemp("saved")
    with left_clean():
        resumed(STAGE_3, 1, at / "divided")
        resumed(Case(), 1, at / "plain")
    return at


@pytest.mark.parametrize("name", FITS)
def test_the_same_bits_as_a_plain_loop(name: str, tmp_path: Path) -> None:
    same(fitted(FITS[name], 1, tmp_path), looped(FITS[name]))


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_as_if_never_stopped(name: str, tmp_path: Path) -> None:
    case = RESUMED[name]
    if name == "nvme":
        first, second = (replace(case, settings={"tier": zk.Nvme(tmp_path / one)}) for one in ("first", "second"))
        same(*resumed(first, 1, tmp_path, again=second))
    else:
        same(*resumed(case, 1, tmp_path))


def test_a_plain_checkpoint_goes_on_divided(saved: Path, tmp_path: Path) -> None:
    ckpt = str(saved / "plain" / "epoch=0.ckpt")
    divided = fitted(STAGE_3, 1, tmp_path, ckpt_path=ckpt)
    torch.testing.assert_close(divided[0], fitted(Case(), 1, tmp_path, ckpt_path=ckpt)[0], rtol=1e-6, atol=0)


def test_state_that_lightning_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a device and back is new memory for each tensor of the state; masters, codes and scales go along."""
    count = 0

    def moved(value: Any, device: Any) -> Any:
        nonlocal count
        count += 1
        return value.clone() if isinstance(value, torch.Tensor) else value

    monkeypatch.setattr(moving, "move_data_to_device", moved)
    same(*resumed(Case(state_format="int8"), 1, tmp_path))
    assert count > 16


def test_the_closure_runs_once_and_its_loss_comes_back() -> None:
    task, ran = Task(Case()), []
    opt = task.configure_optimizers()["optimizer"]

    def closure() -> torch.Tensor:
        ran.append(torch.is_grad_enabled())
        loss = task.net(torch.ones(2, 6)).sum()
        loss.backward()
        return loss

    before = whole(task)
    with torch.no_grad():
        assert opt.step(closure).item() == Task(Case()).net(torch.ones(2, 6)).sum().item()
    assert ran == [True] and not torch.equal(whole(task)["net.first.weight"], before["net.first.weight"])


@pytest.mark.parametrize("name", ["2 fp16", "2 muon fp16"])
def test_clipping_and_scaling_happen(tmp_path: Path, name: str) -> None:
    """Else the comparisons above would compare nothing."""
    case = FITS[name]
    task = Task(case)
    run = trainer(case, 1, tmp_path)
    run.fit(task, batches(case, 1))
    opt = run.optimizers[0]
    assert 0 < opt.skipped_steps < 8 and opt.grad_norm is not None and opt.grad_norm > CLIP
    assert opt.max_grad_norm is None  # as it was: the next step may be clipped otherwise
    assert fitted(replace(STAGE_3, clip=100.0), 1, tmp_path)[0] != looped(STAGE_3)[0]


def test_by_hand(tmp_path: Path) -> None:
    case = Case(stage=3, accumulated=1)
    found = fitted(case, 1, tmp_path, kind=ByHand, gradient_clip_val=None)
    same(found, looped(case))


def test_evaluation_loads(saved: Path, tmp_path: Path) -> None:
    run, data, task = trainer(STAGE_3, 1, tmp_path), batches(STAGE_3, 1), Task(STAGE_3)
    ckpt = str(saved / "divided" / "epoch=1.ckpt")
    seen = run.validate(task, data, ckpt_path=ckpt, verbose=False)
    assert seen == run.test(task, data, ckpt_path=ckpt, verbose=False)
    assert len(run.predict(task, data, ckpt_path=ckpt)) == len(data)
    assert run.test(task, data, ckpt_path=str(saved / "divided" / "epoch=0.ckpt"), verbose=False) != seen


def test_weights_alone(saved: Path, tmp_path: Path) -> None:
    run, data, task = trainer(STAGE_3, 1, tmp_path), batches(STAGE_3, 1), Task(STAGE_3)
    run.fit(task, data)
    run.save_checkpoint(tmp_path / "weights", weights_only=True)
    assert run.test(Task(STAGE_3), data, ckpt_path=str(tmp_path / "weights"), verbose=False)
    run.save_checkpoint(tmp_path / "weights", weights_only=True)  # the model of the test that came last
    with pytest.raises(zk.StateError, match="no optimizer"):
        fitted(STAGE_3, 1, tmp_path, ckpt_path=str(tmp_path / "weights"))


def fits(case: Case, at: Path, kind: Callable[[Case], Task] = Task, **more: Any) -> Callable[[], Any]:
    return lambda: fitted(case, 1, at, kind=kind, **more)


class Beside(Task):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.head = nn.Linear(2, 2)


class Torchs(Task):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class OfPieces(Task):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(zk.shards(self))


def test_refusals(tmp_path: Path) -> None:
    """Each says what was asked, and what is possible."""
    inside, fp16 = Case(stage=3, inside="net"), Case(stage=3, precision="16-mixed")
    for work, kind, words in [
        (lambda: ZerokernStrategy(find_unused_parameters=True), TypeError, "find_unused_parameters"),
        (fits(inside, tmp_path, strategy=ZerokernStrategy(stage=1)), ValueError, "configure_model.. has chosen"),
        (fits(inside, tmp_path, Beside), zk.ShardError, "'head.weight'"),
        (fits(STAGE_3, tmp_path, Torchs), zk.StateError, "zk.AdamW"),
        (fits(fp16, tmp_path, OfPieces), zk.StateError, "zk.AdamW"),
        (fits(STAGE_3, tmp_path, ckpt_path=str(tmp_path / "nothing")), zk.IoError, "does not exist"),
        (fits(Case(precision="16-mixed"), tmp_path), RuntimeError, "gradient clipping"),  # Lightning's, with no adapter
    ]:
        with pytest.raises(kind, match=words):
            work()
    run = trainer(STAGE_3, 1, tmp_path)
    run.fit(Task(STAGE_3), batches(STAGE_3, 1))
    with pytest.raises(TypeError, match="storage_options"):
        run.save_checkpoint(tmp_path / "there", storage_options={})


def test_aliases(tmp_path: Path) -> None:
    for name, stage in [("zerokern", None), *((f"zerokern_stage_{one}", one) for one in range(4))]:
        found = trainer(STAGE_3, 1, tmp_path, strategy=name).strategy
        assert type(found) is ZerokernStrategy and found.stage == stage


@pytest.mark.slow
def test_the_readme_starts_its_own_ranks(tmp_path: Path) -> None:
    """By Lightning's launcher, which starts the script once more for each further rank."""
    script = Path(__file__).with_name("light_readme.py")
    ran = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert len(list((tmp_path / "ckpt").glob("*.distcp"))) == 2
