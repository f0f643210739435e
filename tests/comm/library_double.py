"""A stand-in for torch.distributed over a device's library: ranks are threads, a launch returns at once, and the result
is there only after the work's wait(). Sums run in the bucket's dtype, from the last rank to the first."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist


class DoubleGroup:
    """What a rank holds of one communicator."""

    group_name, group_desc = "0", "double"

    def __init__(self, world: LibraryDouble, rank: int, lane: int, options: Any = None) -> None:
        self.world, self.rank, self.lane, self.options = world, rank, lane, options
        self.aborted = False
        # what this rank launched and what waited for it: verb, communicator, number and the current stream
        self.log: list[tuple[str, tuple[str, int], int, str]] = []
        self.current: Callable[[], str] = lambda: "compute"

    def _get_backend(self, device: torch.device) -> Any:
        options = SimpleNamespace(_timeout=dist.distributed_c10d.default_pg_timeout)
        return SimpleNamespace(options=options, name=lambda: self.world.backend)

    def abort(self) -> None:
        self.aborted = True


class DoubleWork:
    def __init__(self, world: LibraryDouble, pg: DoubleGroup, key: tuple, finish: Any) -> None:
        self._world, self._pg, self._key, self._finish = world, pg, key, finish

    def is_completed(self) -> bool:
        return len(self._world.given[self._key]) == self._world.size

    def wait(self) -> None:
        lane, count = self._key
        self._pg.log.append(("wait", (self._world.called, lane), count, self._pg.current()))
        limit = time.monotonic() + 120
        while not self.is_completed():
            if self._world.gone or time.monotonic() > limit:
                raise RuntimeError("NCCL communicator was aborted: a rank did not come")
            time.sleep(1e-3)
        self._finish([self._world.given[self._key][rank] for rank in range(self._world.size)])


class LibraryDouble:
    """`names`: "old" (torch 2.10), "both" (2.13: the old ones warn) or "new"."""

    def __init__(self, size: int, names: str, called: str = "") -> None:
        self.size, self.names, self.called = size, names, called
        self.backend = "nccl"
        self.options: Any = None  # `ProcessGroupNCCL.Options`, which builds of torch without NCCL have not
        self.given: dict[tuple, dict[int, torch.Tensor]] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.lanes_made = 0
        self.fails: str | None = None
        self.gone = False  # whether a rank has ended with an error
        self.lock = threading.Lock()
        self.store = dist.HashStore()
        self.groups = [DoubleGroup(self, rank, 0) for rank in range(size)]
        self.counts: dict[tuple, int] = {}

    def module(self) -> SimpleNamespace:
        """What `torch.distributed` is to the code under test."""
        there: dict[str, Any] = {
            name: getattr(self, name) for name in ("all_reduce", "all_to_all", "broadcast", "new_group")
        }
        there |= {"get_rank": self.get_rank, "get_world_size": self.get_world_size}
        there |= {"ReduceOp": dist.ReduceOp, "HashStore": lambda: self.store, "distributed_c10d": dist.distributed_c10d}
        there["PrefixStore"] = dist.PrefixStore
        if self.options is not None:
            there["ProcessGroupNCCL"] = SimpleNamespace(Options=self.options)
        there["get_process_group_ranks"] = lambda pg: list(range(self.size))
        if self.names in ("old", "both"):
            there["all_gather_into_tensor"] = self._old(self.gather)
            there["reduce_scatter_tensor"] = self._old(self.scatter)
        if self.names in ("new", "both"):
            there["all_gather_single"], there["reduce_scatter_single"] = self.gather, self.scatter
        return SimpleNamespace(**there)

    def _old(self, function: Any) -> Any:
        def renamed(*args: Any, **kwargs: Any) -> Any:
            if self.names == "both":
                warnings.warn("this name is deprecated", FutureWarning, stacklevel=2)
            return function(*args, **kwargs)

        return renamed

    def get_rank(self, pg: DoubleGroup) -> int:
        return pg.rank

    def get_world_size(self, pg: DoubleGroup | None = None) -> int:
        return self.size

    def new_group(
        self, ranks: list[int], use_local_synchronization: bool, group_desc: str, **given: Any
    ) -> DoubleGroup:
        assert {*given} in (set(), {"pg_options", "timeout"})
        assert not given or given["pg_options"]._timeout == given["timeout"], "of which torch warns"
        assert ranks == list(range(self.size)) and not use_local_synchronization
        with self.lock:
            self.lanes_made += 1
        rank = int(threading.current_thread().name.rpartition(" ")[2])
        return DoubleGroup(self, rank, 1, given.get("pg_options"))

    def _launch(self, pg: DoubleGroup, name: str, given: torch.Tensor, out: torch.Tensor, finish: Any) -> DoubleWork:
        if self.fails == name:
            raise dist.DistBackendError(f"NCCL error in {name}: unhandled system error")
        with self.lock:
            count = self.counts[pg.rank, pg.lane] = self.counts.get((pg.rank, pg.lane), 0) + 1
            key = (pg.lane, count)
            self.given.setdefault(key, {})[pg.rank] = given.clone()
            self.calls.append((name, pg.lane, out.data_ptr()))
            pg.log.append(("launch", (self.called, pg.lane), count, pg.current()))
        return DoubleWork(self, pg, key, finish)

    def gather(self, output: Any, input: Any, group: DoubleGroup, async_op: bool) -> DoubleWork:
        assert async_op and output.numel() == self.size * input.numel() and output.dtype == input.dtype
        return self._launch(group, "gather", input, output, lambda parts: output.copy_(torch.cat(parts)))

    def scatter(self, output: Any, input: Any, op: Any, group: DoubleGroup, async_op: bool) -> DoubleWork:
        assert async_op and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        assert input.numel() == self.size * output.numel() and output.dtype == input.dtype

        def finish(parts: list[torch.Tensor]) -> None:
            span = slice(group.rank * output.numel(), (group.rank + 1) * output.numel())
            output.copy_(total([part[span] for part in parts], op))

        return self._launch(group, "mean" if op == dist.ReduceOp.AVG else "scatter", input, output, finish)

    def all_to_all(self, outputs: Any, inputs: Any, group: DoubleGroup, async_op: bool) -> DoubleWork:
        assert async_op and len(outputs) == len(inputs) == self.size
        given = torch.zeros(self.size, max(one.numel() for one in inputs), dtype=inputs[0].dtype)
        for row, one in zip(given, inputs, strict=True):
            row[: one.numel()] = one

        def finish(parts: list[torch.Tensor]) -> None:
            for out, part in zip(outputs, parts, strict=True):
                out.copy_(part[group.rank, : out.numel()])

        return self._launch(group, "all_to_all", given, outputs[0], finish)

    def all_reduce(self, tensor: Any, op: Any, group: DoubleGroup, async_op: bool) -> DoubleWork:
        assert async_op

        def finish(parts: list[torch.Tensor]) -> None:
            tensor.copy_(torch.stack(parts).amax(0) if op == dist.ReduceOp.MAX else total(parts, op))

        return self._launch(group, "all_reduce", tensor, tensor, finish)

    def broadcast(self, tensor: Any, group: DoubleGroup, async_op: bool, group_src: int) -> DoubleWork:
        assert async_op
        return self._launch(group, "broadcast", tensor, tensor, lambda parts: tensor.copy_(parts[group_src]))


def total(parts: list[torch.Tensor], op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """The library divides before it sums, by a factor that it has rounded to the dtype."""
    if op == dist.ReduceOp.AVG:
        parts = [part * torch.tensor(1.0 / len(parts), dtype=part.dtype) for part in parts]
    result = parts[-1].clone()
    for part in reversed(parts[:-1]):
        result += part
    return result
