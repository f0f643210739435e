"""Each example runs as its first lines say, and what it shows is so."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    return import_module(f"zerokern.examples.{name}")


def ran(name: str, *words: object) -> str:
    """What the script prints that is started with these words; here, since a process of its own imports for seconds."""
    told = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(told):
        patched.setattr(sys, "argv", [str(EXAMPLES / name), *map(str, words)])
        patched.syspath_prepend(str(EXAMPLES))  # as Python does; the files there must have no other module's names
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return told.getvalue()


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells, one after the other, as a script; it is kept without outputs."""
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None]
    monkeypatch.chdir(tmp_path)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(
            compile("\n\n".join("".join(cell["source"]) for cell in cells), "notebook", "exec"),
            {"__name__": "notebook"},
        )
    assert "the same loss: True" in told.getvalue()


def losses_of(told: str) -> list[float]:
    return [float(one) for one in re.findall(r"loss ([\d.]+)", told)]


def test_overlap_has_the_bits_of_sync() -> None:
    offload = example("offload")
    (sync, _), (overlap, found), (delayed, _) = (offload.train(one) for one in ("sync", "overlap", "delayed"))
    assert sync == overlap and delayed[:3] == sync[:3] and delayed != sync
    assert sync[-1] < sync[0] and found["state_bytes/cpu"] > 0


def test_muon_beside_adamw_makes_a_table() -> None:
    told = ran("muon.py", 12)
    rows = [list(map(float, re.findall(r"[\d.]+", line))) for line in told.splitlines()[1:]]
    assert [row[:2] for row in rows] == [[begin, begin + 1] for begin in range(0, 12, 2)]
    adamw, both = ([row[column] for row in rows] for column in (2, 3))
    assert adamw[-1] < adamw[0] and both[-1] < both[0] and adamw != both


def test_everything_on_disk_learns(tmp_path: Path) -> None:
    losses, found = example("disk").train(str(tmp_path))
    assert losses[-1] < losses[0]
    assert found["state_bytes/disk"] == 2 * 4 * 6 * (256 * 256 + 256)


def test_a_long_context_in_slices_has_the_same_losses() -> None:
    long_context = example("long_context")
    assert long_context.train() == pytest.approx(long_context.train(keep="cpu", micro=2), rel=1e-5)


def test_the_parts_by_themselves() -> None:
    said = ran("blocks.py")
    assert "came back unchanged: True" in said and "all finite: True" in said
    assert re.search(r"largest change 0\.00(0[89]|1)", said)  # lr, or a little less, in a first step


def test_a_program_in_c_learns(tmp_path: Path) -> None:
    """The commands are those of the program's first lines, in a tree that has nothing but the examples."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    script = "\n".join(["set -eu", *re.findall(r"^ \*     (.+)$", (EXAMPLES / "step.c").read_text(), re.MULTILINE)])
    asked = re.compile(r"\$\(python -c '(.+)'\)")
    assert len(asked.findall(script)) == 2
    for code in asked.findall(script):
        with contextlib.redirect_stdout(told := io.StringIO()):
            exec(code)
        script = script.replace(f"$(python -c '{code}')", told.getvalue().strip())
    told = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert re.search(r"1000003 elements, norm of the gradient 306, after 200 steps", told), told


def test_no_example_has_the_name_of_a_module() -> None:
    names = [path.stem for path in EXAMPLES.glob("*.py") if path.stem != "__init__"]
    assert not [name for name in names if name in sys.stdlib_module_names or find_spec(name) is not None]


def test_statistics_go_to_tensorboard_and_trainer_learns(tmp_path: Path) -> None:
    assert "5 steps" in ran("to_tensorboard.py", tmp_path) and list(tmp_path.glob("events.out.tfevents.*"))
    losses = example("trainer").main(str(tmp_path / "trainer"))
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_statistics_go_to_all_reporters_of_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reporter, which Trainer puts before the callbacks of the user, gets what the example adds."""
    import transformers

    heard: list[dict] = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args: object, state: object, control: object, logs: dict, **kwargs: object) -> None:
            heard.append(dict(logs))

    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [*transformers.trainer.DEFAULT_CALLBACKS, Reporter])
    rows = example("trainer_statistics").main(str(tmp_path), steps=2)
    assert [row["optimizer/steps"] for row in rows] == [1, 2]
    assert [logs["optimizer/steps"] for logs in heard if "loss" in logs] == [1, 2]
    assert all(logs["optimizer/state_bytes/cpu"] > 0 for logs in heard if "loss" in logs)
    assert not [name for logs in heard if "loss" not in logs for name in logs if name.startswith("optimizer/")]


def test_a_llama_trains_and_is_read_by_transformers(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    losses = losses_of(ran("llama.py", tmp_path))
    assert losses[-1] < losses[0]
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    torch.manual_seed(0)
    tokens = torch.randint(0, 512, (4, 32))
    assert again(input_ids=tokens, labels=tokens).loss.item() < losses[-1]


def test_one_rank_saves_and_goes_on(tmp_path: Path) -> None:
    said = [ran("resume.py", verb, tmp_path / "step") for verb in ("save", "load")]
    assert re.findall(r"step (\d): loss", "".join(said)) == list("01234567")
    assert losses_of(said[1])[-1] < losses_of(said[0])[0]


def test_accelerates_loop_goes_on(tmp_path: Path) -> None:
    from hf_cases import fresh

    told = []
    for _ in range(2):
        with fresh():
            told += re.findall(r"1 processes: loss ([\d.]+) to ([\d.]+)", ran("accelerated.py", tmp_path))
    (begin, end), (again, last) = [tuple(map(float, one)) for one in told]
    assert last < end < begin and again < begin


def test_an_example_without_its_folder_says_how_it_is_used() -> None:
    for name, *words in (
        ["resume.py"],
        ["resume.py", "out"],
        ["llama.py"],
        ["trainer.py"],
        ["trainer_statistics.py"],
        ["to_tensorboard.py"],
        ["accelerated.py"],
    ):
        with pytest.raises(SystemExit, match=rf"^usage: .*{name}"):
            ran(name, *words)


@pytest.mark.slow
def test_accelerates_loop_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*command, str(EXAMPLES / "accelerated.py"), str(tmp_path)]
    told = subprocess.run(words, capture_output=True, text=True, timeout=400, check=True).stdout
    ((begin, end),) = re.findall(r"2 processes: loss ([\d.]+) to ([\d.]+)", told)
    assert float(end) < float(begin)


@pytest.mark.slow
def test_torchrun_starts_two_ranks_that_save_and_three_that_go_on(tmp_path: Path) -> None:
    told = []
    for ranks, verb in ((2, "save"), (3, "load")):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        words = [*command, EXAMPLES / "resume.py", verb, tmp_path / "step"]
        told.append(subprocess.run(words, capture_output=True, text=True, timeout=400, check=True).stdout)
    assert "rank 1 of 2, step 3" in told[0]
    assert "rank 2 of 3, step 4" in told[1] and "step 3:" not in told[1]
