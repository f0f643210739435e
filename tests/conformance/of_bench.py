"""The programs of `zerokern bench right`, each a program of this suite: two runs, compared bit for bit, in every mode.

The bench holds libraries against plain torch within tolerances, at four stages and two tiers; here zerokern meets the
same programs in each mode of each stage, held against its own optimizers in plain torch, so that nothing may differ.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from small_programs import RANKS_DIFFER, Run, program
from torch import Tensor, nn

import zerokern as zk

training = import_module("zerokern.bench.right.training")
programs = import_module("zerokern.bench.right.programs")
library = import_module("zerokern.bench.right.libraries.zerokern")

SHARED = {  # by threads, which play ranks here: one stream of random numbers, one collector of garbage
    "dropout_seeded_alike",
    "objects_that_steps_leave_behind",
}
PASSES = {  # each pass is reduced by itself, and the sum of the reduced ones has another order
    "two_backward_passes_of_one_graph",
    "one_loss_passed_back_twice",
}
SELDOM = {"optimizers", "states", "issues"}  # kinds that vary what others do: slow ones, but for these
OFTEN = {
    "groups_with_and_without_decay",
    "a_rate_for_each_layer",
    "whole_parameters_read_each_step",
    "an_average_of_weights",
    "a_layer_begun_anew",
    "weights_clamped_after_each_step",
    "weights_put_back",
    "a_momentum_encoder",
    "saved_and_loaded_into_the_same_training",
    "a_fused_loss_beside_the_model",
    "a_block_that_one_rank_runs_thrice",
}
VARIATIONS = {  # of programs that `make test` has, here or beside this file
    "blocks_that_ranks_run_in_another_order",
    "experts_that_ranks_choose",
    "a_balance_loss_kept_by_each_layer",
    "a_frozen_front",
    "a_gradient_penalty",
    "two_forwards_one_backward",
    "a_forward_without_a_graph_as_target",
    "a_jacobian_of_the_input",
    "distillation_from_a_plain_teacher",
    "a_hook_on_a_parameter",
    "accumulation_with_clipping",
    "accumulation_of_batches_that_vary",
    "batches_that_differ_between_ranks",
    "two_models_by_turns",
    "a_forward_whose_loss_is_thrown_away",
    "gradients_clamped_before_the_step",
    "a_parametrized_weight_norm",
    "bf16_and_clipping",
    "bf16_and_accumulation",
    "two_forwards_of_recomputed_blocks",
    "one_block_recomputed_twice",
}
STAGE_3 = "stage 3, *"
REFUSED = {
    "a_block_that_one_rank_leaves_out": RANKS_DIFFER,
    "blocks_that_ranks_run_in_another_order": RANKS_DIFFER,
    "a_block_that_one_rank_runs_thrice": ((zk.ZerokernError,), ("rank 0 is in the backward", "for ever"), STAGE_3),
    "evaluation_of_another_amount_on_each_rank": ((zk.ZerokernError,), ("ranks differ",), STAGE_3),
    "reentrant_checkpoints": ((zk.ZerokernError,), ("use_reentrant=False",)),
}
STARTS_LATE = {"saved_and_resumed_anew"}  # Delayed is late at once after a load; what is written out for it begins anew


class OfRun(training.Training):  # type: ignore[misc,name-defined]
    """Trains as a `Run` of this suite does, be it plain torch or zerokern."""

    def __init__(self, run: Run, model: nn.Module, recipe: Any) -> None:
        self.run = run
        super().__init__(model, recipe)

    def begin(self) -> None:
        self.model = self.run.shard(self.module)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> Any:
        params = self.recipe.params_of(self.model)
        kind, told = library.rule(self.recipe)
        return self.run.optimizer(params, kind, **told) if params else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Without the cache of cast weights: it keeps leaves alone, and adds up the gradients of both uses in bf16."""
        if not self.recipe.narrow:
            return self.model(*args, **kwargs)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return self.model(*args, **kwargs).float()

    def backward(self, loss: Tensor, by: Callable[[Tensor], None] = Tensor.backward) -> None:
        with contextlib.nullcontext() if self.is_last else self.run.no_sync(self.model):
            self.run.backward(loss / self.recipe.accumulate, by)

    def apply(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full(self) -> dict[str, Tensor]:
        """What is read has to be the same as well."""
        with self.run.gathered(self.model):
            values = super().full()
        self.run.see(*values.values())
        return values

    def write(self, values: Mapping[str, Tensor]) -> None:
        self.optimizer.flush()
        with self.run.gathered(self.model, write=True):
            super().write(values)

    def save(self, folder: Path) -> None:
        """As copies of both states: files have tests of their own."""
        self.optimizer.flush()
        self.run.saved = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict()])  # type: ignore[attr-defined]

    def load(self, folder: Path) -> None:
        self.optimizer.flush()
        model, optimizer = self.run.saved  # type: ignore[attr-defined]
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class BenchRun(training.Run):  # type: ignore[misc,name-defined]
    """What a program of the bench is given: it asks the `Run` of this suite."""

    def __init__(self, run: Run) -> None:
        self.run, self.library = run, partial(OfRun, run)
        self.rank, self.size = run.rank, run.world.size
        self.begun: list[tuple[dict[str, Tensor], Any]] = []

    @cached_property
    def folder(self) -> Path:
        self.temporary = tempfile.TemporaryDirectory()
        return Path(self.temporary.name)

    def make(self, build: Callable[[], nn.Module]) -> nn.Module:
        return self.run.make(build)

    def see(self, what: str, *values: Any) -> None:
        self.run.see(*values)


def as_program(name: str) -> Callable[[Run], None]:
    def follow(run: Run) -> None:
        mine = BenchRun(run)
        programs.PROGRAMS[name].follow(mine)
        for _, one in mine.begun:
            run.see(*one.module.buffers())

    follow.__name__ = name
    return follow


for name in programs.PROGRAMS:
    if name not in SHARED:
        slow = name in VARIATIONS or (programs.PROGRAMS[name].kind in SELDOM and name not in OFTEN)
        settings = {"exact": name not in PASSES, "late": name not in STARTS_LATE, "slow": slow}
        program(**settings, refused=REFUSED.get(name))(as_program(name))
