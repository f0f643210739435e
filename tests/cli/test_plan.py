"""`zerokern plan`: a number, a shape or a model in; tables, a program, JSON and a picture out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forked import run_forked

import zerokern as zk
from zerokern.cli.main import main

MODELS = """
import torch
from torch import nn
from zerokern.examples.model import GPT, Shape

def small():
    return GPT(Shape(2, 128, 32))

def on_meta():
    model = small()
    assert all(param.is_meta for param in model.parameters())
    return model

def empty():
    return nn.ReLU()

def nothing():
    return None

def failing():
    raise RuntimeError("no weights here")
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working folder, where a user's own lies."""
    name = f"models_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return name


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments, *([] if "--json" in arguments else ["--markdown"])]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is told of arguments that cannot be; argparse leaves by itself."""
    try:
        status: object = main(["plan", *arguments])
    except SystemExit as left:
        status = left.code
    heard = capsys.readouterr()
    assert (status in (1, 2), heard.out) == (True, "")
    return heard.err


def test_a_number_on_several_numbers_of_ranks(capsys) -> None:
    """The first table is that of the ZeRO paper; the others are of the largest number of ranks."""
    out = said(capsys, "--numel", "7.5B", "--world", "64,1,1024,4", "--param-dtype", "fp16", "--device-memory", "32GB")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    assert [row[0] for row in cells[2:6]] == ["1", "4", "64", "1,024"]
    assert cells[2] == ["1", "120", "120", "120", "120", "none"]
    assert cells[4] == ["64", "120", "31.4", "16.6", "1.88", "stages 1, 2, 3"]
    assert "### 7.5B parameters, on 1,024 ranks, stage 2" in out, "what is advised"
    assert out.endswith("\n") and not any(line != line.rstrip() for line in out.splitlines())


def test_ranks_in_several_dimensions(capsys) -> None:
    out = said(capsys, "--numel", "64B", "--mesh", "pp=2,replicate=2,dp=4,tp=4", "--stage", "3", "--all")
    assert out == f"{zk.plan('64B', stage=3, mesh={'pp': 2, 'replicate': 2, 'dp': 4, 'tp': 4})}\n"


def test_it_prints_what_zk_plan_prints(capsys) -> None:
    out = said(capsys, "--numel", "1.3B", "--world", "8", "--stage", "3", "--state-format", "int8", "--tier", "nvme")
    plan = zk.plan("1.3B", world=8, stage=3, state_format="int8", tier="nvme")
    assert out.startswith(f"{plan.page(formats=False)}\n\n--all adds ")


def test_kept_inputs_in_several_tiers(capsys) -> None:
    run = ("--layers", "24", "--hidden", "2048", "--heads", "16", "--batch", "1", "--seq", "4096", "--json")
    (found,) = json.loads(said(capsys, *run, "--keep", "device:64MiB,cpu:100MiB,nvme"))
    assert (found["keep"], found["keep_budgets"]) == ("nvme", {"device": 64 << 20, "cpu": 100 << 20})
    moved = {move["lane"]: move["nbytes"] >> 20 for move in found["moves"] if move["role"] == "checkpoints"}
    assert moved == {"down": 19 * 16, "up": 19 * 16, "write": 13 * 16, "read": 13 * 16}
    assert "The last tier takes what is left" in refused(capsys, *run, "--keep", "device:64MiB,cpu:1MiB")


def test_a_model_is_built_without_memory(models: str) -> None:
    """In a process of its own: where fresh memory is poisoned, as in these tests, torch.device has no power over it."""
    command = ["plan", "--model", f"{models}:on_meta", "--world", "4", "--stage", "3", "--program", "--markdown"]
    ran = run_forked("import sys; from zerokern.cli.main import main; sys.exit(main())", *command)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "### GPT, 431,360 parameters in 20 tensors, on 4 ranks" in ran.stdout
    program = [line.split()[:2] for line in ran.stdout.split("A step at stage 3:")[1].splitlines() if line]
    assert program[:3] == [["Gather", "root"], ["Gather", "blocks.0"], ["Gather", "blocks.1"]]


def test_a_transformer_has_activations(capsys) -> None:
    shape = ["--layers", "128", "--hidden", "25600", "--heads", "256", "--batch", "2", "--seq", "1024"]
    run = (*shape, "--world", "1024", "--stage", "3", "--device-memory", "v100", "--all")
    asked = "without embeddings: 1T parameters, batch 2 x 1,024 on a rank, on 1,024 ranks"
    for keep, others in (((), 'with keep="device"'), (("--keep", "device"), "without keep=, all of them")):
        out = said(capsys, *run, *keep)
        own = out[out.rindex("### ") :]
        assert own.startswith("### Transformer of 128 layers, hidden 25,600, ") and asked in own
        assert f"Activations: {others}" in own and ("| activation checkpoints " in own) == bool(keep)
        assert "no scores are stored" in own and "attention's scores are" in said(capsys, *run, "--attention", "eager")


def test_json_is_for_programs(capsys) -> None:
    out = said(capsys, "--numel", "1B", "--world", "2,4", "--json")
    two, four = json.loads(out)
    assert (two["world"], four["world"]) == (2, 4)
    assert four["stages"][2]["roles"] == zk.plan("1B", world=4).roles


def test_it_draws(capsys, tmp_path: Path) -> None:
    large, shape = ("--numel", "7.5B", "--world", "1,8,64"), ("--layers", "4", "--hidden", "512")
    for run in (large, (*large, "--device-memory", "h100,16GB"), (*shape, "--device-memory", "1MB")):
        said(capsys, *run, "--plot", str(tmp_path / "plan.png"))
        assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "plan.png").unlink()


HOST = ("--numel", "1B", "--tier", "cpu")
REFUSED = (
    ((), "one of --numel, --model, --config or --layers with --hidden says what to plan; none was given"),
    (("--numel", "1B", "--layers", "2"), "--numel and --layers were given"),
    (("--layers", "2"), "--hidden is missing"),
    (("--layers", "2", "--hidden", "8", "--batch", "2"), "heads, seq is missing"),
    (("--layers", "2.5", "--hidden", "8"), "count='2.5'"),
    (("--layers", "2", "--hidden", "8", "--attention", "flash"), "'flash' is not one of sdpa, eager"),
    (("--numel", "7.5x"), "numel='7.5x': must be a whole number of parameters"),
    (("--numel", "1B", "--world", "0"), "world='0'"),
    (("--numel", "1B", "--world", "4,x"), "such as 8 or 1,4,16,64"),
    *((("--numel", "1B", "--mesh", mesh), "mesh") for mesh in ("dp", "dp=2,dp=2", "dp=2,", "data=2", "dp=0")),
    (("--numel", "1B", "--mesh", "dp=2", "--world", "2"), "no world beside mesh"),
    (("--numel", "1B", "--stage", "5"), "stage=5: must be 0 (all is replicated)"),
    (("--numel", "1B", "--optimizer", "sparse"), "optimizer='sparse'"),
    (("--numel", "1B", "--device-memory", "80G"), "80GB is 80·10^9, 80GiB is 80·2^30"),
    (("--numel", "1B", "--plot", "plan.txt"), "plot='plan.txt'"),
    (("--model", "lama-3-8b"), "Did you mean 'llama-3-8b'?"),
    (("--model", "nowhere.at.all:f"), "there is no module 'nowhere'"),
    (("--model", "json:f"), "json has no function 'f'"),
    ((*HOST, "--tokens", "4k"), "--tokens says how much a step computes on --hardware, which is missing: a100-pcie"),
    ((*HOST, "--hardware", "x100"), "machine='x100': must be a JSON file, or one of a100-pcie"),
    ((*HOST, "--hardware", "h200-pcie", "--tokens", "4q"), "tokens='4q': must be numbers from 1 on"),
    ((*HOST, "--hardware", "h200-pcie", "--world", "4"), "net_gb_s=None: must be"),
    ((*HOST, "--schedule", "late"), "'late' is not one of sync, overlap, delayed"),
    ((*HOST, "--schedule", "overlap", "--tier", "device"), "'sync' for parameters on a device, or tier='cpu'"),
    (
        (*HOST, "--stage", "3", "--param-tier", "nvme", "--schedule", "delayed"),
        "schedule=Delayed(after=0): must be 'sync' or 'overlap' for parameters that rest on a disk. A delayed update",
    ),
)
OF_MODELS = (
    ("empty", "ReLU has no parameters"),
    ("nothing", "returned a NoneType; allowed: an nn.Module"),
    ("failing", "raised RuntimeError: no weights here. It is called without arguments under torch.device('meta')"),
    ("torch", "has no function 'torch'"),
)


def test_what_cannot_be_is_refused(capsys, models: str) -> None:
    of_models = (((f"--model={models}:{function}",), says) for function, says in OF_MODELS)
    for arguments, says in (*REFUSED, *of_models):
        told = refused(capsys, *arguments)
        assert says in told, (arguments, told)


def test_it_predicts_steps_on_a_described_machine(capsys, tmp_path: Path) -> None:
    out = said(capsys, *HOST, "--schedule", "delayed", "--hardware", "h200-pcie", "--tokens", "4k,1000", "--all")
    plan = zk.plan("1B", tier="cpu", schedule=zk.Delayed())
    assert out == f"{plan}\n\n{plan.predict('h200-pcie', tokens=[1000, 4096])}\n"
    described = {"name": "mine", "flops_s": 1e14, "device_gb_s": 900, "down_gb_s": 9, "up_gb_s": 9, "host_gb_s": 40}
    (tmp_path / "mine.json").write_text(json.dumps(described))
    by_file = ("--hardware", str(tmp_path / "mine.json"), "--tokens", "1m", "--json")
    (found,) = json.loads(said(capsys, *HOST, *by_file))
    assert found["forecast"]["machine"] == "mine" and found["schedule"] == "sync"
    assert {row["tokens"] for row in found["forecast"]["predictions"]} == {1 << 20}


@pytest.mark.parametrize(("hardware", "ring"), [("gh200", True), ("h100-pcie", False)])
def test_the_update_runs_where_a_step_takes_less(capsys, hardware: str, ring: bool) -> None:
    """A link that is fast makes the device the better place; at a slow one forwards hide the host's update."""
    run = ["--numel", "8B", "--tier", "cpu", "--schedule", "overlap", "--hardware", hardware, "--tokens", "8k"]
    page = said(capsys, *run, "--update", "auto")
    assert ("| staging ring " in page) == ring
    assert page == said(capsys, *run, "--update", "device" if ring else "host")
    assert "--update auto asks for what is faster" in refused(capsys, "--numel", "8B", "--update", "auto")


def test_an_update_on_the_device_has_nothing_to_hide_behind(capsys) -> None:
    run = ["--numel", "8B", "--tier", "cpu", "--update", "device"]
    assert "delayed" not in said(capsys, *run, "--hardware", "gh200", "--tokens", "8k")
    assert "'sync' or 'overlap' with update='device'" in refused(capsys, *run, "--schedule", "delayed")
    assert "'host' where tier= has a disk" in refused(capsys, "--numel", "8B", "--tier", "nvme", "--update", "device")
