"""A trillion parameters on 1,024 ranks, on paper: in seconds, and in little memory."""

from __future__ import annotations

import json

from forked import run_forked

PROGRAM = """
import json, time, torch
import zerokern as zk
from zerokern.examples.model import GPT, Shape
from zerokern.zero.partition import partition
from zerokern.zero.units import members, units_of

with torch.device("meta"):
    model = GPT(Shape(128, 25600, 2048))
start = time.process_time()
listed = members(units_of(model), 3, torch.bfloat16)
rank, world = 1023, 1024
buckets = partition(listed, world, (32 << 20) // 2)
last = sum(piece.numel for bucket in buckets for piece in bucket.pieces(rank))
plans = [zk.plan(model, stage=stage, world=world, param_dtype=torch.bfloat16) for stage in (0, 3)]
text = str(plans[1])
steps = [len("\\n".join(map(str, [plan.program])).splitlines()) for plan in plans]
seconds = time.process_time() - start
status = open("/proc/self/status").read()  # ru_maxrss begins with that of the process that forked this one
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps({
    "numel": plans[0].numel, "seconds": seconds, "peak": peak, "steps": steps, "last": last, "text": text,
    "padding": [plan.buckets.padding for plan in plans], "states": [plan.states for plan in plans],
    "shards": sum(bucket.shard_numel for bucket in buckets), "psi": [plan.traffic.numel / plan.numel for plan in plans],
}))
"""


def test_a_trillion_parameters_on_1024_ranks() -> None:
    ran = run_forked(PROGRAM)
    assert not ran.stderr, ran.stderr
    found = json.loads(ran.stdout)
    assert found["numel"] > 10**12
    assert found["seconds"] < 10, "partition, plans, programs and text"
    assert found["peak"] < 1 << 30, "with torch itself, and the model on the meta device"
    assert found["shards"] * 1024 - found["numel"] == found["padding"][1] < 1e-3 * found["numel"]
    assert found["last"] <= found["shards"]
    assert abs(found["states"][1] * 1024 / (14 * found["numel"]) - 1) < 1e-3
    assert [round(psi) for psi in found["psi"]] == [2, 3]
    assert all(steps > 128 for steps in found["steps"])
    assert "on 1,024 ranks" in found["text"]
