"""The device table: every shape of a program gives the same bits, and the device decides what the host may not know."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import Case, Row, assert_same, make_rows, run_reference, same_bits
from tables import each, pairwise

pytest.importorskip("triton", reason="needs triton")

from zerokern.core.errors import BackendError
from zerokern.kernels import reference
from zerokern.kernels.reference_int8 import power, step_scalars, to_fp32
from zerokern.kernels.triton import sumsq
from zerokern.kernels.triton.backend import interpreted, refuse_before
from zerokern.kernels.triton.codecs import INTERPRETED
from zerokern.kernels.triton.table import Control, DeviceTable
from zerokern.kernels.triton.upload import tile_map
from zerokern.kernels.triton.variants import CANDIDATES, Config, Formats

CPU = torch.device("cpu")
HYPER = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs interpreted; test_gpu.py has the GPU's turn")


def adam_table(rows: list[Row], config: Config | None = None, state: str = "fp32", **values: object) -> DeviceTable:
    """One group of rows with a split16 master."""
    table = DeviceTable(CPU, len(rows), 1, config)
    kinds = {"grad_dtype": torch.bfloat16, "param_dtype": torch.bfloat16, "master_format": "split16"}
    table.set_group(0, {**HYPER, "decoupled": True, **values}, algorithm="adam", state_format=state, **kinds)
    for i, row in enumerate(rows):
        pointers = {name: tensor.data_ptr() for name, tensor in row.tensors.items()}
        table.set_row(i, group=0, numel=row["param"].numel(), **pointers)
    return table


def control(nparams: int, **values: object) -> Control:
    """A control of parameters that have made no step."""
    steps, increments = torch.zeros(nparams), torch.ones(nparams)
    return Control(steps, increments, [0], torch.zeros(4, dtype=torch.float64), **values)


@pairwise
@each("state", ["fp32", "int8"])
@each("config", CANDIDATES)
def test_every_shape_of_a_program_gives_the_bits_of_the_reference(config: Config, state: str) -> None:
    case = Case("bf16", state, "split16", "none")
    rows, expected = (make_rows("adam", case, (5, 1029, 5000)) for _ in range(2))
    run_reference("adam", expected, {**HYPER, "step": 4})
    adam_table(rows, config, state, step=4).run()
    assert_same(rows, expected)


def test_each_format_has_a_configuration_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sweep found best for one is not applied to the others."""
    groups, rows = (("int8", 17000), ("fp32", 9001)), []
    found = Config(4, 2, 4, 3)
    int8 = Formats("adam", torch.bfloat16, torch.bfloat16, "split16", "int8", None, False)
    monkeypatch.setattr(sumsq, "multiprocessors", lambda device: 1)
    for config, tiles in ((None, (5, 9)), ({int8: found}, (9, 9)), (Config(32, 4), (5, 3))):
        table, rows = DeviceTable(CPU, 2, 2, config), []
        for group, (state, numel) in enumerate(groups):
            case = Case("bf16", state, "split16", "none")
            row, expected = (make_rows("adam", case, (numel,)) for _ in range(2))
            kinds = {"grad_dtype": torch.bfloat16, "param_dtype": torch.bfloat16, "master_format": "split16"}
            table.set_group(
                group, {**HYPER, "decoupled": True, "step": 1}, algorithm="adam", state_format=state, **kinds
            )
            pointers = {name: tensor.data_ptr() for name, tensor in row[0].tensors.items()}
            table.set_row(group, group=group, numel=numel, **pointers)
            run_reference("adam", expected, {**HYPER, "step": 1})
            rows.append((row, expected))
        table.run()
        (launches,) = table._sent.launches.values()
        assert tuple(programs for _, _, programs, _ in launches.updates) == tiles
        for row, expected in rows:
            assert_same(row, expected)


def test_rows_that_run_by_themselves_have_the_bits_of_all_together() -> None:
    """Each range sends its tiles once, and the order is sent for all of them."""
    case = Case("bf16", "int8", "split16", "none")
    rows, expected = (make_rows("adam", case, (5, 1029, 300, 0, 700)) for _ in range(2))
    table = adam_table(rows, state="int8")
    for step in (1, 2):
        table.set_group(0, {**HYPER, "decoupled": True, "step": step}, algorithm="adam", state_format="int8",
                        grad_dtype=torch.bfloat16, param_dtype=torch.bfloat16, master_format="split16")  # fmt: skip
        for begin, end in ((2, 5), (0, 1), (1, 2)):
            table.run(begin=begin, end=end)
        run_reference("adam", expected, {**HYPER, "step": step})
        assert_same(rows, expected)
    assert len(table._sent.launches) == 3


def test_a_gradient_off_its_alignment_takes_the_other_path() -> None:
    case = Case("bf16", "fp32", "split16", "none")
    rows, expected = (make_rows("adam", case, (1024,)) for _ in range(2))
    table = adam_table(rows, step=2)
    table.run()
    assert table.columns["aligned"][0] == 1
    run_reference("adam", expected, {**HYPER, "step": 2})
    shifted = torch.empty(1025, dtype=torch.bfloat16)[1:].copy_(rows[0]["grad"])
    table.columns["grad"][0] = shifted.data_ptr()
    table.run()
    run_reference("adam", expected, {**HYPER, "step": 2})
    assert_same(rows, expected)


@pairwise
@each("step", [1, 2, 10, 999, 123_456, 2**24])
@each("lr, beta1, beta2", [(1e-3, 0.9, 0.999), (0.0, 0.9, 0.95), (1e-46, 0.0, 0.5), (3e8, 0.5, 0.0)])
def test_the_scalars_of_a_step_have_the_bits_of_the_reference(lr: float, beta1: float, beta2: float, step: int) -> None:
    rows = make_rows("adam", Case("bf16", "fp32", "split16", "none"), (1,))
    table = adam_table(rows, lr=lr, beta1=beta1, beta2=beta2, step=step)
    table.run()
    slope, floor = step_scalars(lr, beta1, beta2, HYPER["eps"], step)
    assert (table._constants[12].item(), table._constants[13].item()) == (slope, floor)
    assert table._constants[2].item() == to_fp32(lr * HYPER["weight_decay"])


def test_a_power_is_within_its_roundings_of_the_true_one() -> None:
    for step in (1, 2, 3, 1000, 10_000):
        assert power(0.999, step) == pytest.approx(0.999**step, rel=2 * step * 2.0**-53)


@each("dtype", [torch.float32, torch.float64])
def test_a_learning_rate_on_the_device_is_read_there(dtype: torch.dtype) -> None:
    case, rate = Case("bf16", "fp32", "split16", "none"), torch.tensor(0.25, dtype=dtype)
    rows, expected = (make_rows("adam", case, (300,)) for _ in range(2))
    table = adam_table(rows, lr=rate)
    for lr in (0.25, 0.5):
        rate.fill_(lr)
        table.run()
        run_reference("adam", expected, {**HYPER, "lr": lr, "step": 1})
    assert_same(rows, expected)


def test_steps_are_counted_on_the_device_unless_they_are_skipped() -> None:
    case = Case("bf16", "fp32", "split16", "none")
    rows, expected = (make_rows("adam", case, (130,)) for _ in range(2))
    table, found = adam_table(rows), torch.zeros(1)
    device = control(3, found_inf=found)
    device.increments[1] = 0.0
    for value, step in ((0.0, 1), (1.0, None), (0.0, 2)):
        found.fill_(value)
        table.run(control=device)
        if step:
            run_reference("adam", expected, {**HYPER, "step": step})
        assert_same(rows, expected)
    assert device.steps.tolist() == [2.0, 0.0, 2.0]
    assert device.outcome.tolist()[1:3] == [1.0, 0.0]


@each("sums", [[4.0, 12.0], [0.0], [math.inf], [math.nan], [1e300, 1e300]])
def test_the_clip_factor_is_that_of_the_cpu(sums: list[float]) -> None:
    case = Case("bf16", "fp32", "split16", "none")
    rows, expected = (make_rows("adam", case, (200,)) for _ in range(2))
    device = control(1, max_norm=0.5, sums=torch.tensor(sums, dtype=torch.float64), grad_scale=torch.tensor([8.0]))
    adam_table(rows).run(control=device)
    norm = math.sqrt(sum(sums)) / 8.0
    if math.isfinite(norm):
        run_reference("adam", expected, {**HYPER, "step": 1, "scale": 0.125 * min(1.0, 0.5 / (norm + 1e-6))})
        assert device.outcome[0].item() == norm
    assert device.outcome[2].item() == (not math.isfinite(norm))
    assert_same(rows, expected)


def test_what_has_not_changed_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from zerokern.kernels.triton import table as module

    sent = []
    for name in ("upload", "refresh"):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real, name=name: (sent.append(name), real(*args))[1])
    rows = make_rows("adam", Case("bf16", "fp32", "split16", "none"), (64,))
    table = adam_table(rows, step=1)
    table.run()
    assert sent == ["upload"] * 3  # the order, the tiles, the rows
    table.run()
    assert len(sent) == 3
    shifted = torch.empty(65, dtype=torch.bfloat16)[1:].copy_(rows[0]["grad"])
    table.columns["grad"][0] = shifted.data_ptr()
    table.run()
    assert sent[3:] == ["refresh"]


def test_a_run_without_a_control_forgets_the_last_one() -> None:
    case = Case("bf16", "fp32", "split16", "none")
    rows, expected = (make_rows("adam", case, (100,)) for _ in range(2))
    table = adam_table(rows, step=5)
    table.run(control=control(2))
    table.run()
    for step in (1, 5):
        run_reference("adam", expected, {**HYPER, "step": step})
    assert_same(rows, expected)


def test_a_control_has_a_witness_for_each_group() -> None:
    table = adam_table(make_rows("adam", Case("bf16", "fp32", "split16", "none"), (8,)))
    device = control(1)
    device.witnesses = []
    with pytest.raises(ValueError, match=r"witnesses=0: must be one for each of 1 groups"):
        table.run(control=device)
    assert not table.begun


@each(
    "values, message",
    [
        ({"step": 2**31}, r"step=2147483648: must be whole numbers up to 2147483647"),
        ({"lr": torch.tensor(0.5, dtype=torch.bfloat16)}, r"lr has dtype torch\.bfloat16; allowed: torch\.float32 or"),
        ({"lr": torch.ones(2)}, r"lr has 2 elements"),
    ],
)
def test_what_the_device_would_misread_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        adam_table([], **values)


def test_many_groups_are_prepared() -> None:
    case = Case("bf16", "fp32", "split16", "none")
    rows, expected = (make_rows("adam", case, (3,) * 40) for _ in range(2))
    table = DeviceTable(CPU, 40, 40)
    kinds = {"grad_dtype": torch.bfloat16, "param_dtype": torch.bfloat16, "master_format": "split16"}
    for i, row in enumerate(rows):
        values = {**HYPER, "lr": 0.001 * (i + 1), "step": i + 1}
        table.set_group(i, {**values, "decoupled": True}, algorithm="adam", state_format="fp32", **kinds)
        table.set_row(i, group=i, numel=3, **{name: tensor.data_ptr() for name, tensor in row.tensors.items()})
        run_reference("adam", expected[i : i + 1], values)
    table.run()
    assert_same(rows, expected)


def test_a_list_beyond_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the list='[\d,]+ tiles of 4 elements': must be at most 2,147,483,647"):
        tile_map([2**33], 4)
    assert tile_map([2**33], 1 << 20)[-1].tolist() == [0, 8191]


def test_an_old_gpu_is_named_and_what_runs_there() -> None:
    with pytest.raises(
        BackendError,
        match=r"Tesla V100 is sm_70, and the kernels need sm_80 or newer; what runs instead: impl='reference'",
    ):
        refuse_before((7, 0), "Tesla V100")


@each("off", [-2, -1, 0, 1, 2])
def test_decoding_is_right_whatever_the_reciprocal_is(off: int) -> None:
    """The one correction of `value_of_code`, with reciprocals up to two units in the last place off."""
    c = torch.arange(-127, 128).float()
    d = 254.0 - c.abs()
    r = ((torch.ones_like(d) / d).view(torch.int32) + off).view(torch.float32)
    q = c * r
    assert same_bits(reference_fma(reference_fma(-q, d, c), r, q), c / d)


def reference_fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    from zerokern.kernels.reference_int8 import fma

    return fma(a, b, c)


@each("off", [-1, 0, 1])
def test_a_quotient_is_rounded_to_nearest_whatever_the_reciprocal_is(off: int) -> None:
    scale = 1.0 + torch.rand(1 << 20)
    x = scale * torch.rand(1 << 20) ** torch.randint(1, 6, (1 << 20,))
    d = x + scale
    r = ((torch.ones_like(d) / d).view(torch.int32) + off).view(torch.float32)
    r = reference_fma(r, reference_fma(-d, r, torch.ones_like(d)), r)
    q = x * r
    assert same_bits(reference_fma(r, reference_fma(-q, d, x), q), x / d)


def test_these_tests_ran_interpreted() -> None:
    assert interpreted() and INTERPRETED.value
    assert reference.sqrt(torch.tensor([4.0])).item() == 2.0
