"""The sections, one file each. A module has `run(desk)`, and `warmers(settings)` where kernels are compiled first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """A part that runs alone. `seconds` is its share of a whole run, `least` what makes it worth starting.

    Sections that are `timed` have the machine for themselves; the others run side by side before them.
    """

    name: str
    seconds: float
    least: float
    what: str
    timed: bool = True


SECTIONS = (
    Section("tests", 125, 20, "pytest -m gpu on the installed package", timed=False),
    Section("sanitize", 125, 20, "compute-sanitizer memcheck and racecheck on a small case", timed=False),
    Section("update", 70, 12, "every update format on one flat span, against the copy bandwidth"),
    Section("optim", 35, 10, "zk.AdamW on fp32 tensors against torch.optim.AdamW(fused=True)"),
    Section("mixed", 60, 15, "the mixed step against torch fused with its casts and torch.compile of the whole step"),
    Section("flatten", 20, 8, "lists into buckets and back, against torch.cat, _foreach_copy_ and _chunk_cat"),
    Section("copies", 20, 8, "large spans to and from pinned host memory, one way and both at once"),
    Section("batch", 20, 8, "many small tensors into pinned host memory and back, as one batch of copies"),
    Section("step1b", 20, 8, "the exact step of 1B parameters"),
    Section("zero", 40, 15, "ZeRO stages 0 to 3 on one rank against the same steps without zk.shard"),
    Section("ops", 15, 6, "sum of squares, cast and accumulate against torch's own"),
    Section("eightbit", 25, 8, "int8 states with split8 against the 8-bit optimizers that are installed"),
    Section("sweep", 35, 10, "launch configurations of the update kernels: which is the best per format"),
)
# each is a run of its own, of nearly ten minutes: a run of everything does without them
ALONE = (
    Section("offload", 240, 60, "a GPT of 1B with its state on the host: every schedule, and what others offload with"),
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
