"""The sections, one file each. A module has `run(desk)`, and `warmers(settings)` where kernels are compiled first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """A part that runs alone. `seconds` is its share of a whole run, `least` what makes it worth starting.

    Sections that are `timed` have the machine for themselves; the others run side by side before them. `gpus` is how
    many it needs: where there are fewer, it is skipped and named.
    """

    name: str
    seconds: float
    least: float
    what: str
    timed: bool = True
    gpus: int = 1


WITHIN_S = 540.0  # a machine that is lent for ten minutes a command still has time to copy the results
BUILD_S = 45.0  # of those, for compiling the library
# in order of value, because the last ones are those that find no time
SECTIONS = (
    Section("tests", 100, 20, "pytest -m gpu on the installed package, kernels first", timed=False),
    Section("sanitize", 80, 20, "compute-sanitizer memcheck and racecheck on a small case", timed=False),
    Section("ranks", 40, 15, "two ranks on two GPUs: stages 0 to 3 against DDP and FSDP2", gpus=2),
    Section("optim", 25, 8, "zk.AdamW on fp32 tensors against torch.optim.AdamW(fused=True)"),
    Section("flatten", 20, 8, "lists into buckets and back, against torch.cat, _foreach_copy_ and _chunk_cat"),
    Section("copies", 15, 6, "large spans to and from pinned host memory, one way and both at once"),
    Section("offload", 85, 40, "a GPT of 1B with its state on the host: every schedule, and what others offload with"),
    Section("zero", 50, 15, "ZeRO stages 0 to 3 through NCCL on one rank; at 1B beside FSDP2"),
    Section("eight", 80, 40, "8B parameters on one GPU and its host, exact"),
    Section("mixed", 35, 12, "the mixed step against torch fused with its casts and torch.compile of the whole step"),
    Section("batch", 7, 3, "2,000 uneven tensors to and from pinned host memory: one batch, a loop, the link"),
    Section("spans", 20, 8, "lists by size and count: ferry and flatten against copy engine, batch call and torch"),
    Section("step1b", 12, 6, "the exact step of 1B parameters"),
    Section("update", 30, 12, "every update format on one flat span, against the copy bandwidth"),
    Section("eightbit", 15, 5, "int8 states with split8 against the 8-bit optimizers that are installed"),
)
# each is a run of its own: a run of everything does without them
ALONE = (
    Section("ops", 60, 6, "sum of squares, cast and accumulate against torch's own"),
    Section("sweep", 120, 10, "launch configurations of the update kernels: which is the best per format"),
    Section("offload7b", 240, 60, "a GPT of 7B with its state on the host, each schedule in a process", timed=False),
    Section("offloadmax", 240, 60, "the largest model that trains on one GPU and its host", timed=False),
    Section("infinity", 240, 60, "models whose parameters rest on the host and on the disk", timed=False),
)
NAMES = ("build", *(section.name for section in (*SECTIONS, *ALONE)))


def section(name: str) -> Section:
    """
    >>> section("update").timed
    True
    """
    return next(one for one in (*SECTIONS, *ALONE) if one.name == name)
