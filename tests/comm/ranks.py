"""Real ranks: processes that start at once, joined by gloo over the loopback, each running one function of a test.

They are forked from a server that has torch and zerokern imported and nothing running. A rank may be killed, may exit
without a word, may hang: whoever is left is ended by its pid, and what each of them last did is in the error.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

GRACE_S = 3.0  # between the first failure and the end of the others: what they say may name the cause
PRELOAD = (
    "pytest torch torch._dynamo torch.distributed torch.distributed.device_mesh torch.distributed.fsdp "
    "torch.distributed.checkpoint zerokern zerokern.api zerokern.comm.device zerokern.kernels zerokern.optim "
    "zerokern.checkpoint.loader zerokern.checkpoint.saver"
)
NOTHING = object()


class RanksFailed(AssertionError):
    """Some rank raised, died or did not end in time. `errors`: what each of them said, by rank."""

    def __init__(self, message: str, errors: dict[int, str]) -> None:
        super().__init__(message)
        self.errors = errors


def run_ranks(
    n: int,
    fn: Callable,
    *args: Any,
    timeout: float = 240.0,
    env: Mapping[str, str] | None = None,
    patience: float = 30.0,
    dies: Collection[int] = (),
    store: str = "parent",
) -> list:
    """fn(rank, *args) in n processes of one gloo group; their results, by rank.

    `fn` is a function of a module's top level; results and arguments must be picklable. `patience` is the group's own
    timeout. `dies`: ranks that are meant to end without a result (None in the list), or to hang. `store`: who serves
    the group's store: "parent", as torchrun has it, or "rank0", as env:// has it.
    """
    context = server_context()
    module = sys.modules[fn.__module__]
    what = (str(Path(module.__file__).resolve()), fn.__module__, fn.__qualname__, pickle.dumps(args))
    with tempfile.TemporaryDirectory() as folder:
        server = _serve(n) if store == "parent" else None
        ranks = [Rank(context, Path(folder), rank) for rank in range(n)]
        try:
            for one in ranks:
                one.start(n, what, dict(env or {}), patience, server.port if server else 0)
            if not server:
                port = ranks[0].port(timeout)
                for one in ranks[1:]:
                    one.connection.send(port)
            return _collect(ranks, timeout, frozenset(dies))
        finally:
            for one in ranks:
                one.end()


def server_context() -> Any:
    """Its processes are forked from a server with all of PRELOAD imported, one for each process of tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD.split())
    return context


def _serve(n: int) -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, n, is_master=True, wait_for_workers=False)


class Rank:
    """One of the processes, as its parent sees it."""

    def __init__(self, context: Any, folder: Path, rank: int) -> None:
        self.rank = rank
        self.result: Any = NOTHING
        self.error: str | None = None
        self.stacks = folder / f"{rank}.stacks"
        self._context = context
        self._process: Any = None

    def start(self, n: int, what: tuple, env: dict, patience: float, port: int) -> None:
        self.connection, theirs = self._context.Pipe()
        arguments = (self.rank, n, what, env, patience, port, theirs, str(self.stacks))
        self._process = self._context.Process(target=_live, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def port(self, timeout: float) -> int:
        if not self.connection.poll(timeout):
            raise RanksFailed("rank 0 did not open its store", {})
        return self.connection.recv()

    @property
    def handles(self) -> list:
        return [] if self.over else [self.connection, self._process.sentinel]

    @property
    def over(self) -> bool:
        return self.result is not NOTHING or self.error is not None

    def look(self) -> None:
        """Takes in what it has said, or that it has ended without saying anything."""
        if self.over:
            return
        ended = not self._process.is_alive()  # asked first: what it said before it ended is there by now
        try:
            if self.connection.poll():
                good, payload = pickle.loads(self.connection.recv_bytes())
                self.result, self.error = (payload, None) if good else (NOTHING, payload)
                return
        except EOFError:
            self._process.join(5)
            ended = True
        if ended:
            self.error = f"ended with exit code {self._process.exitcode} and no result"

    def stack(self) -> str:
        """Where each of its threads is; for one that hangs."""
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGUSR1)
            limit = time.monotonic() + 30
            while not self.stacks.read_text().endswith("\n") and time.monotonic() < limit:
                time.sleep(0.02)
        return self.stacks.read_text() if self.stacks.exists() else ""

    def end(self) -> None:
        if self._process is None:
            return
        if self.over:
            self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(60)
        self._process.close()
        self.connection.close()


def _collect(ranks: list[Rank], timeout: float, dies: frozenset[int]) -> list:
    limit = time.monotonic() + timeout
    failed = False
    while not all(one.over for one in ranks if one.rank not in dies):
        left = limit - time.monotonic()
        if left <= 0:
            break
        multiprocessing.connection.wait([handle for one in ranks for handle in one.handles], min(left, 0.5))
        for one in ranks:
            one.look()
        if not failed and any(one.error is not None and one.rank not in dies for one in ranks):
            failed, limit = True, min(limit, time.monotonic() + GRACE_S)
    errors = {one.rank: one.error for one in ranks if one.error is not None and one.rank not in dies}
    hung = [one for one in ranks if not one.over and one.rank not in dies]
    if not errors and not hung:
        return [None if one.result is NOTHING else one.result for one in ranks]
    parts = [f"--- rank {rank} of {len(ranks)}:\n{error}" for rank, error in errors.items()]
    parts += [f"--- rank {one.rank} of {len(ranks)} did not end in time; it was at:\n{one.stack()}" for one in hung]
    raise RanksFailed("\n".join(["", *parts]), {**errors, **{one.rank: "did not end in time" for one in hung}})


def _live(rank: int, n: int, what: tuple, env: dict, patience: float, port: int, connection: Any, stacks: str) -> None:
    """What a rank's process does."""
    gc.freeze()  # a collection would write to all that the server has imported, and so copy it
    stack_file = open(stacks, "w")  # noqa: SIM115  (open for as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    try:
        answer = (True, _joined(rank, n, what, env, patience, port, connection))
        said = pickle.dumps(answer)
    except BaseException:
        said = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(said)
    connection.close()
    os._exit(0)  # an ordinary end waits for threads of gloo that wait for ranks which are gone


def _joined(rank: int, n: int, what: tuple, env: dict, patience: float, port: int, connection: Any) -> Any:
    given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
    os.environ.update({**given, "GLOO_SOCKET_IFNAME": "lo", **env})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(rank)
    wait = timedelta(seconds=patience)
    master = port == 0 and rank == 0
    if port == 0 and not master:
        port = connection.recv()
    store = dist.TCPStore("127.0.0.1", port, n, is_master=master, wait_for_workers=False, timeout=wait)
    if master:
        connection.send(store.port)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)})
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=wait)
    store.set(f"rank {rank} is there", "")
    store.wait([f"rank {one} is there" for one in range(n)])  # whoever ends sooner breaks what others still connect
    path, name, qualname, arguments = what
    module = _load(path, name)  # first: the arguments may be of its classes
    fn: Any = module
    for part in qualname.split("."):
        fn = getattr(fn, part)
    return fn(rank, *pickle.loads(arguments))


def _load(path: str, name: str) -> Any:
    """The module of that file, under the name that it has in the parent: pytest gives names that nobody can import."""
    try:
        module = importlib.import_module(name)
        if Path(module.__file__ or "").resolve() == Path(path):
            return module
    except ImportError:
        pass
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
