"""Each example runs as its first lines say, and what it shows is so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    from importlib import import_module

    return import_module(f"zerokern.examples.{name}")


def started(name: str, *words: str, ranks: int) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    ran = subprocess.run([*command, str(EXAMPLES / name), *words], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_overlap_has_the_bits_of_sync() -> None:
    offload = example("offload")
    (sync, _), (overlap, found), (delayed, _) = (offload.train(one) for one in ("sync", "overlap", "delayed"))
    assert sync == overlap and delayed[:3] == sync[:3] and delayed != sync
    assert sync[-1] < sync[0] and found["state_bytes/cpu"] > 0


def test_everything_on_disk_learns(tmp_path: Path) -> None:
    losses, found = example("disk").train(str(tmp_path))
    assert losses[-1] < losses[0]
    assert found["state_bytes/disk"] == 2 * 4 * 6 * (256 * 256 + 256)


def test_a_long_context_in_slices_has_the_same_losses() -> None:
    long_context = example("long_context")
    assert long_context.train() == pytest.approx(long_context.train(keep="cpu", micro=2), rel=1e-5)


def test_the_parts_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    example("blocks").main()
    said = capsys.readouterr().out
    assert "came back unchanged: True" in said and "all finite: True" in said
    assert re.search(r"largest change 0\.00(0[89]|1)", said)  # lr, or a little less, in a first step


def test_a_program_in_c_learns(tmp_path: Path) -> None:
    """The commands are those of the program's first lines, in a tree that has nothing but the examples."""
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    commands = re.findall(r"^ \*     (.+)$", (EXAMPLES / "step.c").read_text(), re.MULTILINE)
    assert len(commands) == 5
    script = "\n".join(["set -eu", *commands])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"1000003 elements, norm of the gradient 306, after 200 steps", ran.stdout), ran.stdout


def test_statistics_go_to_tensorboard(tmp_path: Path) -> None:
    """As its first lines say: of a script's folder every file is a module, which must have no other module's name."""
    command = [sys.executable, str(EXAMPLES / "to_tensorboard.py"), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert list(tmp_path.glob("events.out.tfevents.*")) and "5 steps" in ran.stdout


def test_no_example_has_the_name_of_a_module() -> None:
    names = [path.stem for path in EXAMPLES.glob("*.py") if path.stem != "__init__"]
    assert not [name for name in names if name in sys.stdlib_module_names or find_spec(name) is not None]


def test_trainer_learns(tmp_path: Path) -> None:
    losses = example("trainer").main(str(tmp_path))
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_a_llama_trains_and_is_read_by_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaForCausalLM

    example("llama").main(str(tmp_path))
    losses = [float(one) for one in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0]
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    torch.manual_seed(0)
    tokens = torch.randint(0, 512, (4, 32))
    assert again(input_ids=tokens, labels=tokens).loss.item() < losses[-1]


def test_one_rank_saves_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resume = example("resume")
    resume.main("save", str(tmp_path / "step"))
    resume.main("load", str(tmp_path / "step"))
    steps = re.findall(r"step (\d): loss ([\d.]+)", capsys.readouterr().out)
    assert [int(step) for step, _ in steps] == list(range(8)) and float(steps[-1][1]) < float(steps[0][1])


@pytest.mark.parametrize(
    "words", [["resume.py"], ["resume.py", "out"], ["llama.py"], ["trainer.py"], ["to_tensorboard.py"]]
)
def test_an_example_without_its_folder_says_how_it_is_used(words: list[str]) -> None:
    ran = subprocess.run([sys.executable, str(EXAMPLES / words[0]), *words[1:]], capture_output=True, text=True)
    assert ran.returncode == 1 and re.search("^usage: ", ran.stderr, re.MULTILINE) and "Traceback" not in ran.stderr


@pytest.mark.slow
def test_two_ranks_save_and_three_go_on(tmp_path: Path) -> None:
    saved = started("resume.py", "save", str(tmp_path / "step"), ranks=2)
    loaded = started("resume.py", "load", str(tmp_path / "step"), ranks=3)
    assert "rank 1 of 2, step 3" in saved and "rank 2 of 3, step 4" in loaded and "step 3:" not in loaded


@pytest.mark.slow
def test_torchrun_trains_a_llama(tmp_path: Path) -> None:
    assert "rank 1, step 2" in started("llama.py", str(tmp_path), ranks=2)
    assert (tmp_path / "config.json").is_file()
