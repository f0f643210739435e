"""The sections, one file each. A module has `run(desk)`, and `warmers(settings)` where kernels are compiled first."""

from __future__ import annotations

from dataclasses import dataclass

KERNELS = ("zerokern/kernels", "cuda")
STEPS = (*KERNELS, "zerokern/optim", "zerokern/memory")
LIBRARY = ("zerokern", "cuda", "cpu")
TESTED = (*LIBRARY, "tests")


@dataclass(frozen=True)
class Section:
    """A part that runs alone. `seconds` is what it wants, `least` what makes it worth starting.

    A section that is `timed` has the machine for itself; beside the others kernels are compiled. `gpus` is how many it
    needs: where there are fewer, it is skipped and named. `of`: the folders whose sources its figures are of; where a
    kept result of the same GPU has them of the same sources, it is skipped.
    """

    name: str
    seconds: float
    least: float
    what: str
    timed: bool = True
    gpus: int = 1
    of: tuple[str, ...] = LIBRARY


WITHIN_S = 540.0  # a machine that is lent for ten minutes a command still has time to copy the results
BUILD_S = 45.0  # of those, for compiling the library
# in order of value: first what nobody knows yet, then what was measured in part
SECTIONS = (
    Section("ranks", 120, 15, "two ranks on two GPUs: stages 0 to 3 against DDP and FSDP2", gpus=2),
    Section("copies", 30, 10, "the host's memory, and large spans to and from it, one way and both at once"),
    Section("tests", 90, 20, "pytest -m gpu on the installed package, what never passed first", timed=False, of=TESTED),
    Section("sweep", 100, 20, "launch configurations of the update kernels, 5 int8 and bf16 formats", of=KERNELS),
    Section("stage3", 90, 25, "152M at stage 3 under the profiler, beside FSDP2 in both modes"),
    Section("exact", 180, 60, "1B exact at 16k tokens: resident, overlap, Delayed, a budget, update='device'; bits"),
    Section("muon", 70, 15, "zk.Muon against dion's or torch's"),
    Section("graphs", 60, 20, "a whole step under zk.shard as a CUDA graph, stages 0 to 3: bits and time"),
    Section("keep", 60, 20, "keep= to the host and to the disk: bits and time"),
    Section("infinity", 300, 60, "models whose parameters rest on the host and on the disk", timed=False),
    Section("eight", 180, 40, "8B parameters with 128k words on one GPU and its host, exact"),
    Section("update", 90, 12, "every update format on one flat span, against the copy bandwidth", of=KERNELS),
    Section("eightbit", 30, 5, "int8 states with split8 against the 8-bit optimizers that are installed", of=STEPS),
    Section("offload", 140, 40, "a GPT of 1B with its state on the host: all schedules, and what others offload with"),
    Section("zero", 75, 15, "ZeRO stages 0 to 3 through NCCL on one rank; at 1B beside FSDP2 in both modes"),
    Section("spans", 45, 8, "lists by size and count: ferry and flatten against copy engine, batch call and torch"),
    Section("flatten", 20, 8, "lists into buckets and back, against torch.cat, _foreach_copy_ and _chunk_cat"),
    Section("mixed", 35, 12, "the mixed step against torch fused with its casts and torch.compile", of=STEPS),
    Section("optim", 25, 8, "zk.AdamW on fp32 tensors against torch.optim.AdamW(fused=True)", of=STEPS),
    Section("batch", 10, 3, "2,000 uneven tensors to and from pinned host memory: one batch, a loop, the link"),
    Section("step1b", 12, 6, "the exact step of 1B parameters", of=STEPS),
    Section("ops", 60, 6, "sum of squares, cast and accumulate against torch's own", of=KERNELS),
    Section("sanitize", 80, 20, "compute-sanitizer memcheck and racecheck on a small case", timed=False),
    Section("soak", 900, 30, "training with overlap for as long as there is time: memory, losses, skipped steps"),
)
# each is a run of its own: a run of everything does without them
ALONE = (
    Section("offload7b", 240, 60, "a GPT of 7B with its state on the host, each schedule in a process", timed=False),
    Section("offloadmax", 240, 60, "the largest model that trains on one GPU and its host", timed=False),
)
# their figures are bounded by the bandwidth of the host's memory, which each of them measures
OFFLOADING = ("copies", "exact", "keep", "infinity", "eight", "offload", "soak", "offload7b", "offloadmax")
NAMES = ("build", *(section.name for section in (*SECTIONS, *ALONE)))


def section(name: str) -> Section:
    """
    >>> section("update").timed
    True
    """
    return next(one for one in (*SECTIONS, *ALONE) if one.name == name)
