"""One training of a size that needs the machine for itself: `python -m bench.offload.case CASE`.

It tells what happens as lines of JSON and waits for an answer before it ends, so that whoever started it can read what
the system says of this process, from outside.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from zerokern.examples.model import VOCABULARY, Shape

from . import device

WARM = Shape(layers=2, width=64, context=32)
COMPUTE = "compute only"


@dataclass(frozen=True)
class Case:
    """Who trains what, and how long: for each number of tokens so many steps, the first of which is not timed."""

    name: str
    form: str
    layers: int
    width: int
    context: int
    tokens: tuple[int, ...]
    steps: int
    on: str = "cuda"
    words: int = VOCABULARY

    @property
    def shape(self) -> Shape:
        return Shape(self.layers, self.width, self.context)

    @property
    def numel(self) -> int:
        return self.shape.numel + (self.words - VOCABULARY) * self.width

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """
        >>> case = Case("zk sync", "exact", 2, 64, 32, (64, 128), 3)
        >>> Case.from_json(case.to_json()) == case
        True
        """
        fields = json.loads(text)
        return cls(**{**fields, "tokens": tuple(fields["tokens"])})


Make = Callable[[device.Stage, Any], device.Trainer]


def tell(**message: object) -> None:
    print(json.dumps(message), flush=True)


def ask(**message: object) -> None:
    """Tells, and waits until that was read and answered."""
    tell(**message)
    sys.stdin.readline()


def trainer(stage: device.Stage, case: Case) -> device.Trainer:
    return device.compute_only(stage) if case.name == COMPUTE else device.ours(stage, case.name, case.form)


def train(case: Case, stage: device.Stage, trainer: Make) -> None:
    made = trainer(stage, case)
    for tokens in case.tokens:
        try:
            _train(made, stage, tokens, case.steps)
        except torch.OutOfMemoryError as error:
            tell(tokens=tokens, failed=str(error).splitlines()[0])


def _train(made: device.Trainer, stage: device.Stage, tokens: int, steps: int) -> None:
    batch = stage.batch(tokens)
    losses = [made.step(*batch)]
    stage.synchronize()
    started = time.perf_counter()
    for _ in range(steps - 1):
        losses.append(made.step(*batch))
    stage.synchronize()
    seconds = (time.perf_counter() - started) / max(1, steps - 1)
    made.settle()
    tell(tokens=tokens, seconds=seconds, losses=[loss.item() for loss in losses])


def main(text: str, case_of: Callable[[str], Case] = Case.from_json, trainer: Make = trainer) -> None:
    case = case_of(text)
    where = torch.device(case.on)
    # code, context and threads of libraries count for nobody
    small = {"layers": WARM.layers, "width": WARM.width, "context": WARM.context, "words": VOCABULARY}
    warm = dataclasses.replace(case, **small)
    stage = device.Stage(where, WARM)
    made = trainer(stage, warm)
    made.step(*stage.batch(WARM.context))
    made.settle()
    del made
    ask(ready=case.numel)
    train(case, device.Stage(where, case.shape, words=case.words), trainer)
    ask(ended=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
