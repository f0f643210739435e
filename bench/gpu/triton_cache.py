"""What Triton has compiled on one machine, for the next run there: OUT/triton-cache.tgz, for `bench/gpu_pack.sh`.

Triton's key holds its version, the bytes of its compiler's library, the version of ptxas, the kernel's source and line,
its options and the environment. A cache of another Triton, or of its wheel for another Python, has no hit; nor has one
in another folder, since a group of files names its members by their whole paths. So a cache can only come back to where
it was made: to the same image, into the same folder. What does not fit is refused by name and not taken for one.
"""

from __future__ import annotations

import os
import sys
import tarfile
from pathlib import Path

from .machine import said

NAME, KEY = "triton-cache.tgz", "KEY"
FOLDER = "TRITON_CACHE_DIR"
# in a process of its own: Triton is not imported where sections are forked
PROGRAM = """import hashlib; from triton.runtime.cache import triton_key
print(hashlib.sha256(triton_key().encode()).hexdigest())"""


def key() -> str:
    """What names Triton and its compiler here, and the folder of its cache."""
    return f"{said(sys.executable, '-c', PROGRAM) or 'no Triton'} {os.environ.get(FOLDER, 'the default folder')}"


def save(out: Path, key: str) -> str:
    """Writes the cache of this run into OUT; says what it holds."""
    folder = Path(os.environ.get(FOLDER, ""))
    if FOLDER not in os.environ or not folder.is_dir():
        return f"kept no Triton cache: {FOLDER} names no folder"
    (folder / KEY).write_text(key, encoding="utf-8")
    part = out / f".{NAME}.part"
    with tarfile.open(part, "w:gz", compresslevel=1) as file:
        file.add(folder, arcname=".")
    part.replace(out / NAME)
    return f"kept the Triton cache: {count(folder)} kernels, {(out / NAME).stat().st_size / 1e6:.1f} MB"


def load(file: Path, key: str) -> str:
    """Unpacks a cache that fits into the folder of this run's; says what came of it."""
    if not file.is_file():
        return f"no Triton cache was packed: all kernels are compiled here ({file.name})"
    with tarfile.open(file) as packed:
        names = {os.path.normpath(name): name for name in packed.getnames()}
        written = packed.extractfile(names[KEY]) if KEY in names else None
        of = written.read().decode() if written is not None else "nothing that it says"
        if of != key:
            return f"could not use the packed Triton cache: it is of {of!r}, and here is {key!r}"
        folder = Path(os.environ[FOLDER])
        folder.mkdir(parents=True, exist_ok=True)
        packed.extractall(folder, filter="data")
    return f"unpacked a Triton cache of {count(folder)} kernels"


def count(folder: Path) -> int:
    return len(list(folder.glob("*/*.cubin")))
