"""An installation leaves the torch that is there alone, training needs torch alone, and what does not fit is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from forked import run_forked

import zerokern as zk

ROOT = Path(__file__).resolve().parents[2]
OLDEST = ".".join(map(str, zk.OLDEST_TORCH))
EXTRAS = ("rich", "matplotlib")


def torch_of(version: str, folder: Path) -> dict[str, str]:
    """The environment of a process that has this torch before the one that the tests run on."""
    (folder / "torch").mkdir(parents=True)
    (folder / "torch/__init__.py").write_text(f"__version__ = {version!r}\n")
    metadata = folder / f"torch-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (metadata / "INSTALLER").write_text("pip\n")
    (metadata / "RECORD").write_text("")
    return {**os.environ, "PYTHONPATH": str(folder)}


def ran(program: str, folder: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, **settings,  # type: ignore[call-overload]
    )  # fmt: skip


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> PathDistribution:
    """What a wheel of this source tree asks for."""
    folder = tmp_path_factory.mktemp("metadata")
    program = (
        "import sys; from scikit_build_core.build import prepare_metadata_for_build_wheel as prepare; "
        "print(prepare(sys.argv[1]))"
    )
    made = subprocess.run(
        [sys.executable, "-c", program, str(folder)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return PathDistribution(folder / made.stdout.split()[-1])


def required(metadata: PathDistribution, extra: str) -> set[str]:
    """The names that this extra asks for; none: that every installation does."""
    found = [one.replace('"', "'").partition(";") for one in metadata.requires or []]
    chosen = [name for name, _, marker in found if (f"extra == '{extra}'" if extra else "extra ==") in marker]
    chosen = chosen if extra else [name for name, _, _ in found if name not in chosen]
    return {re.match(r"[\w.-]+", name)[0] for name in chosen}  # type: ignore[index]


def test_an_installation_asks_for_nothing_that_could_replace_torch(metadata: PathDistribution) -> None:
    assert required(metadata, "") == set()
    assert required(metadata, "torch") == {"torch"} and required(metadata, "cli") == {*EXTRAS}
    assert required(metadata, "demo") == {"torch", *EXTRAS} <= required(metadata, "dev")


def test_one_minimum_of_torch_everywhere(metadata: PathDistribution) -> None:
    asked = [one for one in metadata.requires or [] if re.match(r"torch\W", one)]
    assert len(asked) == 3 and all(re.match(rf"torch>={re.escape(OLDEST)} *;", one) for one in asked), asked
    assert f"OLDEST_TORCH = {zk.OLDEST_TORCH}" in (ROOT / ".ci/preflight.py").read_text()
    assert f"torch {OLDEST} or later" in (ROOT / "README.md").read_text()


def test_pip_leaves_an_older_torch_where_it_is(tmp_path: Path) -> None:
    """pip's own resolver, which finds torch 2.9.1: with `torch>=` as a dependency it would fetch another one."""
    environment, report = torch_of("2.9.1", tmp_path / "old"), tmp_path / "report.json"
    environment = {name: value for name, value in environment.items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull  # nor is anything found on this machine's disk
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation", "--quiet"]

    def asked(what: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*pip, "--ignore-requires-python", "--report", str(report), what],
            cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip

    found = asked(str(ROOT))
    assert found.returncode == 0, found.stderr
    names = [one["metadata"]["name"] for one in json.loads(report.read_text())["install"]]
    assert set(names) <= {"zerokern"}, names
    other = asked(f"{ROOT}[torch]")  # what is asked for by name is: pip does see the old one
    assert other.returncode != 0 and f"torch>={OLDEST}" in other.stderr, other.stderr


def test_a_torch_that_is_too_old_is_refused_by_name_when_zerokern_is_imported(tmp_path: Path) -> None:
    found = ran("import zerokern", tmp_path, env=torch_of("2.9.1+cu128", tmp_path / "old"))
    assert f"ImportError: zerokern needs torch {OLDEST} or newer, and torch 2.9.1+cu128 is installed" in found.stderr
    assert f"pip install --upgrade 'torch>={OLDEST}'" in found.stderr
    imported = ran("import torch, zerokern", tmp_path, env=torch_of("1.13.0", tmp_path / "older"))
    assert "and torch 1.13.0 is installed" in imported.stderr


@pytest.mark.parametrize("version", [OLDEST + ".0", "2.14.1+cu130", "3.0.0a0+git1234"])
def test_a_torch_that_fits_is_not_imported_for_that(version: str, tmp_path: Path) -> None:
    program = "import sys, zerokern; print('torch' in sys.modules)"
    found = ran(program, tmp_path, env=torch_of(version, tmp_path / "new"))
    assert found.stdout.split() == ["False"], found.stderr


def test_without_torch_it_says_how_to_get_one(tmp_path: Path) -> None:
    (tmp_path / "zerokern").symlink_to(Path(zk.__file__).parent)
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(tmp_path)!r}); import zerokern"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert f"ImportError: zerokern needs torch {OLDEST} or newer, and there is none" in found.stderr
    assert "pip install 'zerokern[torch]'" in found.stderr


PROGRAM = """
import sys, tempfile, torch, zerokern as zk
model = zk.shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), stage=3)
opt = zk.AdamW(model.parameters(), lr=0.1, max_grad_norm=1.0)
for _ in range(2):
    model(torch.ones(2, 4)).square().mean().backward()
    opt.step()
    opt.zero_grad()
zk.save(tempfile.mkdtemp() + "/saved", model, opt)
print("imported", sorted({name.partition(".")[0] for name in sys.modules} & {"rich", "matplotlib"}))

sys.modules["rich"] = sys.modules["matplotlib"] = None  # from here on as if they were not installed
zk.save(tempfile.mkdtemp() + "/saved", model, opt, progress=True)
from zerokern.cli.main import main
for words in (["info"], ["plan", "--numel", "1B", "--world", "8"], ["bench", "sumsq", "--smoke", "--numel", "64K"],
              ["trace", "--hardware", "h100-pcie", "--schedule", "overlap"]):
    print("status", words[0], main(words), flush=True)
for words in (["plan", "--numel", "1B", "--plot", "plan.png"], ["bench", "sumsq", "--smoke", "--plot", "bench.svg"]):
    try:
        main(words)
    except SystemExit as error:
        print("refused", words[0], error.code, flush=True)
"""


def test_training_and_plain_lines_need_torch_alone_and_pictures_are_refused_by_name(tmp_path: Path) -> None:
    found = run_forked(f"import os; os.chdir({str(tmp_path)!r})\n{PROGRAM}")
    assert found.stdout.startswith("imported []\n"), found.stdout + found.stderr
    said = re.findall(r"^status (\w+) (\d)$", found.stdout, re.MULTILINE)
    assert said == [(name, "0") for name in ("info", "plan", "bench", "trace")], found.stdout + found.stderr
    assert "\x1b[" not in found.stdout and "sumsq" in found.stdout
    assert re.findall(r"^refused (\w+) (\d)$", found.stdout, re.MULTILINE) == [("plan", "2"), ("bench", "2")]
    says = "matplotlib is not installed; pip install 'zerokern[cli]' brings it"
    assert found.stderr.count(says) == 2 and not list(tmp_path.iterdir())
