"""`zk.info()`: what runs here, by which implementation, and what this machine offers."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
from pathlib import Path

from zerokern.core import env, native
from zerokern.core.errors import BackendError
from zerokern.io import probes, why_no_uring
from zerokern.kernels.cuda import loader
from zerokern.kernels.triton import backend
from zerokern.memory import placement, span_copies
from zerokern.memory.room import memory_left

__all__ = ["Info", "get_include", "get_library", "info"]

OPS = (
    "adam", "lion", "adagrad", "sgd", "muon", "sumsq", "cast", "accumulate", "stream",
    "flatten", "unflatten", "encode_int8", "decode_int8", "split", "join",
)  # fmt: skip
OPTIONAL = ("triton",)
LOSSY = (
    "nothing by default; when asked for: state_format='bf16' and 'int8', master_format='split8' (24 bits) and 'none'"
)


class Info(dict[str, object]):
    """Holds facts by name, and prints them as aligned lines.

    >>> print(Info({"threads": 2, "env": {"ZEROKERN_THREADS": "2"}}))
    threads  2
    env      ZEROKERN_THREADS: 2
    """

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {line}" for name, value in self.items() for line in [_text(value)])


def _text(value: object) -> str:
    if isinstance(value, dict):
        by_value: dict[str, list[str]] = {}  # names that share a value are told together
        for name, setting in value.items():
            by_value.setdefault(_text(setting), []).append(name)
        return "; ".join(f"{', '.join(names)}: {text}" for text, names in by_value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value)) or "none"
    return str(value)


def info() -> Info:
    """Reports what runs here, and what this machine decides: versions, instruction sets, threads and their CPUs,
    implementation of each op, GPUs, huge pages, limits of memory, disks, lossy formats and the environment variables in
    force.

    Nothing is measured. The result prints as lines, and is a dict for programs.

    >>> import zerokern as zk
    >>> zk.info()["instruction set"] in zk.info()["instruction sets here"]
    True
    """
    environment = {name: value for name in env.ENV if (value := env.read(name)) is not None}
    memory = {"memory limits": list(memory_left()), "huge pages": _huge_pages(), "locked memory": _locked_memory()}
    more = {"lossy": LOSSY, "environment": environment}
    return Info({**_versions(), **_native(), **_products(), **_gpus(), **memory, **_disks(), **more})


def _versions() -> dict[str, object]:
    import torch

    return {
        "zerokern": _installed("zerokern") or "source tree",
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{name: _installed(name) or "not installed" for name in OPTIONAL},
    }


def _installed(package: str) -> str:
    """Returns the version of a package, whatever its distribution is called, without importing it."""
    names = importlib.metadata.packages_distributions().get(package)
    return importlib.metadata.version(names[0]) if names else ""


def _native() -> dict[str, object]:
    try:
        active = native.isa_active()
    except BackendError as error:
        return {"native library": str(error), "implementations": dict.fromkeys(OPS, "none")}
    cpus = native.cpus() or env.process_cpus()
    near = placement.nodes_for(placement.nodes(), cpus)
    return {
        "instruction set": active,
        "instruction sets here": native.isa_usable(),
        "instruction sets compiled": native.isa_names(),
        "threads": native.threads(),
        "cpus": env.cpu_list(cpus),
        "memory from": f"NUMA nodes {env.cpu_list(near)}" if near else "anywhere",
        "checksums": f"crc32c by {native.library().zk_crc32c_name().decode()}",
        "implementations": dict.fromkeys(OPS, f"cpu.{active}"),
    }


def _products() -> dict[str, object]:
    """Returns with what torch multiplies matrices here: zk.Muon's products, and the model's own."""
    import torch

    return {"products": f"torch's, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"}


def _gpus() -> dict[str, object]:
    """Returns GPUs by name, and what runs on them, without a CUDA context."""
    from torch import cuda, device

    gpus = range(cuda.device_count() if cuda.is_available() else 0)
    if not gpus:
        return {"gpus": "none"}
    names = ["{} (sm_{}{})".format(cuda.get_device_name(i), *cuda.get_device_capability(i)) for i in gpus]
    try:
        for i in gpus:
            backend.check_device(device("cuda", i))
    except BackendError as error:
        return {"gpus": names, "gpu kernels": str(error)}
    missing = loader.reason(device("cuda", 0))  # no trial launch, which would make a context
    return {
        "gpus": names,
        "gpu kernels": "triton",
        "cuda kernels": missing or "used if their first launch is right",
        "small copies": span_copies.limits(),
    }


def _disks() -> dict[str, object]:
    try:
        refusal = why_no_uring()
    except BackendError:
        return {"disk engine": "none"}
    known = {folder: probed.line() for folder, probed in probes().items()}
    return {
        "disk engine": f"threads; io_uring was refused: {refusal}" if refusal else "uring",
        "disks": known or "none measured; zerokern info --path DIR does it",
    }


def _huge_pages() -> str:
    try:
        choices = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    setting = choices.partition("[")[2].partition("]")[0]
    means = {"always": "for all memory", "madvise": "for optimizer state, which asks for them", "never": "switched off"}
    return f"{setting} ({means.get(setting, 'unknown')})"


def _locked_memory() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft / 2**20:g} MiB"


def get_include() -> str:
    """Returns the folder of the C headers: ``zerokern_cpu.h``, the kernels, and ``zerokern_io.h``, the disk engine.

    >>> import pathlib, zerokern as zk
    >>> sorted(header.name for header in pathlib.Path(zk.get_include()).glob("*.h"))
    ['zerokern_cpu.h', 'zerokern_io.h']
    """
    native.library()  # those that it was built with; an error that teaches where there is none
    return str(Path(__file__).resolve().parent / "include")


def get_library() -> str:
    """Returns the native library in use, which a program in C links to. ``examples/step.c`` is such a program.

    >>> import zerokern as zk
    >>> zk.get_library().endswith(".so")
    True
    """
    native.library()  # an error that teaches where there is none
    return str(native.path())
