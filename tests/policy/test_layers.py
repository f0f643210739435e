"""Imports go downward only. The table below is the architecture; an import that climbs it does not pass."""

from __future__ import annotations

import ast
import re

from .tree import BESIDE, Finding, assert_clean, dotted, files, imports, is_package, module_name, read

# A layer may import the layers with a smaller number. io and comm are siblings: neither knows the other.
LAYERS = {
    "core": -1,
    "kernels": 0,
    "memory": 1,
    "io": 2,
    "comm": 2,
    "schedule": 3,  # when: programs and who runs them. It lies below what it is given actions by, and asks nobody why
    "zero": 4,
    "optim": 6,
    "checkpoint": 7,
    # beside the core, which imports none of them
    "activations": 8,
    "parallel": 8,
    "building": 8,
    "interop": 8,
    "debug": 8,
    "pages": 8,  # what people read: tables, text, colour
    "api": 9,
    "planner": 9,
    "arguments": 9,  # what words on a command line mean
    "report": 9,  # zk.info(): what the layers below say of themselves
    "examples": 11,  # the demo, and the small GPT that it and the benchmarks train
    "integrations": 10,
    "bench": 12,
    "cli": 13,
}
EDGES = {"examples", "bench", "integrations", "cli"}
SHOWN = {
    ("cli", "bench"),
    ("cli", "examples"),
    ("bench", "examples"),
    ("examples", "integrations"),
}  # edges that an edge above them may import
# What trains needs the core alone. What stands beside it may be left out, exchanged and tested by itself, so the core
# reaches it through ports only: arguments that api.py fills, and the table PLUGS of zerokern/__init__.py.
CORE_LAYERS = ("core", "kernels", "memory", "io", "comm", "schedule", "zero", "optim", "checkpoint")
BESIDE_CORE = ("activations", "parallel", "building", "planner", "interop", "integrations", "debug", "pages")
CORE = {"__init__", "errors", "env", "units", "native", "ports"}
PLANNERS = {  # pure plans: they run in milliseconds, without torch
    "zerokern/memory/layout.py", "zerokern/zero/partition.py", *(f"zerokern/schedule/{name}.py" for name in (
        "machine", "passes", "policies", "program", "resting", "simulator", "sketch",
    )),
}  # fmt: skip


def layer_of(module: str) -> str:
    """zerokern.kernels.ops belongs to "kernels"; the package itself and zerokern.__main__ to ""."""
    parts = module.split(".")
    return "" if len(parts) < 2 or parts[1].startswith("__") else parts[1]


def targets(source: str, path: str) -> list[tuple[str, int]]:
    """The modules of this project that a source imports, with lines; `from zerokern import io` is zerokern.io."""
    found = []
    for one in imports(source, module_name(path), is_package(path)):
        if one.module.split(".")[0] in BESIDE:
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
        if other in EDGES and (own, other) not in SHOWN:
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
    assert_clean([f for path in files(".py", under=("zerokern/", *BESIDE)) for f in climbs(read(path), path)])


def reaches_beside(source: str, path: str) -> list[Finding]:
    """Imports of what stands beside the core, in a source of the core."""
    if layer_of(module_name(path)) not in CORE_LAYERS:
        return []
    return [
        Finding(
            path,
            line,
            f"imports {target}, which stands beside the core; let api.py hand over what is needed as an argument, or "
            "let it plug into a port (zerokern/core/ports.py)",
        )
        for target, line in targets(source, path)
        if layer_of(target) in BESIDE_CORE
    ]


def test_the_core_imports_nothing_that_stands_beside_it() -> None:
    assert_clean([one for path in files(".py", under=("zerokern/",)) for one in reaches_beside(read(path), path)])
    assert {*CORE_LAYERS, *BESIDE_CORE, "api", "arguments", "report"} | EDGES == set(LAYERS)


def test_an_import_of_what_stands_beside_the_core_is_found() -> None:
    for source in (
        "from zerokern.activations.tiles import Tile",
        "def f():\n    import zerokern.interop.foreign",
        "if TYPE_CHECKING:\n    from zerokern import debug",
    ):
        (finding,) = reaches_beside(source, "zerokern/zero/units.py")
        assert "stands beside the core" in str(finding)
        assert reaches_beside(source, "zerokern/api.py") == []
    assert reaches_beside("from zerokern.comm import Group", "zerokern/zero/units.py") == []


def test_every_plug_is_there_and_stands_beside_the_core() -> None:
    from zerokern.core.ports import PLUGS, plugs

    for port, places in PLUGS.items():
        allowed = {*BESIDE_CORE, "io"} if port == "disk" else BESIDE_CORE  # memory asks, which io lies above
        assert all(layer_of(place.partition(":")[0]) in allowed for place in places), port
        assert all(map(callable, plugs(port))), port


def test_the_page_shows_the_table() -> None:
    shown = re.findall(r"^ *(-?\d+)  (\w+) ", read("docs/architecture.md"), flags=re.MULTILINE)
    assert {name: int(number) for number, name in shown} == LAYERS, "docs/architecture.md shows other layers"


def test_core_stays_five_files() -> None:
    inside = {module_name(path).rpartition(".")[2] for path in files(".py", under=("zerokern/core/",))} - {"core"}
    assert inside <= CORE, f"zerokern/core holds {sorted(inside - CORE)}; it is no place for what has no other place"


ENTRY = {"zerokern"}  # the package's own face shows everything, and imports it when it is asked for


def imported(sources: dict[str, tuple[str, bool]], *, types: bool) -> dict[str, set[str]]:
    """By module, the others that it imports: at its top, in functions, and with `types` for a type checker alone."""
    found = {}
    for module, (source, package) in sources.items():
        skipped = set() if types else lines_for_types(source)
        named = [one for one in imports(source, module, package) if one.line not in skipped]
        there = {one.full if one.full in sources else one.module for one in named}
        found[module] = (there & sources.keys()) - ENTRY - {module}
    return found


def lines_for_types(source: str) -> set[int]:
    """Lines below `if TYPE_CHECKING:`."""
    if "TYPE_CHECKING" not in source:
        return set()
    blocks = [node.body for node in ast.walk(ast.parse(source)) if isinstance(node, ast.If)
              and dotted(node.test).endswith("TYPE_CHECKING")]  # fmt: skip
    return {line for body in blocks for one in body for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Modules that import each other, directly or through others."""
    reach = {module: reached(graph, module) for module in graph}
    found: list[set[str]] = []
    for module in graph:
        circle = {other for other in reach[module] if module in reach[other]}
        if circle and circle not in found:
            found.append(circle)
    return found


def reached(graph: dict[str, set[str]], module: str) -> set[str]:
    seen, todo = set(), [module]
    while todo:
        new = graph[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def test_no_module_imports_itself_through_others() -> None:
    paths = files(".py", under=("zerokern/", "examples/"))
    sources = {module_name(path): (read(path), is_package(path)) for path in paths}
    running = circles(imported(sources, types=False))
    says = "import each other, if only in a function: move what both need below both"
    assert not running, "\n".join(f"{', '.join(sorted(circle))} {says}" for circle in running)
    named = circles(imported(sources, types=True))
    says = "name each other's types: a Protocol beside the lower one, or a type of the layer below, is enough"
    assert not named, "\n".join(f"{', '.join(sorted(circle))} {says}" for circle in named)


def test_a_circle_is_found_wherever_it_hides() -> None:
    lower = ("def f():\n    from zerokern.comm.upper import g", False)
    for source, types in (("from zerokern.comm import lower", True), ("import zerokern.comm.lower as l", False)):
        made = {"zerokern.comm.upper": (source, False), "zerokern.comm.lower": lower}
        assert circles(imported(made, types=types)) == [{"zerokern.comm.upper", "zerokern.comm.lower"}]
    typing = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zerokern.comm.upper import G"
    made = {"zerokern.comm.upper": ("import zerokern.comm.lower", False), "zerokern.comm.lower": (typing, False)}
    assert circles(imported(made, types=False)) == []
    assert len(circles(imported(made, types=True))) == 1


def torch_imports(source: str, path: str) -> list[Finding]:
    lines = [one.line for one in imports(source, module_name(path), False) if one.module.split(".")[0] == "torch"]
    return [Finding(path, line, "imports torch; a planner is pure data and arithmetic") for line in lines]


def test_planners_import_no_torch() -> None:
    assert_clean([f for path in PLANNERS & set(files(".py")) for f in torch_imports(read(path), path)])
    assert len(torch_imports("import math\ndef f():\n    from torch import nn", "zerokern/zero/partition.py")) == 1


def test_a_climbing_import_is_found_and_a_downward_one_passes() -> None:
    for path, source, says in [
        ("zerokern/kernels/ops.py", "from zerokern.optim import base", "kernels may import only core"),
        ("zerokern/kernels/ops.py", "from ..optim.base import Base", "imports zerokern.optim.base"),
        ("zerokern/kernels/ops.py", "def f():\n    from zerokern import optim", "imports zerokern.optim"),
        ("zerokern/io/extent.py", "from zerokern.comm import queue", "io may import only core, kernels, memory"),
        ("zerokern/optim/adam.py", "import zerokern as zk", "up to an edge"),
        ("zerokern/optim/adam.py", "from zerokern.cli import main", "an edge"),
        ("zerokern/optim/adam.py", "from bench import peers", "an edge"),
        ("zerokern/planner/plan.py", "from zerokern.examples.model import GPT", "an edge"),
        ("examples/model.py", "from ..bench import peers", "an edge"),
        ("zerokern/utils/misc.py", "", "is in no layer"),
    ]:
        (finding,) = climbs(source, path)
        assert says in str(finding), source
    for path, source in [
        ("zerokern/optim/adam.py", "from zerokern.kernels import ops\nfrom . import base\nfrom ..core import env"),
        ("zerokern/cli/main.py", "from zerokern.bench import run\nimport zerokern"),
        ("zerokern/__init__.py", "from zerokern.optim import AdamW"),
        ("bench/ops/adam.py", "from ..providers import Provider\nimport zerokern as zk"),
    ]:
        assert climbs(source, path) == [], source
