"""The tables of the ZeRO and ZeRO-Infinity papers, cell by cell, within one unit of the last digit as printed."""

from __future__ import annotations

import pytest

from zerokern.planner import Transformer, plan

ZERO_NUMELS = ("7.5B", "128B", "1T")
ZERO_STATES_GB = """
1     120    120    120     2048  2048  2048    16000  16000  16000
4     52.5   41.3   30      896   704   512     7000   5500   4000
16    35.6   21.6   7.5     608   368   128     4750   2875   1000
64    31.4   16.6   1.88    536   284   32      4187   2218   250
256   30.4   15.4   0.47    518   263   8       4046   2054   62.5
1024  30.1   15.1   0.12    513   257   2       4011   2013   15.6
"""
# trillions of parameters, layers, hidden / 1024, heads; then TiB of states, activations, checkpoints; then GiB of
# working states and working activations, these of batch 4
INFINITY = """
0.10    80   10  128   1.83     2.03   0.05  1.95    1.63
0.50    100  20  160   9.16     3.91   0.12  6.25    2.50
1.01    128  25  256   18.31    7.13   0.20  9.77    3.56
10.05   195  64  512   182.81   24.38  0.76  64.00   8.00
101.47  315  160 1024  1845.70  88.59  3.08  400.00  18.00
"""
MISPRINT = ("0.10", 3)  # the paper prints 1.95 where its own formula, 16 hidden² bytes, gives 1.56


def unit(cell: str) -> float:
    """What the last digit of a number counts."""
    return 10.0 ** -len(cell.partition(".")[2])


def zero_cells() -> list:
    cells = []
    for line in ZERO_STATES_GB.strip().splitlines():
        world, *row = line.split()
        for i, cell in enumerate(row):
            numel, stage = ZERO_NUMELS[i // 3], 1 + i % 3
            cells.append(pytest.param(numel, int(world), stage, cell, id=f"{numel}-{world}-{stage}"))
    return cells


@pytest.mark.parametrize("numel, world, stage, cell", zero_cells())
def test_zero_model_states(numel: str, world: int, stage: int, cell: str) -> None:
    """2 bytes of fp16 parameters, 2 of gradients, 12 of fp32 master and averages: our fp16 default is the paper's."""
    found = plan(numel, stage=stage, world=world, param_dtype="fp16").states / 1e9
    assert abs(found - float(cell)) <= unit(cell)


@pytest.mark.parametrize("stage, psi", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_communication(stage: int, psi: int) -> None:
    assert plan("1T", stage=stage, world=64).traffic.numel / 1e12 == pytest.approx(psi, rel=1e-8)


def test_a_trillion_parameters_fit_1024_gpus_of_32_gb() -> None:
    assert plan("1T", stage=3, world=1024, param_dtype="fp16").fits("v100")
    assert not plan("1T", stage=2, world=1024, param_dtype="fp16").fits("v100")


@pytest.mark.parametrize("line", INFINITY.strip().splitlines())
def test_infinity_memory(line: str) -> None:
    trillions, layers, hidden, heads, *cells = line.split()
    shape = {"layers": int(layers), "hidden": int(hidden) * 1024, "heads": int(heads), "seq": 1024}
    full, working = Transformer(batch=32, **shape), Transformer(batch=4, **shape)
    found = [
        full.states / 2**40,
        full.activations / 2**40,
        full.checkpoints / 2**40,
        full.working_states / 2**30,
        working.working_activations / 2**30,
    ]
    assert abs(full.numel / 1e12 - float(trillions)) <= unit(trillions)
    for i, (value, cell) in enumerate(zip(found, cells, strict=True)):
        if (trillions, i) == MISPRINT:
            assert value == 1.5625
        else:
            assert abs(value - float(cell)) <= unit(cell), (i, value, cell)


def test_checkpoints_further_apart() -> None:
    """Twice as far apart: half the checkpoints, and twice the activations between two of them."""
    shape = {"layers": 80, "hidden": 10240, "heads": 128, "batch": 4, "seq": 1024}
    near, far = Transformer(**shape), Transformer(**shape, ci=2)
    assert far.checkpoints * 2 == near.checkpoints
    assert far.working_activations == 2 * near.working_activations
    assert far.activations == near.activations
