"""One stem on every shelf: an op has its kernel, its test and its benchmark, all under its name."""

from __future__ import annotations

from collections.abc import Collection

from .tree import tracked

OPS = ("adam", "lion", "adagrad", "sgd", "muon", "sumsq", "cast", "accumulate", "stream")
SHELVES = ("cpu/{op}/", "tests/kernels/test_{op}.py", "bench/ops/{op}.py")
ENGINES = ("io",)  # no kernel: native code with a package of its own
ENGINE_SHELVES = ("cpu/{op}/", "zerokern/{op}/", "tests/{op}/", "bench/ops/{op}.py")
GPU_OPS = {"flatten": "flatten", "fingerprint": "ops"}  # and the section that measures it; flatten goes both ways
GPU_SHELVES = ("zerokern/kernels/triton/{op}.py", "tests/kernels/test_{test}.py", "bench/gpu/sections/{section}.py")
KERNEL_OF = {"cast": "accumulate"}  # a cast is a sum of one source: the same loop
TRITON = "zerokern/kernels/triton/{op}.py"


def place(shelf: str, op: str) -> str:
    return shelf.format(op=KERNEL_OF.get(op, op) if shelf.startswith("cpu/") else op)


def empty_places(paths: Collection[str]) -> list[str]:
    has_triton = any(path.startswith("zerokern/kernels/triton/") for path in paths)
    shelves = SHELVES + ((TRITON,) if has_triton else ())
    wanted = [place(shelf, op) for op in OPS for shelf in shelves]
    for op, section in GPU_OPS.items() if has_triton else ():  # on a CPU: casts into spans, and the disk's checksum
        wanted += [shelf.format(op=op, test=op, section=section) for shelf in GPU_SHELVES]
    wanted += [shelf.format(op=engine) for engine in ENGINES for shelf in ENGINE_SHELVES]
    return [spot for spot in wanted if not any(path.startswith(spot) for path in paths)]


def strangers(paths: Collection[str]) -> list[str]:
    """Benchmarks of an op that is not on the list, and so would escape the other shelves."""
    known = {f"bench/ops/{op}.py" for op in OPS + ENGINES} | {"bench/ops/__init__.py"}
    return [path for path in paths if path.startswith("bench/ops/") and path.endswith(".py") and path not in known]


def test_every_op_is_on_every_shelf() -> None:
    empty = empty_places(tracked())
    assert not empty, f"nothing at {', '.join(empty)}"


def test_no_op_is_unknown() -> None:
    assert strangers(tracked()) == []


def test_an_empty_place_is_found() -> None:
    pairs = [(shelf, op) for op in OPS for shelf in SHELVES] + [
        (shelf, op) for op in ENGINES for shelf in ENGINE_SHELVES
    ]
    full = [shelf.format(op=op) + ("x.h" if shelf.endswith("/") else "") for shelf, op in pairs]
    assert empty_places(full) == []
    assert empty_places([path for path in full if not path.startswith("tests/io/")]) == ["tests/io/"]
    assert empty_places([path for path in full if path != "bench/ops/lion.py"]) == ["bench/ops/lion.py"]
    assert empty_places([*full, "zerokern/kernels/triton/adam.py"])[0] == "zerokern/kernels/triton/lion.py"
    assert strangers([*full, "bench/ops/shampoo.py"]) == ["bench/ops/shampoo.py"]
