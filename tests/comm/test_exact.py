"""What every transport must return, to the bit: the fake world's plain loops are the definition."""

from __future__ import annotations

import torch
from comm_cases import REDUCTIONS, every_operation, many_at_once, values
from fake_world import FakeWorld
from ranks import run_ranks
from tables import each

from zerokern.comm import group_on


def over_gloo(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    group = group_on()
    return every_operation(group), many_at_once(group)


def same_bits(real: list[list[torch.Tensor]], fake: list[list[torch.Tensor]]) -> None:
    for rank, (ours, theirs) in enumerate(zip(real, fake, strict=True)):
        assert len(ours) == len(theirs)
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert one.dtype == other.dtype, (rank, i)
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (rank, i)


def test_gloo_returns_the_bits_of_the_slow_twin() -> None:
    real = run_ranks(3, over_gloo)
    same_bits([one for one, _ in real], FakeWorld(3).run(every_operation))
    same_bits([many for _, many in real], FakeWorld(3).run(many_at_once))


def test_one_rank_returns_the_bits_of_the_slow_twin() -> None:
    same_bits([every_operation(group_on())], FakeWorld(1).run(every_operation))
    same_bits([many_at_once(group_on())], FakeWorld(1).run(many_at_once))


@each("case", REDUCTIONS)
def test_the_slow_twin_is_no_further_from_float64_than_rounding_explains(case) -> None:
    """W additions and products in fp32, then one rounding to the target's dtype."""
    for rank, out in enumerate(FakeWorld(3).run(case.run)):
        parts = [values(r, 3 * case.span, case.source)[rank * case.span : (rank + 1) * case.span] for r in range(3)]
        exact, size = torch.zeros(case.span, dtype=torch.float64), torch.zeros(case.span, dtype=torch.float64)
        if case.add:
            parts = [values(rank, case.span, case.target, salt=1).double() / case.scale, *parts]
        for part in parts:
            exact += case.scale * part.double()
            size += (case.scale * part.double()).abs()
        bound = 8 * 2.0**-24 * size + torch.finfo(case.target).eps * exact.abs() + torch.finfo(case.target).tiny
        assert ((out.double() - exact).abs() <= bound).all()


def test_another_order_of_the_sum_has_other_bits() -> None:
    """The numbers of these tests would show it."""
    a, b, c = (values(rank, 1000, torch.float32) for rank in range(3))
    assert not torch.equal((a + b) + c, (c + b) + a)
