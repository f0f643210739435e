"""One training run under a memory cap, in a process of its own: `python -m zerokern.cli.demo.child SPEC`.

The cap is RLIMIT_DATA: private writable memory, which is where every tensor lies; the code of shared libraries does
not count. It is set above what the process holds once libraries are loaded and threads are running, so that it
bounds the training alone. Each event is one line of JSON on stdout.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from zerokern.core.errors import BudgetError
from zerokern.examples.contenders import CONTENDERS, Contender, state_nbytes
from zerokern.examples.model import GPT, Shape
from zerokern.examples.text import Batches, read_text
from zerokern.examples.widen import bf16_is_slow
from zerokern.io import Nvme

WARMUP_STEPS = 8
M_MMAP_THRESHOLD = -3  # malloc.h
OWN_MAPPING_NBYTES = 1 << 17
OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory")


@dataclass(frozen=True)
class Spec:
    contender: str
    cap: int
    layers: int
    width: int
    context: int
    rows: int
    steps: int
    lr: float
    seconds: float
    folder: str = ""  # where optimizer state rests; empty: in memory
    ring_nbytes: int = 0

    def tier(self, name: str) -> str | Nvme:
        """Where the state of an optimizer rests: on disk each has a folder of its own."""
        return Nvme(f"{self.folder}/{name}", ring_nbytes=self.ring_nbytes) if self.folder else "device"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def emit(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def status_nbytes(field: str) -> int:
    """A line of /proc/self/status: VmData (what the cap counts), VmRSS, VmHWM (the peak of VmRSS)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"field={field} is not in /proc/self/status; the demo's memory act needs Linux's own")


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, BudgetError)) or any(words in str(error) for words in OUT_OF_MEMORY)


def set_cap(nbytes: int) -> None:
    """Caps further private memory at `nbytes` and proves it by asking for twice as much."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = status_nbytes("VmData") + nbytes
    if hard != resource.RLIM_INFINITY and hard < limit:
        raise OSError(f"cap={nbytes} B lies above this process's hard RLIMIT_DATA of {hard} B; raise `ulimit -Hd`")
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        torch.empty(2 * nbytes, dtype=torch.uint8)
    except (RuntimeError, MemoryError):
        return
    raise OSError(f"cap={nbytes} B: this kernel does not enforce RLIMIT_DATA; needs Linux 4.7 or later")


def return_freed_memory() -> None:
    """Has malloc map each large tensor alone and unmap it when freed, so that the cap counts what is in use."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_NBYTES)


def lift_cap() -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def counting_saved(held: dict[int, int], model: nn.Module) -> AbstractContextManager:
    """Notes the bytes of each storage that autograd saves for backward, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class Run:
    """The training loop; `phase` names where it is, for the report of a failure."""

    def __init__(self, spec: Spec, contender: Contender, batches: Batches) -> None:
        self.spec, self.contender, self.batches = spec, contender, batches
        self.phase = "building the model"
        self.model: GPT | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def build(self, widen: bool) -> tuple[GPT, torch.optim.Optimizer]:
        torch.manual_seed(0)
        with torch.device("meta"):
            skeleton = GPT(Shape(self.spec.layers, self.spec.width, self.spec.context), widen)
        self.model = skeleton.to(self.contender.dtype).to_empty(device="cpu")
        self.model.initialize()
        self.optimizer = self.contender.optimizer(self.model.parameters(), self.spec.lr, self.spec.tier("state"))
        return self.model, self.optimizer

    def step(self, model: GPT, optimizer: torch.optim.Optimizer, number: int) -> None:
        held: dict[int, int] = {}
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = self.spec.lr * min(1.0, number / WARMUP_STEPS)
        self.phase = f"step {number}, forward"
        with counting_saved(held, model) if number == 1 else nullcontext():
            loss = model(*self.batches.next())
        if number == 1:
            emit("activations", nbytes=sum(held.values()))
        self.phase = f"step {number}, backward"
        loss.backward()
        self.phase = f"step {number}, optimizer"
        optimizer_start = time.perf_counter()
        self.contender.step(optimizer)
        end = time.perf_counter()
        optimizer.zero_grad()
        emit("step", number=number, loss=loss.item(), seconds=end - start, optimizer_seconds=end - optimizer_start)

    def train(self, widen: bool) -> None:
        model, optimizer = self.build(widen)
        start = time.perf_counter()
        for number in range(1, self.spec.steps + 1):
            self.step(model, optimizer, number)
            if time.perf_counter() - start > self.spec.seconds:
                return

    def held_nbytes(self) -> dict[str, int]:
        """Bytes of each role that exist now."""
        if self.model is None:
            return {}
        parameters = list(self.model.parameters())
        held = {"parameters": sum(p.nbytes for p in parameters)}
        held["gradients"] = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        return held | (state_nbytes(self.optimizer) if self.optimizer is not None else {})


def warm_up(contender: Contender, spec: Spec) -> bool:
    """Loads what is loaded lazily and starts the threads, on a tiny model; tells whether bf16 products are slow."""
    widen = contender.dtype == torch.bfloat16 and bf16_is_slow()
    shape = Shape(layers=1, width=128, context=32)
    model = GPT(shape, widen).to(contender.dtype)
    optimizer = contender.optimizer(model.parameters(), 0.0, spec.tier("warm-up"))
    for _ in range(2):
        tokens = torch.zeros(4, shape.context, dtype=torch.long)
        model(tokens, tokens).backward()
        contender.step(optimizer)
        optimizer.zero_grad()
    del model, optimizer, tokens
    gc.collect()  # what is freed later would count for the training
    return widen


def guarded(train: Callable[[], None]) -> str | None:
    """Runs; returns the message of an out-of-memory error, and lets any other error out."""
    try:
        train()
    except (RuntimeError, MemoryError, BudgetError) as error:
        lift_cap()
        if not is_out_of_memory(error):
            raise
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None


def main(text: str) -> int:
    spec = Spec(**json.loads(text))
    contender = CONTENDERS[spec.contender]
    batches = Batches(read_text(), spec.rows, spec.context, seed=0)
    return_freed_memory()
    widen = warm_up(contender, spec)
    resident = status_nbytes("VmRSS")
    set_cap(spec.cap)
    emit("ready", resident=resident, widen=widen, threads=torch.get_num_threads())
    run = Run(spec, contender, batches)
    message = guarded(lambda: run.train(widen))
    lift_cap()
    stored = {} if run.optimizer is None else state_nbytes(run.optimizer, on_disk=True)
    peak, held = status_nbytes("VmHWM"), run.held_nbytes()
    emit("end", message=message, phase=run.phase, peak=peak, held=held, stored=stored)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
