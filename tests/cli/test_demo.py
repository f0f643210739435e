"""The demo: its model, its text, its memory cap, its tables and its picture."""

from __future__ import annotations

import argparse
import io
import math
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from zerokern.examples import demo
from zerokern.examples.contenders import CONTENDERS, ON_DISK, state_nbytes
from zerokern.examples.demo import child, larger, memory, place, plot, processes, race, together
from zerokern.examples.demo.act import LEAST_STEPS, Act
from zerokern.examples.demo.results import Results
from zerokern.examples.demo.view import View
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text, source_files
from zerokern.examples.widen import WideLinear
from zerokern.io import Nvme

TINY = Shape(layers=2, width=128, context=32)
ACT = Act(TINY, ("torch",), rows=2, steps=2, lr=1e-3, seconds=300.0, cap=64_000_000)
BF16_EPS = torch.finfo(torch.bfloat16).eps


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads spin while they wait: on a busy machine tiny models are quickest without them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def heard() -> tuple[View, io.StringIO]:
    stream = io.StringIO()
    return View(Console(file=stream, width=100)), stream


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(arguments)


def test_options_are_read() -> None:
    args = parsed("--cap", "2 GiB", "--steps", "7", "--act", "1")
    assert (args.cap, args.steps, args.act, args.quick, args.out) == (2 << 30, 7, "1", False, Path("demo.png"))


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--cap", "0"], "cap='0': must be a positive number of bytes"),
        (["--cap", "1.5XB"], "cap='1.5XB': must be"),
        (["--steps", "0"], "--steps: count='0': must be a whole number from 1 on"),
        (["--out", "demo.txt"], "out='demo.txt': must be a .png"),
        (["--out", "no-such-folder/demo.png"], "in a folder that exists"),
        (["--act", "5"], "invalid choice: '5'"),
    ],
)
def test_bad_options_are_named(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*arguments)
    assert says in capsys.readouterr().err


def test_model_has_the_promised_size() -> None:
    assert sum(p.numel() for p in GPT(TINY).parameters()) == TINY.numel
    assert round(memory.FULL.shape.numel, -6) == 101_000_000
    assert round(race.FULL.shape.numel, -6) == 11_000_000


def test_model_sees_no_future() -> None:
    """A byte changes the loss of the positions from its own on, and of none before."""
    model = GPT(TINY)
    tokens = torch.randint(256, (1, TINY.context))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    with torch.no_grad():
        before = [model(t[:, :20], tokens[:, 1:21]).item() for t in (tokens, changed)]
        after = [model(t[:, :21], tokens[:, 1:22]).item() for t in (tokens, changed)]
    assert before[0] == before[1]
    assert after[0] != after[1]


def test_wide_linear_is_the_fp32_product_rounded_once() -> None:
    x = torch.randn(2, 5, 96).bfloat16().requires_grad_()
    weight = torch.randn(64, 96).bfloat16().requires_grad_()
    grad = torch.randn(2, 5, 64).bfloat16()
    result = WideLinear.apply(x, weight)
    result.backward(grad)
    wide_x, wide_weight = (t.detach().float().requires_grad_() for t in (x, weight))
    expected = wide_x @ wide_weight.t()
    expected.backward(grad.float())
    for ours, wide in ((result, expected), (x.grad, wide_x.grad), (weight.grad, wide_weight.grad)):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), wide, rtol=BF16_EPS, atol=1e-5)


def test_batches_repeat_with_their_seed() -> None:
    text = torch.arange(5000).remainder(251).to(torch.uint8)
    first, again, other = (Batches(text, 3, 16, seed) for seed in (4, 4, 5))
    (tokens, targets), (same, _), (different, _) = first.next(), again.next(), other.next()
    assert tokens.shape == targets.shape == (3, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, same)
    assert not torch.equal(tokens, different)


def test_held_out_text_is_never_trained_on(tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"module{i:02}.py").write_text(chr(33 + i) * 3000)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("~" * 3000)
    assert len(source_files(tmp_path)) == 40
    trained, held_out = (set(read_text(held_out, root=tmp_path).tolist()) for held_out in (False, True))
    assert held_out == {33, 53}
    assert trained | held_out == set(range(33, 73)) and not trained & held_out


def test_a_python_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has 0 bytes of Python sources"):
        read_text(root=tmp_path)


@pytest.mark.parametrize("name", CONTENDERS)
def test_predicted_bytes_are_held_bytes(name: str) -> None:
    """The table of bytes is arithmetic; here it meets what an optimizer allocates."""
    contender = CONTENDERS[name]
    model = GPT(TINY).to(contender.dtype)
    optimizer = contender.optimizer(model.parameters(), lr=1e-3)
    model(*Batches(read_text(), 2, TINY.context, 0).next()).backward()
    contender.step(optimizer)
    held = state_nbytes(optimizer)
    predicted = {role: n for role, n in contender.bytes_by_role(TINY.numel).items() if n}
    assert predicted.pop("parameters") == sum(p.nbytes for p in model.parameters())
    assert predicted.pop("gradients") == sum(p.grad.nbytes for p in model.parameters())
    assert held == pytest.approx(predicted, rel=1e-3)


@pytest.mark.slow
def test_torch_runs_out_where_zerokern_trains() -> None:
    view, stream = heard()
    act = Act(
        Shape(4, 384, 32), ("torch", "int8-split8"), rows=2, steps=3, lr=1e-3, seconds=300.0, cap=90_000_000, warmup=8
    )
    theirs, ours = memory.perform(act, view)
    assert theirs.verdict == "OUT OF MEMORY (step 1, optimizer)"
    assert "can't allocate memory" in theirs.out_of_memory
    assert ours.verdict == "trained 3 steps" and ours.trained
    assert ours.peak - ours.resident < act.cap
    assert sum(ours.held.values()) + ours.held["parameters"] == pytest.approx(7.06 * act.shape.numel, rel=0.01)
    assert "16.0 B" in stream.getvalue() and "7.1 B" in stream.getvalue()


def test_predicted_bytes_on_disk_are_held_bytes(tmp_path: Path) -> None:
    contender = CONTENDERS["exact"]
    model = GPT(TINY).to(contender.dtype)
    tier = Nvme(tmp_path / "state", ring_nbytes=1 << 20)
    optimizer = contender.optimizer(model.parameters(), 1e-3, tier)
    model(*Batches(read_text(), 2, TINY.context, 0).next()).backward()
    contender.step(optimizer)
    predicted = {role: n for role, n in contender.bytes_by_role(TINY.numel).items() if role in ON_DISK}
    assert state_nbytes(optimizer) == {}
    assert state_nbytes(optimizer, on_disk=True) == pytest.approx(predicted, rel=1e-3)


@pytest.mark.slow
def test_disk_trains_where_memory_does_not_suffice() -> None:
    view, stream = heard()
    names = ("int8-split8", f"exact{memory.DISK}")
    act = Act(
        Shape(8, 512, 32),
        names,
        rows=2,
        steps=2,
        lr=1e-3,
        seconds=300.0,
        cap=170_000_000,
        ring_nbytes=4 << 20,
        warmup=8,
    )
    capped, ours = memory.perform(act, view)
    assert capped.verdict == "OUT OF MEMORY (step 1, optimizer)"
    assert ours.label == "zk.AdamW exact on disk"
    assert ours.verdict == "trained 2 steps" and ours.trained
    assert ours.peak - ours.resident < act.cap
    assert ours.held.keys() == {"parameters", "gradients"}
    assert sum(ours.stored.values()) == pytest.approx(10 * act.shape.numel, rel=1e-3)
    folder = Path(re.search(r"rests in (\S+) \((\w+)", stream.getvalue())[1])
    assert not folder.exists()
    assert "disk: " in stream.getvalue()


def test_a_disk_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    view, stream = heard()
    monkeypatch.setattr(memory, "DISK_MARGIN", 1e9)
    act = Act(TINY, (f"exact{memory.DISK}",), rows=1, steps=1, lr=1e-3, seconds=300.0, cap=1 << 30)
    assert memory.perform(act, view) == []
    assert "left out, because no folder for temporary files has" in stream.getvalue()


def test_a_disk_comes_before_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow, missing = tmp_path / "fast", tmp_path / "slow", tmp_path / "missing"
    fast.mkdir()
    slow.mkdir()
    monkeypatch.setattr(place, "filesystem_of", lambda folder: "tmpfs" if folder == fast else "ext4")
    assert [one.folder for one in place.places([missing, fast, slow], 1)] == [slow, fast]
    with place.temporary(1, [fast, slow]) as found:
        assert found.folder.parent == slow and str(found).endswith("(ext4)")
    assert list(slow.iterdir()) == []
    with place.temporary(1, [fast]) as found:
        assert "which is memory and no disk" in str(found)
    with place.temporary(1, [missing]) as found:
        assert found is None


def test_mounts_are_read() -> None:
    mounts = "a / ext4 rw 0 0\nb /mnt xfs rw 0 0\nc /mnt/my\\040disk btrfs rw 0 0\nd /mnt/my\\040disk f2fs rw 0 0"
    found = [place.filesystem_of(Path(at), mounts) for at in ("/mnt/x", "/mnt/my disk/x", "/mntx", "/")]
    assert found == ["xfs", "f2fs", "ext4", "ext4"]


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_named() -> None:
    view, _ = heard()
    outcome = memory.train_capped(replace(ACT, shape=Shape(4, 384, 32), cap=8_000_000), "torch", view)
    assert outcome.verdict == "OUT OF MEMORY (building the model)"
    assert not outcome.trained and not outcome.failure


def test_a_child_that_falls_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    view, stream = heard()
    monkeypatch.setattr(Act, "to_json", lambda act: "{}")
    outcome = memory.train_capped(ACT, "torch", view)
    assert outcome.verdict == "FAILED (starting)" and outcome.verdict in stream.getvalue()
    assert outcome.failure == "exit code 1: KeyError: 'shape'"
    assert processes.ending(-6, "") == "killed by SIGABRT"


def test_only_running_out_of_memory_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "lift_cap", lambda: None)

    def fail(error: Exception) -> None:
        raise error

    assert child.guarded(lambda: None) is None
    assert child.guarded(lambda: fail(MemoryError())) == "MemoryError"
    assert child.guarded(lambda: fail(RuntimeError("DefaultCPUAllocator: can't allocate memory"))) is not None
    with pytest.raises(RuntimeError, match="shapes differ"):
        child.guarded(lambda: fail(RuntimeError("shapes differ")))


def test_exact_follows_torch() -> None:
    act = Act(TINY, ("torch", "exact-fp32", "int8-fp32"), rows=4, steps=25, lr=1e-3, seconds=600.0)
    view, stream = heard()
    theirs, exact, int8 = race.perform(act, view)
    assert max(abs(a - b) for a, b in zip(theirs.losses, exact.losses, strict=True)) < 1e-4
    assert theirs.losses[-1] < theirs.losses[0] - 1
    assert abs(int8.loss - theirs.loss) < 0.02
    assert theirs.state_nbytes / int8.state_nbytes == pytest.approx(8 / 2.0625, rel=1e-3)
    assert "8-bit states" in stream.getvalue()


def test_a_race_out_of_time_stops_all_at_the_same_step() -> None:
    """And has taken the steps without which nothing can be told."""
    act = Act(TINY, ("torch", "exact-fp32"), rows=1, steps=50, lr=1e-3, seconds=0.0)
    view, stream = heard()
    lanes = race.perform(act, view)
    assert [len(lane.losses) for lane in lanes] == [LEAST_STEPS, LEAST_STEPS]
    assert f"stopped at step {LEAST_STEPS}: 0 s are over" in stream.getvalue()
    assert "nan" not in stream.getvalue()


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_few_steps_give_numbers(steps: int, tmp_path: Path) -> None:
    view, stream = heard()
    lanes = race.perform(Act(TINY, ("torch", "exact-fp32"), rows=1, steps=steps, lr=1e-3, seconds=0.0), view)
    assert [len(lane.losses) for lane in lanes] == [steps, steps]
    assert "nan" not in stream.getvalue()
    assert "stopped" not in stream.getvalue()
    assert plot.draw(tmp_path / "few.png", Results(lanes=lanes))


def test_no_act_stops_before_its_least() -> None:
    acts = [act for one in (larger, memory, race, together) for act in (one.FULL, one.QUICK)]
    for act in (*acts, memory.LOWER, memory.QUICK_LOWER):
        assert act.steps >= LEAST_STEPS
        assert not act.is_over(LEAST_STEPS - 1, 1e9)


def test_a_limit_of_time_can_act() -> None:
    """Where there is one, there are steps that it can leave out; --steps adds them to the race."""
    acts = [act for one in (larger, memory, together) for act in (one.FULL, one.QUICK)]
    for act in (*acts, memory.LOWER, memory.QUICK_LOWER, race.FULL, replace(race.QUICK, steps=80)):
        assert (act.seconds < math.inf) == (act.steps > LEAST_STEPS)
        assert act.is_over(LEAST_STEPS, 1e9) == (act.seconds < math.inf)


def test_torch_beside_masters_is_torch_in_fp32_rounded() -> None:
    """Its masters take the steps of fused AdamW with the same gradients, and the parameters are their roundings."""
    torch.manual_seed(0)
    narrow = [torch.nn.Parameter(torch.randn(size).bfloat16()) for size in (1000, 7)]
    wide = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    theirs, plain = CONTENDERS["torch-bf16"], CONTENDERS["torch"]
    optimizers = theirs.optimizer(narrow, 1e-2), plain.optimizer(wide, 1e-2)
    for lr in (1e-2, 3e-2, 1e-3):
        for small, large in zip(narrow, wide, strict=True):
            small.grad = torch.randn_like(small)
            large.grad = small.grad.float()
        for contender, optimizer in zip((theirs, plain), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = lr
            contender.step(optimizer)
    for small, large in zip(narrow, wide, strict=True):
        assert torch.equal(optimizers[0].state[small]["master"], large)
        assert torch.equal(small, large.bfloat16())


def test_exact_follows_torch_beside_masters() -> None:
    act = Act(TINY, ("torch-bf16", "exact"), rows=4, steps=25, lr=1e-3, seconds=600.0)
    view, _ = heard()
    theirs, ours = race.perform(act, view)
    assert abs(race.loss_gap(ours, [theirs, ours])) < 0.01
    assert theirs.state_nbytes / ours.state_nbytes == pytest.approx(16 / 10, rel=1e-3)


def picture_size(path: Path) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    return struct.unpack(">II", data[16:24])


def test_picture_has_a_panel_for_each_act(tmp_path: Path) -> None:
    outcomes = [memory.Outcome("torch", out_of_memory="no"), memory.Outcome("int8-split8", losses=[5.0, 3.0], peak=1)]
    lane, ours = (race.build(name, TINY, lr=1e-3, seed=0) for name in ("torch", "int8-fp32"))
    for one in (lane, ours):
        one.losses, one.optimizer_seconds = [5.0, 4.0], [0.1, 0.1]
        one.optimizer.step()
    ours.losses = [5.0, 5.0]
    lower = [memory.Outcome(f"exact{memory.DISK}", losses=[5.0, 3.0], peak=1)]
    all_of_it = Results([(memory.QUICK, outcomes), (memory.QUICK_LOWER, lower)], [lane, ours])
    assert plot.draw(tmp_path / "all.png", all_of_it)
    assert plot.draw(tmp_path / "one.png", Results([(memory.QUICK, outcomes), (memory.QUICK_LOWER, [])]))
    (width, height), (half, row) = picture_size(tmp_path / "all.png"), picture_size(tmp_path / "one.png")
    assert height == 2 * row and width == 2 * half
    assert not plot.draw(tmp_path / "none.png", Results()) and not (tmp_path / "none.png").exists()


@pytest.mark.slow
def test_the_quick_demo_runs(tmp_path: Path) -> None:
    """As CI runs it: all acts, plain lines, a picture."""
    command = [sys.executable, "-m", "zerokern", "demo", "--quick", "--out", str(tmp_path / "demo.png")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = ("OUT OF MEMORY (step 1, optimizer)", "zk.AdamW int8: trained", "exact on disk: trained", "Act 2")
    for words in (*said, "Act 3", "planned for a rank", "Act 4", "the same bits"):
        assert words in ran.stdout
    assert "nan" not in ran.stdout
    *_, blank, found, picture, following = ran.stdout.splitlines()
    assert [blank, picture] == ["", f"Picture: {tmp_path / 'demo.png'}"]
    assert found.startswith("Found:   In 300 MB zk.AdamW int8 trains") and following.startswith("Next:    ")
    assert picture_size(tmp_path / "demo.png") == (1452, 1551)


def test_an_act_survives_the_command_line() -> None:
    assert Act.of_json(ACT.to_json()) == ACT
