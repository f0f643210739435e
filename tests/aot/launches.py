"""Runs launchers as they run on a GPU, without one, and records what they ask Triton to compile.

In a process in which Triton compiles. Its driver is a stand-in, and a hook ends each launch where the compiler would
start: what remains is the launcher's Python and Triton's own reading of the arguments.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from jobs import every_format, of_updates
from promises import StandInDriver, plain
from triton.backends.compiler import GPUTarget

from zerokern.kernels.changed import pack_changed
from zerokern.kernels.checks import SpanList
from zerokern.kernels.formats import CODECS
from zerokern.kernels.triton import (
    accumulate,
    bucket,
    changed,
    codecs,
    ferry,
    fingerprint,
    stream,
    sumsq,
    table,
    upload,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def recorder(launches: list[dict[str, Any]]) -> Callable[..., bool]:
    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        names = list(compile["signature"])
        (attributes,) = compile["configs"]
        launches.append(
            {
                "kernel": f"{fn.module}:{fn.name}",
                "signature": compile["signature"],
                "constexprs": {names[path[0]]: plain(value) for path, value in compile["constants"].items()},
                "aligned": [names[path[0]] for path, value in attributes.items() if value],
                "num_warps": compile["num_warps"],
                "maxnreg": json.loads(compile["specialization_data"])["options"]["maxnreg"],
                "enable_fp_fusion": compile["enable_fp_fusion"],
            }
        )
        return True  # as if another had compiled it: there is no kernel, and nothing is launched

    return hook


def everything() -> None:
    """Each launcher of lists and streams with each of its formats."""
    stats = torch.zeros(2, dtype=torch.float64)
    for tensor, other in itertools.product(DTYPES, DTYPES):
        x, y = torch.ones(5000, dtype=tensor), torch.ones(5000, dtype=other)
        for add in (True, False):
            accumulate.accumulate(y, [x, x], add, 0.5)
        accumulate.accumulate(y, [x], True, 0.5)
        accumulate.accumulate(y[1:], [x[1:]], True, 0.5)
        accumulate.accumulate(y, [x], False, 0.5)
        members = SpanList([x, torch.ones(40, 50, dtype=tensor).t()], None).members
        for into in (True, False):
            table = bucket.BucketTable(torch.device("cpu"), members, other)
            table.run(into, [x.data_ptr()] * 2, torch.ones(7000, dtype=other), 0.5, torch.ones(1), stats)
            table.run(into, [x.data_ptr()] * 2, torch.ones(7001, dtype=other)[1:], 0.5)
    for dtype in DTYPES:
        x = torch.ones(70_000, dtype=dtype)
        for numel, sumsq.PROGRAMS_EACH in itertools.product((1, 16, 70_000), (4, 0)):
            sumsq.sumsq([x[:numel]], stats[1:])
        fingerprint.fingerprints([x, x[1:]], torch.zeros(3, dtype=torch.int64)[1:])
        packed = pack_changed(torch.ones(-(-x.numel() // 8), dtype=torch.uint8), x)
        changed.unpack(changed.group_rows([(packed, x)]), packed.counts, packed.places, packed.values)
    x = torch.ones(100, dtype=torch.uint8)
    spans = [(x.data_ptr() + at, x.data_ptr() + 64 + at, 16) for at in (16, 4, 2, 1)]
    ferry.ferry(spans, torch.zeros(13, dtype=torch.int64)[1:])
    for reads, updates, writes in ((1, 4, 0), (1, 4, 1), (1, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 1)):
        streams = iter(torch.ones(10, 1024).unbind())
        stream.stream(*([next(streams) for _ in range(count)] for count in (reads, updates, writes)))


def updates() -> None:
    """Each kernel of the optimizers that is compiled ahead, as its table launches it."""
    ahead_of_time = {job["case"] for job in of_updates(every=True)}
    memory = torch.zeros(4096)
    for made in every_format():
        if str(made) in ahead_of_time:
            one = table.DeviceTable(torch.device("cpu"), 1, 1)
            one.set_group(
                0, {"lr": 0.5}, algorithm=made.algorithm, grad_dtype=made.grad, param_dtype=made.param,
                master_format=made.master, state_format=made.state, out_dtype=made.out,
                stochastic_seed=7 if made.random else None,
            )  # fmt: skip
            names = ("param", "grad", "exp_avg", "out", *["changed"] * made.changed)
            one.set_row(0, group=0, numel=64, **dict.fromkeys(names, memory.data_ptr()))
            one.run()


def conversions() -> None:
    for verb, kind in CODECS:
        coded, wide = kind.startswith("exp_avg"), {"split16": torch.int16, "split8": torch.int8}
        codes = torch.zeros(512, dtype=torch.uint8 if coded else torch.bfloat16)
        aux = torch.zeros(512, dtype=torch.float32 if coded else wide[kind])
        codecs.convert(verb, kind, torch.ones(512), codes, aux)


def recorded() -> list[dict[str, Any]]:
    launches: list[dict[str, Any]] = []
    triton.runtime.driver.set_active(StandInDriver(GPUTarget("cuda", 90, 32)))
    triton.knobs.runtime.jit_cache_hook = recorder(launches)
    for module in (bucket, sumsq, table):
        module.check_device = lambda device: None
    upload._in_place = lambda device: False
    upload._mark = lambda device: (None, SimpleNamespace(query=lambda: True))
    everything()
    updates()
    conversions()
    return launches
