"""Builds the communication of a step as a program, in order, and sums up what it moves between ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zerokern.core.units import scratch_numel
from zerokern.planner.amounts import gigabytes
from zerokern.planner.model import Buckets, BucketSize
from zerokern.planner.recipe import Arrangement, Recipe
from zerokern.schedule import Op, Ref, StepProgram
from zerokern.schedule.passes import ROOT, step_of
from zerokern.zero.partition import shards_parameters, shards_state

__all__ = ["Volume", "all_reduced", "between_ranks", "line_of", "scratch_nbytes", "traffic_of"]

_ROOT = "root"
_MOVES = ("Gather", "Reduce", "Publish")


def line_of(op: Op) -> str:
    """Formats one op as a plan shows it.

    >>> print(line_of(Op("Gather", "blocks.0", "net", nbytes=2_000_000)))
    Gather    blocks.0                  0.00200 GB
    """
    moved = f" {gigabytes(op.nbytes):>10} GB" if op.nbytes else ""
    return f"{op.verb:<9} {op.what:<22}{moved}".rstrip()


@dataclass(frozen=True)
class Volume:
    """The volume of a step between ranks, in elements and bytes of whole buckets: what the papers count in Ψ."""

    world: int
    reduced_numel: int
    reduced_nbytes: int
    gathered_numel: int
    gathered_nbytes: int
    exchanged_nbytes: int = 0
    """what a rank sends beside: of matrices that Muon updates whole, of which ranks have parts (stage 3)"""

    @property
    def numel(self) -> int:
        return self.reduced_numel + self.gathered_numel

    @property
    def nbytes(self) -> int:
        return self.reduced_nbytes + self.gathered_nbytes

    @property
    def sent_nbytes(self) -> int:
        """Bytes that one rank sends: all of each bucket but its own shard, and what is exchanged."""
        return self.nbytes // self.world * (self.world - 1) + self.exchanged_nbytes


def traffic_of(program: StepProgram, world: int, exchanged_nbytes: int = 0) -> Volume:
    """Sums the traffic of a program. `exchanged_nbytes`: as of a `Volume`.

    >>> reduce, publish = Op("Reduce", "bucket 0", "net", (), 8, 4), Op("Publish", "bucket 0", "net", (), 8, 4)
    >>> traffic_of(StepProgram("step", (reduce, publish)), 2)
    Volume(world=2, reduced_numel=4, reduced_nbytes=8, gathered_numel=4, gathered_nbytes=8, exchanged_nbytes=0)
    """
    moved = [op for op in program.ops if op.verb in _MOVES]
    reduced = [op for op in moved if op.verb == "Reduce"]
    gathered = [op for op in moved if op.verb != "Reduce"]
    return Volume(
        world,
        sum(op.numel for op in reduced),
        sum(op.nbytes for op in reduced),
        sum(op.numel for op in gathered),
        sum(op.nbytes for op in gathered),
        exchanged_nbytes,
    )


def all_reduced(amount: int, size: int) -> int:
    """Returns what each of `size` ranks sends for a reduce-scatter and an all-gather.

    >>> all_reduced(128, 2), all_reduced(128, 4)
    (128, 192)
    """
    return 2 * (size - 1) * -(-amount // size)


def scratch_nbytes(largest: int, stage: int, settings: Arrangement) -> int:
    """Returns the scratch memory that spans of other ranks are received into, for the largest bucket.

    >>> [scratch_nbytes(1024, stage, Arrangement(2, "cpu", 1, 1, False, replicate=2)) for stage in (0, 1)]
    [512, 768]
    """
    if shards_state(stage):
        return sum(scratch_numel(largest, settings.world, settings.replicate))
    return max(scratch_numel(largest, 1, size)[1] for size in (settings.world, settings.replicate))


def between_ranks(buckets: Buckets, recipe: Recipe, stage: int, settings: Arrangement) -> StepProgram:
    """Builds the communication of one optimizer step: every micro-batch is reduced, or, under `zk.no_sync`, the last.

    Compute comes after the gathers of its parameters; a prefetch comes after the compute that it overlaps with.
    """
    step = _Step(buckets, recipe)
    for number in range(settings.accumulate):
        reduces = not settings.no_sync or number == settings.accumulate - 1
        if settings.pp > 1 and not recipe.rests:  # a pipeline stage stays unsharded for the whole step
            step.whole(reduces, gathers=() if number else ("Forward",))
        elif buckets.in_units:
            step.by_units(reduces)
        else:
            step.whole(reduces)
    if buckets.trained and recipe.optimizer != "none":
        step.update("device" if recipe.tier == "device" else "cpu")
    return StepProgram(f"stage {stage}", tuple(step.in_turn()))


class _Step:
    """The ops of a step, added one by one."""

    def __init__(self, buckets: Buckets, recipe: Recipe) -> None:
        self.buckets, self.loads, self.recipe, self.world = buckets, buckets.sizes, recipe, buckets.world
        self.shards_state, self.shards_parameters = shards_state(buckets.stage), shards_parameters(buckets.stage)
        self.ops: list[Op] = []
        self._turns: Counter[tuple[str, str]] = Counter()
        self._computed: list[int] = []  # the last Forward or Backward
        self._gathered: dict[str, int] = {}  # what is unsharded, by its last Gather
        self._reduced: list[int] = []

    def add(self, verb: str, what: str, lane: str, after: Iterable[int], nbytes: int = 0, numel: int = 0) -> int:
        turn = self._turns[verb, what]
        self._turns[verb, what] += 1
        refs = tuple(Ref(index) for index in sorted(set(after)))
        self.ops.append(Op(verb, what, lane, refs, nbytes, numel, turn=turn))
        return len(self.ops) - 1

    def compute(self, verb: str, what: str, reads: Iterable[str]) -> None:
        there = [self._gathered[read] for read in reads if read in self._gathered]
        self._computed = [self.add(verb, what, "device", [*self._computed, *there])]

    def update(self, lane: str) -> None:
        whose = "own shard" if self.shards_state else "everything"
        step = self.add("Step", whose, lane, [*self._computed, *self._reduced])
        if self.shards_state and not self.shards_parameters and self.world > 1:
            for number, load in enumerate(self.loads):
                if load.trainable:
                    self.add("Publish", f"bucket {number}", "net", [step], load.nbytes, load.padded_numel)

    def in_turn(self) -> Iterator[Op]:
        """Yields the ops; those without a dependency in this step wait for the update of the step before."""
        ends = [index for index, op in enumerate(self.ops) if op.verb == "Publish"]
        ends = ends or [index for index, op in enumerate(self.ops) if op.verb == "Step"] or self._computed
        updated = tuple(Ref(index, back=1) for index in ends)
        for op in self.ops:
            yield op if op.after else op._replace(after=updated)

    def whole(self, reduces: bool, gathers: Sequence[str] = ("Forward", "Backward")) -> None:
        """Adds forward and backward of a model without units. The last bucket's gradients come first."""
        for verb in ("Forward", "Backward"):
            if verb in gathers and self.shards_parameters and self.world > 1:
                for number, load in enumerate(self.loads):
                    self._gather(f"bucket {number}", [load])
            self.compute(verb, "model", self._gathered)
        for number, load in reversed(list(enumerate(self.loads))):
            if load.trainable and self.world > 1 and reduces:
                op = self._reduce(f"bucket {number}", load)
                if not self.shards_state:
                    wire = self.ops[op]
                    what = f"bucket {number}, gradients"
                    self._reduced.append(self.add("Gather", what, "net", [op], wire.nbytes, wire.numel))

    def by_units(self, reduces: bool) -> None:
        """Adds forward and backward of stage 3: a unit is unsharded while it computes, the next one is prefetched."""
        names, of_unit = self.buckets.model.units, {loads[0].unit: loads for loads in self.buckets.by_unit}
        nbytes = [sum(load.nbytes for load in of_unit.get(unit, ())) for unit in range(len(names))]
        for verb, unit in step_of([unit for unit in of_unit if unit != ROOT], nbytes):
            name, loads = names[unit] or _ROOT, of_unit.get(unit, [])
            if verb in ("Forward", "Backward"):
                self.compute(verb, name, self._gathered if unit == ROOT else (_ROOT, name))
            elif self.world == 1 or not loads:
                continue
            elif verb == "Gather":
                self._gather(name, loads)
            elif verb == "Release":
                self.add("Release", name, "device", self._computed)
                del self._gathered[name]
            elif reduces:
                for load in loads:
                    if load.trainable:
                        self._reduce(name, load)

    def _gather(self, what: str, loads: Sequence[BucketSize]) -> None:
        nbytes, numel = sum(load.nbytes for load in loads), sum(load.padded_numel for load in loads)
        self._gathered[what] = self.add("Gather", what, "net", self._computed, nbytes, numel)

    def _reduce(self, what: str, load: BucketSize) -> int:
        nbytes = load.padded_numel * self.recipe.wire_itemsize(load.dtype)
        self._reduced.append(self.add("Reduce", what, "net", self._computed, nbytes, load.padded_numel))
        return self._reduced[-1]
