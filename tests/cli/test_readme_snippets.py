"""What the README and the pages show runs as shown: Python, commands for one process, one node, several, a plan."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from forked import run_forked

from zerokern.cli.main import main
from zerokern.examples.model import GPT, Shape

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = ("adoption.md", "checkpoint-format.md")  # run by tests of their own
TEXTS = {
    page.name: page.read_text(encoding="utf-8")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if page.name not in ELSEWHERE
}
ZERO = TEXTS["zero.md"]
SNIPPETS = {
    f"{name}-{number}": snippet
    for name, text in TEXTS.items()
    for number, snippet in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
}
PROGRAM = next(one for one in SNIPPETS.values() if one.startswith("# train.py\n"))
LINES = re.sub(r"\\\n\s*", "", ZERO).splitlines()  # a command may go on in the next line
COMMANDS = [line for line in LINES if re.match(r"(python|torchrun) .*train\.py", line)]
SAID = re.compile(r"rank (\d) of (\d), step (\d): loss (\d\.\d{4})")
LOSS_ERROR = 2e-4  # what is printed has four digits; sums of another order


def port() -> int:
    """One that is free, below those that the system gives to whoever asks for any."""
    for number in range(20_000 + os.getpid() % 10_000, 32_768):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", number))
            return number
    raise AssertionError("no port is free")


def started(command: str, folder: Path) -> subprocess.Popen[str]:
    """A command of the README in that folder; in place of its program on the path, that of this environment."""
    program, *words = shlex.split(command)
    words = ["-m", "torch.distributed.run", *words] if program == "torchrun" else words
    return subprocess.Popen(
        [sys.executable, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def trained(commands: list[str], folder: Path) -> list[float]:
    """The mean over ranks of each step's loss; all ranks, on all nodes, must have come to the end."""
    (folder / "train.py").write_text(PROGRAM)
    if commands[0].startswith("python"):  # in a fork of a process that has torch imported
        done = run_forked(f"import os; os.chdir({str(folder)!r})\n{PROGRAM}", timeout=400)
        texts, codes = [done.stdout + done.stderr], [done.returncode]
    else:
        nodes = [started(command, folder) for command in commands]
        try:
            texts = [node.communicate(timeout=400)[0] for node in nodes]
        finally:
            for node in nodes:
                node.kill()
        codes = [node.returncode for node in nodes]
    assert codes == [0] * len(codes), "\n".join(texts)
    assert not re.search("warn", "".join(texts).replace("OMP_NUM_THREADS", ""), re.IGNORECASE), "\n".join(texts)
    losses: dict[int, list[float]] = defaultdict(list)
    for _, _, step, loss in SAID.findall("".join(texts)):
        losses[int(step)].append(float(loss))
    worlds = {int(world) for _, world, _, _ in SAID.findall("".join(texts))}
    assert {len(of_ranks) for of_ranks in losses.values()} == worlds, "\n".join(texts)
    return [sum(losses[step]) / len(losses[step]) for step in sorted(losses)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("alone")
    losses = trained(COMMANDS[:1], folder)
    return losses, torch.load(folder / "gpt.pt", weights_only=True)


def slow_if_long(name: str) -> object:
    """Frameworks take seconds to import; `tests/integrations` trains in them quickly."""
    return pytest.param(name, marks=pytest.mark.slow) if name.startswith("frameworks") else name


@pytest.mark.parametrize("name", [slow_if_long(name) for name, one in SNIPPETS.items() if one is not PROGRAM])
def test_a_snippet_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_it_was: None) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[name], name, "exec"), {"__name__": "readme"})


BEFORE = """
import torch
from types import SimpleNamespace

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, batch):
        for layer in self.layers:
            batch = torch.relu(layer(batch))
        return SimpleNamespace(loss=batch.square().mean())

model, data = Net(), [torch.randn(4, 8) for _ in range(3)]
"""


SAYS = 'print("ranks", torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0)'


def test_the_loop_as_it_is_after_the_change_runs() -> None:
    """The block that shows a loop with what is taken out and what is put in; alone, and as torchrun starts a rank."""
    (block,) = re.findall(r"^```diff\n(.*?)^```", TEXTS["README.md"], re.MULTILINE | re.DOTALL)
    lines = block.splitlines()
    assert all(line[:1] in ("", " ", "+", "-") for line in lines)
    program = "\n".join([BEFORE, *(line[1:] for line in lines if not line.startswith("-")), SAYS])
    rank = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port())}
    for variables, ranks in (({}, 0), (rank, 1)):
        done = run_forked(program, env=os.environ | variables)
        assert (done.returncode, done.stdout) == (0, f"ranks {ranks}\n"), done.stderr


def test_there_are_commands_for_one_process_one_node_and_several() -> None:
    assert [command.partition(" ")[0] for command in COMMANDS] == ["python", "torchrun", "torchrun"]
    assert "--standalone" in COMMANDS[1] and "--nnodes=4" in COMMANDS[2]


def test_one_process_trains(alone: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, saved = alone
    assert len(losses) == 10 and losses[-1] < losses[0] - 1
    GPT(Shape(layers=2, width=128, context=64)).load_state_dict(saved)


@pytest.mark.slow
def test_torchrun_trains_the_same(alone: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path) -> None:
    losses = trained([COMMANDS[1].replace("--nproc-per-node=8", "--nproc-per-node=2")], tmp_path)
    same_as(alone, losses, tmp_path)


@pytest.mark.slow
def test_several_nodes_train_the_same(alone: tuple[list[float], dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """Two torchruns on this machine, as on two nodes."""
    command = COMMANDS[2].replace("--nnodes=4", "--nnodes=2").replace("--nproc-per-node=8", "--nproc-per-node=1")
    command = command.replace("node0:29400", f"127.0.0.1:{port()}")
    same_as(alone, trained([command] * 2, tmp_path), tmp_path)


def same_as(alone: tuple[list[float], dict[str, torch.Tensor]], losses: list[float], folder: Path) -> None:
    assert losses == pytest.approx(alone[0], abs=LOSS_ERROR)
    saved = torch.load(folder / "gpt.pt", weights_only=True)
    assert saved.keys() == alone[1].keys()
    for name, whole in saved.items():
        torch.testing.assert_close(whole, alone[1][name], rtol=1e-3, atol=1e-4)


def test_the_plan_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Replace what stands between the markers by the table of all stages that the command prints."""
    (command,) = re.findall(r"`zerokern (plan --numel [^`]+--device-memory 80GB --all)`", ZERO)
    assert main([*shlex.split(command), "--markdown"]) == 0
    table = next(part for part in capsys.readouterr().out.split("\n\n") if "  stage 0 | " in part)
    assert ZERO.split("<!-- plan:begin -->\n")[1].split("\n<!-- plan:end -->")[0] == table
