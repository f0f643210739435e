"""One training run under a memory cap, in a process of its own, whose `main` is told ACT CONTENDER FOLDER.

The cap is RLIMIT_DATA: private writable memory, which is where every tensor lies; the code of shared libraries does
not count. It is set above what the process holds once libraries are loaded and threads are running, so that it
bounds the training alone. With FOLDER "" the state of its optimizer rests in memory.
"""

from __future__ import annotations

import errno
import gc
import resource
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from zerokern.core.units import Tier
from zerokern.io import Nvme

from ..contenders import CONTENDERS, Contender, state_nbytes
from ..model import GPT
from ..text import Batches, read_text
from ..widen import bf16_is_slow
from .act import Act, is_out_of_memory
from .processes import emit, first_line, return_freed_memory, status_nbytes


def set_cap(nbytes: int) -> None:
    """Caps further private memory at `nbytes` and proves it by asking for twice as much."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = status_nbytes("VmData") + nbytes
    if hard != resource.RLIM_INFINITY and hard < limit:
        raise MemoryError(f"a cap of {nbytes:,} B lies above what this process may have (ulimit -Hd: {hard:,} B)")
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        torch.empty(2 * nbytes, dtype=torch.uint8)
    except (RuntimeError, MemoryError):
        return
    raise OSError(errno.ENOMEM, "this kernel does not enforce RLIMIT_DATA; a memory cap needs Linux 4.7 or later")


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

    def __init__(self, act: Act, contender: Contender, folder: str) -> None:
        self.act, self.contender, self.folder = act, contender, folder
        self.batches = Batches(read_text(), act.rows, act.shape.context, seed=0)
        self.phase = "building the model"
        self.model: GPT | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def tier(self, name: str) -> Tier | Nvme:
        """Where the state of an optimizer rests: on disk each has a folder of its own."""
        return Nvme(f"{self.folder}/{name}", ring_nbytes=self.act.ring_nbytes) if self.folder else "device"

    def warm_up(self) -> bool:
        """Loads what is loaded lazily and starts the threads, on one layer; tells whether bf16 products are slow.

        A thread that starts later would count for the training, with 8 MB of stack.
        """
        contender = self.contender
        widen = contender.dtype == torch.bfloat16 and bf16_is_slow()
        shape = replace(self.act.shape, layers=1)
        model = GPT(shape, widen).to(contender.dtype)
        optimizer = contender.optimizer(model.parameters(), 0.0, self.tier("warm-up"))
        for _ in range(2):
            tokens = torch.zeros(self.act.rows, shape.context, dtype=torch.long)
            model(tokens, tokens).backward()
            contender.step(optimizer)
            optimizer.zero_grad()
        del model, optimizer, tokens
        gc.collect()  # what is freed later would count for the training
        return widen

    def build(self, widen: bool) -> tuple[GPT, torch.optim.Optimizer]:
        torch.manual_seed(0)
        with torch.device("meta"):
            skeleton = GPT(self.act.shape, widen)
        self.model = skeleton.to(self.contender.dtype).to_empty(device="cpu")
        self.model.initialize()
        self.optimizer = self.contender.optimizer(self.model.parameters(), self.act.lr, self.tier("state"))
        return self.model, self.optimizer

    def step(self, model: GPT, optimizer: torch.optim.Optimizer, number: int) -> None:
        held: dict[int, int] = {}
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = self.act.lr_at(number)
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
        for number in range(1, self.act.steps + 1):
            self.step(model, optimizer, number)
            if self.act.is_over(number, time.perf_counter() - start):
                return

    def held_nbytes(self) -> dict[str, int]:
        """Bytes of each role that exist now."""
        if self.model is None:
            return {}
        parameters = list(self.model.parameters())
        held = {"parameters": sum(p.nbytes for p in parameters)}
        held["gradients"] = sum(p.grad.nbytes for p in parameters if p.grad is not None)
        return held | (state_nbytes(self.optimizer) if self.optimizer is not None else {})


def guarded(train: Callable[[], None]) -> str | None:
    """Runs; returns the message of an out-of-memory error, and lets any other error out."""
    try:
        train()
    except Exception as error:
        lift_cap()
        if not is_out_of_memory(error):
            raise
        return first_line(error)
    return None


def main(text: str, name: str, folder: str) -> None:
    act = Act.of_json(text)
    run = Run(act, CONTENDERS[name], folder)
    return_freed_memory()
    widen = run.warm_up()
    resident = status_nbytes("VmRSS")
    set_cap(act.cap)
    emit("ready", resident=resident, widen=widen, threads=torch.get_num_threads())
    message = guarded(lambda: run.train(widen))
    lift_cap()
    stored = {} if run.optimizer is None else state_nbytes(run.optimizer, on_disk=True)
    peak, held = status_nbytes("VmHWM"), run.held_nbytes()
    emit("end", message=message, phase=run.phase, peak=peak, held=held, stored=stored)
