"""What is known of cells that are wrong: the cause, shown by a few lines without an adapter, or why it is in doubt.

A wrong cell of another library counts as wrong when a cause here says so, and is `unclear` until then: its adapter
may be at fault. Evidence lies in `evidence/`; each file runs alone, on two ranks that it starts itself."""

from __future__ import annotations

import dataclasses

from .judge import UNCLEAR, WRONG
from .libraries import LIBRARIES


@dataclasses.dataclass(frozen=True)
class Cause:
    """`libraries` and `programs` are the cells; `says` is what happens, `evidence` the file that shows it."""

    libraries: tuple[str, ...]
    programs: tuple[str, ...]
    says: str
    evidence: str = ""
    is_unclear: bool = False


ZERO_1_2 = ("deepspeed-1", "deepspeed-2")
ZERO = (*ZERO_1_2, "deepspeed-3")

UNUSED_BY_ALL = (
    "unused_parameters_and_a_block",
    "a_depth_that_grows",
    "each_layer_learns_from_its_own_loss",
    "frozen_and_thawed_by_turns",
)
UNUSED = (
    "A parameter that got no gradient on any rank is updated as if its gradient were zero: weight decay and momentum "
    "move it, where torch.optim leaves it as it is. `ignore_unused_parameters` is true by default."
)

CAUSES = (
    Cause(
        ("ddp", "torchao", "bitsandbytes", "flashoptim", "dion"),
        ("two_backward_passes_of_one_graph", "one_loss_passed_back_twice"),
        "Two backward passes of one forward are not averaged, and the ranks' weights part ways.",
        "ddp_backward_twice.py",
    ),
    Cause(
        ZERO,
        UNUSED_BY_ALL,
        f"{UNUSED} Plain torch with gradients of zero there has DeepSpeed's numbers.",
        "deepspeed_unused.py",
    ),
    Cause(ZERO_1_2, ("blocks_in_another_order_each_step", "a_penalty_alone"), UNUSED, "deepspeed_unused.py"),
    Cause(
        ("deepspeed-3",),
        ("blocks_in_another_order_each_step", "accumulation_over_parts_of_the_model"),
        "A parameter that a step's first pass leaves out keeps the gradient of the step before: it is applied again, "
        "or a later pass is added to it.",
        "deepspeed_stale.py",
    ),
    Cause(
        ZERO_1_2,
        ("experts_that_ranks_choose",),
        "Ranks give gradients to different parameters: one of them is given the gradients of both, the other none.",
        "deepspeed_ranks_differ.py",
    ),
    Cause(
        ("deepspeed-3",),
        ("an_adversarial_input",),
        "A gradient of the input by `torch.autograd.grad` counts as a pass, so that the gradient of the step before is "
        "kept, and the next pass is added to it.",
        "deepspeed_grad_of_input.py",
    ),
    Cause(
        ("deepspeed-2",),
        ("blocks_that_ranks_run_in_another_order",),
        "Gradients are reduced in the order in which they are made. Where that differs between ranks, those of one "
        "block are averaged with those of another.",
        "deepspeed_order.py",
    ),
    Cause(
        ("flashoptim",),
        ("nets_in_a_net",),
        "A scalar is off by three roundings, a tenth more than it may be. On equal gradients of one rank its AdamW is "
        "off from torch's by twice that: it adds in another order.",
        is_unclear=True,
    ),
    Cause(
        ("fsdp2", "dion-fsdp2"),
        ("a_hook_on_a_parameter", "a_hook_on_a_parameter_of_a_block"),
        "A hook on a parameter is never called, whether it was registered before `fully_shard` or after it.",
        "fsdp2_hook.py",
    ),
)


def cause_of(library: str, program: str) -> Cause | None:
    return next((one for one in CAUSES if library in one.libraries and program in one.programs), None)


def confirmed(library: str, program: str, verdict: str, why: str) -> tuple[str, str]:
    """The verdict, where wrong is in doubt `unclear`."""
    if verdict != WRONG or library not in LIBRARIES or library.startswith("zerokern"):
        return verdict, why
    cause = cause_of(library, program)
    if cause is None:
        return UNCLEAR, f"{why}; nobody has looked at it by hand"
    return (UNCLEAR, f"{why}; {cause.says}") if cause.is_unclear else (WRONG, why)
