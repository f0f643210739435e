"""Imports go downward only. The table below is the architecture; an import that climbs it does not pass."""

from __future__ import annotations

import pytest

from .tree import Finding, assert_clean, files, imports, is_package, module_name, read

# A layer may import the layers with a smaller number. io and comm are siblings: neither knows the other.
LAYERS = {
    "core": -1,
    "kernels": 0,
    "memory": 1,
    "io": 2,
    "comm": 2,
    "zero": 4,
    "schedule": 5,
    "optim": 6,
    "saving": 7,
    "api": 8,
    "planner": 8,
    "examples": 8,  # the small GPT that the demo and bench.quality train
    "report": 8,  # zk.info(): what the layers below say of themselves
    "bench": 9,
    "integrations": 9,
    "cli": 10,  # above bench, whose measurements it shows
}
EDGES = {"bench", "integrations", "cli"}
CORE = {"__init__", "errors", "env", "units", "native"}
PLANNERS = {  # pure plans: they run in milliseconds, without torch
    "zerokern/memory/layout.py",
    "zerokern/zero/partition.py",
    "zerokern/zero/stage.py",
    "zerokern/schedule/machine.py",
    "zerokern/schedule/policies.py",
    "zerokern/schedule/program.py",
    "zerokern/schedule/simulator.py",
}


def layer_of(module: str) -> str:
    """zerokern.kernels.ops belongs to "kernels"; the package itself and zerokern.__main__ to ""."""
    parts = module.split(".")
    return "" if len(parts) < 2 or parts[1].startswith("__") else parts[1]


def targets(source: str, path: str) -> list[tuple[str, int]]:
    """The modules of this project that a source imports, with lines; `from zerokern import io` is zerokern.io."""
    found = []
    for one in imports(source, module_name(path), is_package(path)):
        if one.module == "bench" or one.module.startswith("bench."):
            found.append((f"zerokern.{one.module}", one.line))
        elif one.module == "zerokern" and one.name in LAYERS:
            found.append((one.full, one.line))
        elif one.module.split(".")[0] == "zerokern":
            found.append((one.module, one.line))
    return found


def climbs(source: str, path: str) -> list[Finding]:
    module = module_name(path)
    own = layer_of(module)
    if not own:
        return []  # the package's own face may show anything
    if own not in LAYERS:
        return [Finding(path, 1, f"{own!r} is in no layer; put it into one of {', '.join(LAYERS)}")]
    found = []
    for target, line in targets(source, path):
        other = layer_of(target)
        if other == own or (not other and own in EDGES):
            continue
        lower = [name for name, number in LAYERS.items() if number < LAYERS[own]]
        if other in EDGES and (own, other) != ("cli", "bench"):
            says = f"imports {target}, an edge; nothing imports an edge: move what is needed down into a layer"
        elif other not in lower:
            says = (
                f"imports {target}, but {own} may import only {', '.join(lower) or 'itself'}: "
                f"move what it needs down to {own} or below, or itself up to {other or 'an edge'}"
            )
        else:
            continue
        found.append(Finding(path, line, says))
    return list(dict.fromkeys(found))


def test_imports_go_downward() -> None:
    assert_clean([f for path in files(".py", under=("zerokern/", "bench/")) for f in climbs(read(path), path)])


def test_core_stays_four_files() -> None:
    inside = {module_name(path).rpartition(".")[2] for path in files(".py", under=("zerokern/core/",))} - {"core"}
    assert inside <= CORE, f"zerokern/core holds {sorted(inside - CORE)}; it is no place for what has no other place"


def torch_imports(source: str, path: str) -> list[Finding]:
    lines = [one.line for one in imports(source, module_name(path), False) if one.module.split(".")[0] == "torch"]
    return [Finding(path, line, "imports torch; a planner is pure data and arithmetic") for line in lines]


def test_planners_import_no_torch() -> None:
    assert_clean([f for path in PLANNERS & set(files(".py")) for f in torch_imports(read(path), path)])
    assert len(torch_imports("import math\ndef f():\n    from torch import nn", "zerokern/zero/stage.py")) == 1


@pytest.mark.parametrize(
    "path, source, says",
    [
        ("zerokern/kernels/ops.py", "from zerokern.optim import base", "kernels may import only core"),
        ("zerokern/kernels/ops.py", "from ..optim.base import Base", "imports zerokern.optim.base"),
        ("zerokern/kernels/ops.py", "def f():\n    from zerokern import optim", "imports zerokern.optim"),
        ("zerokern/io/extent.py", "from zerokern.comm import queue", "io may import only core, kernels, memory"),
        ("zerokern/optim/adam.py", "import zerokern as zk", "up to an edge"),
        ("zerokern/optim/adam.py", "from zerokern.cli import main", "an edge"),
        ("zerokern/optim/adam.py", "from bench import peers", "an edge"),
        ("zerokern/utils/misc.py", "", "is in no layer"),
    ],
)
def test_a_climbing_import_is_found(path: str, source: str, says: str) -> None:
    (finding,) = climbs(source, path)
    assert says in str(finding)


@pytest.mark.parametrize(
    "path, source",
    [
        ("zerokern/optim/adam.py", "from zerokern.kernels import ops\nfrom . import base\nfrom ..core import env"),
        ("zerokern/cli/bench.py", "from zerokern.bench import run\nimport zerokern"),
        ("zerokern/__init__.py", "from zerokern.optim import AdamW"),
        ("bench/ops/adam.py", "from ..providers import Provider\nimport zerokern as zk"),
    ],
)
def test_a_downward_import_passes(path: str, source: str) -> None:
    assert climbs(source, path) == []
