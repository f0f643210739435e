"""All mutants."""

from __future__ import annotations

import of_checkpoint
import of_deltas
import of_held_state
import of_io
import of_kernels
import of_matrices_and_places
import of_memory
import of_optim
import of_ranks
import of_schedule
import of_zero
from mutant import Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (
    *of_kernels.MUTANTS,
    *of_memory.MUTANTS,
    *of_io.MUTANTS,
    *of_ranks.MUTANTS,
    *of_schedule.MUTANTS,
    *of_zero.MUTANTS,
    *of_optim.MUTANTS,
    *of_matrices_and_places.MUTANTS,
    *of_held_state.MUTANTS,
    *of_checkpoint.MUTANTS,
    *of_deltas.MUTANTS,
)
