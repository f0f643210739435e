"""One verb, one file: what must be easy to review as a whole is done in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass

from .tree import Finding, assert_clean, dotted, files, imports, is_package, module_name, nodes, read

COLLECTIVES = frozenset(
    "all_reduce all_gather all_gather_into_tensor all_gather_single all_gather_object all_to_all all_to_all_single "
    "barrier broadcast broadcast_object_list batch_isend_irecv gather gather_object irecv isend monitored_barrier recv "
    "reduce reduce_scatter reduce_scatter_tensor reduce_scatter_single scatter scatter_object_list send".split()
)
HOOKS = frozenset(
    "register_backward_hook register_forward_hook register_forward_pre_hook register_full_backward_hook "
    "register_full_backward_pre_hook register_hook register_module_forward_hook register_module_forward_pre_hook "
    "register_multi_grad_hook register_post_accumulate_grad_hook".split()
)
WAITS = frozenset("Event Stream stream synchronize".split())
OPTIONAL = frozenset(
    "accelerate axolotl bitsandbytes cupy deepspeed dion flashoptim lightning numpy peft safetensors scipy torchao "
    "torchtitan transformers triton".split()
)
PLOTTING = "matplotlib"  # always there, but slow to import: only files of the command line start with it


@dataclass(frozen=True)
class Verb:
    """Full names (`os.environ`) or attribute names (`.pin_memory`) that only `homes` may use."""

    what: str
    homes: tuple[str, ...]
    full: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()

    def uses(self, name: str) -> bool:
        return name in self.full or (name.rpartition(".")[2] in self.attributes and "." in name)


ENVIRON = frozenset({"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"})
CALLED = frozenset(f"torch.distributed.{name}" for name in COLLECTIVES)
KINDS = ("zerokern/zero/kinds.py", "zerokern/zero/shard.py")
DTENSOR = frozenset({"torch.distributed.tensor.DTensor"})
PINS = frozenset({"pin_memory", "cudaHostRegister", "cudaHostAlloc", "zk_host_register"})
CUPY = "zerokern/kernels/cuda/loader.py"  # launches on the stream that its caller names, and allocates for it
# layer 0 keeps the words that a launch reads until an event behind it has passed, which it never waits for
STREAMS = ("zerokern/schedule/executor.py", "zerokern/memory/staging.py", "zerokern/kernels/triton/upload.py")
VERBS = (
    Verb("the environment is read", ("zerokern/core/env.py",), full=ENVIRON),
    Verb("collectives are called", ("zerokern/comm/collectives.py",), full=CALLED),
    Verb(
        "what a tensor is, is asked of `here_of`, `local_of` and `is_divided`; what a DTensor is, is known",
        KINDS, full=DTENSOR, attributes=frozenset({"_local_tensor"}),
    ),
    Verb("module and autograd hooks are registered", ("zerokern/zero/hooks.py",), attributes=HOOKS),
    # layer 0 stages the words of a launch in torch's own pinned cache; what is large is leased from the arena
    Verb("host memory is pinned", ("zerokern/memory/arena.py", "zerokern/kernels/triton/upload.py"), attributes=PINS),
    Verb(
        "streams and events are made and waited for", (*STREAMS, CUPY),
        full=frozenset(f"torch.cuda.{name}" for name in WAITS), attributes=frozenset({"wait_event", "wait_stream"}),
    ),
    # Triton asks torch itself
    Verb("the launchers alone ask for the stream", (*STREAMS, CUPY), full=frozenset({"torch.cuda.current_stream"})),
    Verb("nothing calls record_stream: a release event orders memory", (), attributes=frozenset({"record_stream"})),
    Verb("native signatures are declared", ("zerokern/core/native.py",), attributes=frozenset({"argtypes", "restype"})),
)  # fmt: skip
MUTE = ("zerokern/kernels/",)
TALKATIVE = ("zerokern/cli/",)
TRITON = "zerokern/kernels/triton/"  # imported on demand only, so the files themselves may import triton


def names(source: str, path: str) -> list[tuple[str, int]]:
    """Every dotted name of a source, aliases resolved: with `import torch.distributed as dist`, dist.send is
    torch.distributed.send. Imported names count as used where they are imported."""
    found = imports(source, module_name(path), is_package(path))
    aliases = {one.alias: one.full if one.name or one.alias != one.full.split(".")[0] else one.alias for one in found}
    used = [(one.full, one.line) for one in found if one.name]
    for node in nodes(source):
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            used.append((f"{aliases.get(first, first)}.{rest}" if rest else f"?.{node.attr}", node.lineno))
        elif isinstance(node, ast.keyword) and node.arg == "pin_memory":
            used.append(("keyword.pin_memory", node.value.lineno))
    return used


def displaced(source: str, path: str) -> list[Finding]:
    found = []
    for name, line in names(source, path):
        for verb in VERBS:
            if path not in verb.homes and verb.uses(name):
                where = f", only in {' and '.join(verb.homes)}" if verb.homes else ""
                found.append(Finding(path, line, f"uses {name.removeprefix('?.')}; {verb.what}{where}"))
    return found


def loud(source: str, path: str) -> list[Finding]:
    """Layer 0 is mute, and no layer prints: what there is to say is raised, returned or logged."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Call) and dotted(node.func) == "print" and not path.startswith(TALKATIVE):
            found.append(Finding(path, node.lineno, "prints; only the command line does"))
    if path.startswith(MUTE):
        for one in imports(source, module_name(path), is_package(path)):
            if one.module.split(".")[0] in ("logging", "warnings"):
                found.append(Finding(path, one.line, f"imports {one.module}; layer 0 raises or returns"))
    return found


def eager(source: str, path: str) -> list[Finding]:
    if path.startswith(TRITON):
        return []
    banned = OPTIONAL if path.startswith(TALKATIVE) else OPTIONAL | {PLOTTING}
    return [
        Finding(path, one.line, f"imports {one.module} with the module; an optional library is imported in a function")
        for one in imports(source, module_name(path), is_package(path))
        if one.at_module_level and one.module.split(".")[0] in banned
    ]


LIBRARY = files(".py", under=("zerokern/",))


def test_one_verb_one_file_and_layers_do_not_print() -> None:
    sources = {path: read(path) for path in LIBRARY}
    assert_clean([one for path, source in sources.items() for one in displaced(source, path) + loud(source, path)])


def test_optional_libraries_are_imported_on_demand() -> None:
    """But for the adapters: who imports one has its framework, whose classes it derives from."""
    others = [path for path in LIBRARY if not path.startswith("zerokern/integrations/")]
    assert len(others) < len(LIBRARY)
    assert_clean([finding for path in others for finding in eager(read(path), path)])


def test_import_works_without_optional_libraries() -> None:
    """Nor does it import them where they are."""
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        f"optional = {sorted(OPTIONAL | {PLOTTING})}\n"
        "for name in optional:\n"
        "    sys.modules.setdefault(name, None)\n"
        "import zerokern\n"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before if sys.modules[name] is not None}\n"
        "print(sorted(loaded & set(optional)), end='')\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd="/")
    assert (ran.returncode, ran.stdout) == (0, "[]"), ran.stderr


def test_a_displaced_verb_is_found() -> None:
    for source, says in [
        ("import os\nos.environ['X']", "only in zerokern/core/env.py"),
        ("from os import environ", "the environment is read"),
        ("import os as o\no.getenv('X')", "uses os.getenv"),
        ("import torch.distributed as dist\ndist.all_reduce(x)", "only in zerokern/comm/collectives.py"),
        ("import torch\ntorch.distributed.barrier()", "collectives are called"),
        ("from torch.distributed import broadcast", "collectives are called"),
        ("def f(p):\n    p.register_hook(g)", "only in zerokern/zero/hooks.py"),
        ("import torch\ntorch.empty(1, pin_memory=True)", "only in zerokern/memory/arena.py"),
        ("f().pin_memory()", "host memory is pinned"),
        ("import torch\ntorch.cuda.synchronize()", "zerokern/memory/staging.py and zerokern/kernels/triton/upload.py"),
        ("from torch.distributed.tensor import DTensor", "what a tensor is, is asked"),
        ("x.record_stream(s)", "a release event"),
        ("lib.f.argtypes = []", "only in zerokern/core/native.py"),
    ]:
        (finding,) = displaced(source, "zerokern/optim/adam.py")
        assert says in str(finding), source
    assert displaced("import os\nos.environ", "zerokern/core/env.py") == []
    assert displaced("import functools\nfunctools.reduce(f, x)", "zerokern/optim/adam.py") == []


def test_loud_and_eager_sources_are_found() -> None:
    assert len(loud("print(1)", "zerokern/optim/adam.py")) == 1
    assert len(loud("import logging", "zerokern/kernels/ops.py")) == 1
    assert loud("print(1)", "zerokern/cli/main.py") == []
    assert len(eager("import triton.language as tl", "zerokern/kernels/ops.py")) == 1
    assert len(eager("import matplotlib", "zerokern/optim/adam.py")) == 1
    assert eager("import matplotlib", "zerokern/cli/plot.py") == []
    assert eager("def f():\n    import triton", "zerokern/kernels/ops.py") == []
