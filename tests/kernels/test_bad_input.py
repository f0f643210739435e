"""Bad input: an error that names the argument, what was found and what is allowed, and nothing written."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kernel_cases import BLOCK
from tables import each, run_table
from torch import Tensor

from zerokern.core import native
from zerokern.core.errors import BackendError, KernelError
from zerokern.kernels import ops
from zerokern.kernels.cpu import UpdateTable

N = 300
BAD_NUMBERS = [math.nan, math.inf, -math.inf, -1.0]

Arguments = dict[str, object]


def adam_arguments() -> Arguments:
    return {
        "param": torch.ones(N),
        "grad": torch.ones(N),
        "exp_avg": torch.ones(N),
        "exp_avg_sq": torch.ones(N),
        "lr": 0.1,
        "step": 1,
    }


def int8_arguments() -> Arguments:
    scales = -(-N // BLOCK)
    return adam_arguments() | {
        "param": torch.ones(N, dtype=torch.bfloat16),
        "remainder": torch.zeros(N, dtype=torch.int16),
        "exp_avg": torch.ones(N, dtype=torch.int8),
        "exp_avg_sq": torch.ones(N, dtype=torch.uint8),
        "exp_avg_scale": torch.ones(scales),
        "exp_avg_sq_scale": torch.ones(scales),
    }


def other_arguments(op: str) -> Arguments:
    state = {"lion": "exp_avg", "adagrad": "state_sum", "sgd": "momentum_buffer"}[op]
    arguments: Arguments = {"param": torch.ones(N), "grad": torch.ones(N), state: torch.ones(N), "lr": 0.1}
    if op == "sgd":
        arguments["momentum"] = 0.9
    else:
        arguments["step"] = 1
    return arguments


def refused(
    op: str, arguments: Callable[[], Arguments], error: type[Exception] | tuple, words: tuple[str, ...]
) -> None:
    """The call raises, every word is in the message, and no tensor has changed."""
    given = arguments()
    before = {name: [t.clone() for t in tensors_in(value)] for name, value in given.items()}
    with pytest.raises(error) as caught:
        getattr(ops, op)(**given)
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    for name, copies in before.items():
        for tensor, copy in zip(tensors_in(given[name]), copies, strict=True):
            assert torch.equal(tensor, copy), f"{name} was written"


def tensors_in(value: object) -> list[Tensor]:
    """Those that can be compared: dense and on the CPU."""
    tensors = value if isinstance(value, list) else [value]
    return [t for t in tensors if isinstance(t, Tensor) and t.layout is torch.strided and t.device.type == "cpu"]


ADAM_TENSORS = ("param", "grad", "exp_avg", "exp_avg_sq")
F64, BF16 = torch.float64, torch.bfloat16


def of_adam(**wrong: object) -> Arguments:
    return adam_arguments() | wrong


def of_int8(**wrong: object) -> Arguments:
    return int8_arguments() | wrong


# A call that is refused: its op, its arguments, the error, and words of the message.
Refusal = tuple[str, Callable[[], Arguments], type[Exception] | tuple, tuple[str, ...]]


def wrong_tensors() -> list[Refusal]:
    rows: list[Refusal] = []
    for name in ADAM_TENSORS:
        for dtype in (F64, torch.int32, torch.complex64, torch.bool):
            wrong = torch.ones(N).to(dtype)
            rows.append(("adam", lambda n=name, t=wrong: of_adam(**{n: t}), TypeError, (name, str(dtype), "allowed")))
        shapes = {key: torch.ones(3, 100) for key in ADAM_TENSORS} | {name: torch.ones(100, 3).t()}
        for wrong, error, words in (
            ({name: torch.ones(N, device="meta")}, ValueError, ("meta", "allowed: cpu")),
            ({name: torch.ones(N, 2)[:, 0]}, ValueError, ("(2,)", "contiguous")),
            (shapes, ValueError, ("contiguous",)),
            ({name: torch.ones(1).expand(N)}, ValueError, ("contiguous",)),
            ({name: [[1.0] * N]}, TypeError, ("list", "allowed")),
        ):
            rows.append(("adam", lambda w=wrong: of_adam(**w), error, (name, *words)))
    for name, dtype in (
        ("remainder", torch.float32), ("remainder", torch.uint8), ("exp_avg", torch.uint8), ("exp_avg_sq", torch.int8),
        ("exp_avg_sq", torch.float32), ("exp_avg_scale", F64), ("exp_avg_sq_scale", BF16), ("out", torch.float32),
    ):  # fmt: skip
        wrong = torch.ones_like(int8_arguments().get(name, torch.ones(N)), dtype=dtype)
        rows.append(("adam", lambda n=name, t=wrong: of_int8(**{n: t}), TypeError, (name, str(dtype), "allowed")))
    good = of_int8(out=torch.ones(N, dtype=BF16))
    for name in ("grad", "exp_avg", "exp_avg_sq", "remainder", "exp_avg_scale", "exp_avg_sq_scale", "out"):
        numel = good[name].numel()
        longer = torch.ones(N + 1 if numel == N else 9, dtype=good[name].dtype)
        words = (name, str(longer.numel()), str(numel), "allowed")
        rows.append(("adam", lambda n=name, t=longer: good | {n: t}, ValueError, words))
    rows.append(("adam", lambda: of_adam(grad=torch.ones(N).to_sparse()), TypeError, ("grad", "sparse", "allowed")))
    return rows


def shared_memory_and_lists() -> list[Refusal]:
    rows: list[Refusal] = []
    for names in (("param", "grad"), ("param", "exp_avg"), ("exp_avg", "exp_avg_sq"), ("grad", "exp_avg_sq")):
        for shift in (0, 1, N - 1):
            memory = torch.ones(2 * N)
            both = {names[0]: memory[:N], names[1]: memory[shift : shift + N]}
            rows.append(("adam", lambda b=both: of_adam(**b), ValueError, (*names, "share memory", "allowed")))
    one = adam_arguments()
    two = {name: [one[name], torch.ones(N)] for name in ADAM_TENSORS} | {"param": [one["param"], one["param"]]}
    rows.append(("adam", lambda: one | two, ValueError, ("param[0]", "param[1]", "share memory")))
    three = {name: [torch.ones(N) for _ in range(3)] for name in ADAM_TENSORS}
    three["grad"][2] = torch.ones(N, dtype=F64)
    rows.append(("adam", lambda: of_adam(**three), TypeError, ("grad[2]", "float64")))  # a bad row changes no row
    for name in ("grad", "exp_avg", "exp_avg_sq"):
        lists = {key: [torch.ones(N)] * (1 if key == name else 2) for key in ADAM_TENSORS}
        rows.append(("adam", lambda x=lists: of_adam(**x), ValueError, (name, "1", "2", "allowed")))
    return rows


def numbers() -> list[Refusal]:
    of = {
        "adam": ("lr", "eps", "weight_decay", "beta1", "beta2"),
        "lion": ("lr", "weight_decay", "beta1", "beta2"),
        "adagrad": ("lr", "lr_decay", "eps", "weight_decay"),
        "sgd": ("lr", "momentum", "weight_decay"),
    }
    rows: list[Refusal] = []
    for op, names in of.items():
        good = adam_arguments() if op == "adam" else other_arguments(op)
        for name in names:
            for value in BAD_NUMBERS:
                words = (f"{name}={value!r}", "must be")
                rows.append((op, lambda g=good, n=name, v=value: g | {n: v}, ValueError, words))
    for name, value, error, says in (
        ("beta1", 1.0, ValueError, "[0, 1)"), ("beta2", 1.0, ValueError, "[0, 1)"),
        ("scale", math.nan, ValueError, "must be"), ("scale", math.inf, ValueError, "must be"),
        ("step", 0, ValueError, "must be"), ("step", -1, ValueError, "must be"),
        ("step", 1 << 63, ValueError, "must be"),
        ("lr", "0.1", TypeError, "must be"), ("lr", None, TypeError, "must be"), ("step", 1.5, TypeError, "must be"),
        ("decoupled", 1, TypeError, "must be"), ("beta1", None, TypeError, "must be"),
    ):  # fmt: skip
        rows.append(("adam", lambda n=name, v=value: of_adam(**{n: v}), error, (f"{name}={value!r}", says)))
    for seed in (-1, 1.5, "1"):
        wrong = {"param": torch.ones(N, dtype=BF16), "stochastic_seed": seed}
        words = (f"stochastic_seed={seed!r}", "must be")
        rows.append(("adam", lambda w=wrong: of_adam(**w), (TypeError, ValueError), words))
    return rows


def formats() -> list[Refusal]:
    """Those that do not fit together."""
    master, bf16 = torch.ones(N), torch.ones(N, dtype=BF16)
    no_momentum = other_arguments("sgd") | {"momentum_buffer": None}
    out = {"param": bf16, "master": master, "out": bf16.clone()}
    fp32 = ("param", "float32", "remainder", "bfloat16")
    return [
        ("adam", lambda: of_int8(master=master), ValueError, ("master", "remainder", "allowed")),
        ("adam", lambda: of_adam(master=master), TypeError, ("master", "float32", "allowed")),
        ("adam", lambda: of_int8(param=torch.ones(N)), TypeError, fp32),
        ("adam", lambda: of_int8(exp_avg_scale=None), ValueError, ("exp_avg_scale", "missing", "allowed")),
        ("adam", lambda: of_adam(**out), ValueError, ("out", "master")),
        ("adam", lambda: of_int8(stochastic_seed=1), ValueError, ("stochastic_seed=1", "remainder")),
        ("sgd", lambda: no_momentum, ValueError, ("momentum=0.9", "momentum_buffer")),
    ]


def other_ops() -> list[Refusal]:
    x, int8, bf16 = torch.ones(N), torch.ones(N, dtype=torch.int8), torch.ones(N, dtype=BF16)
    dst, memory, aligned = torch.zeros(N), torch.ones(2 * N), torch.ones(64)
    narrow, shifted = memory[:N].view(BF16)[:N], torch.ones(64 + 32)
    start = 1 + (-shifted.data_ptr() % 64) // 4
    codes, wide, odd = int8.to(torch.uint8), torch.ones(3), memory[1 : N + 1]
    rows: list[tuple[str, Arguments, type[Exception], tuple[str, ...]]] = [
        ("split", {"x": x, "master_format": "split4"}, ValueError, ("master_format='split4'", "split16", "split8")),
        ("encode_int8", {"x": x, "kind": "momentum"}, ValueError, ("kind='momentum'", "exp_avg")),
        ("decode_int8", {"codes": int8, "scale": x[:3], "kind": 3}, ValueError, ("kind=3", "exp_avg")),
        ("decode_int8", {"codes": int8, "scale": torch.ones(2)}, ValueError, ("scale", "2", "3")),
        ("decode_int8", {"codes": codes, "scale": wide}, TypeError, ("codes", "uint8", "int8")),
        ("encode_int8", {"x": x.half()}, TypeError, ("x", "float16", "float32")),
        ("split", {"x": torch.ones(N, 2)[:, 0], "master_format": "split16"}, ValueError, ("x", "contiguous")),
        ("join", {"hi": bf16, "remainder": bf16}, TypeError, ("remainder", "bfloat16", "int16")),
        ("join", {"hi": bf16, "remainder": int8[:5]}, ValueError, ("remainder", "5", str(N))),
        ("sumsq", {"tensors": [x, x.double()]}, TypeError, ("tensors[1]", "float64", "allowed")),
        ("sumsq", {"tensors": [x.to_sparse()]}, TypeError, ("tensors[0]", "sparse")),
        ("sumsq", {"tensors": [x.view(-1, 2)[:, 0]]}, ValueError, ("tensors[0]", "contiguous")),
        ("sumsq", {"tensors": [x], "impl": "cpu.mmx"}, BackendError, ("cpu.mmx", "cpu.scalar")),
        ("sumsq", {"tensors": torch._neg_view(torch.ones(3))}, ValueError, ("lazily negated view; ", "resolve_neg")),
        ("accumulate", {"dst": dst, "srcs": []}, ValueError, ("srcs", "empty", "allowed")),
        ("accumulate", {"dst": dst, "srcs": [x, x.half()]}, TypeError, ("srcs", "float16", "allowed")),
        ("accumulate", {"dst": dst, "srcs": [x[1:]]}, ValueError, ("srcs[0]", str(N - 1), str(N))),
        ("accumulate", {"dst": dst.int(), "srcs": [x]}, TypeError, ("dst", "int32", "allowed")),
        ("accumulate", {"dst": dst, "srcs": [x], "scale": math.nan}, ValueError, ("scale=nan", "must be")),
        ("accumulate", {"dst": dst, "srcs": [x], "add": 1}, TypeError, ("add=1", "must be")),
        ("accumulate", {"dst": memory[:N], "srcs": [odd]}, ValueError, ("dst", "srcs[0]", "share memory")),
        ("cast", {"src": odd, "dst": memory[:N]}, ValueError, ("dst", "share memory")),
        ("cast", {"src": memory[:N], "dst": narrow}, ValueError, ("dst", "share memory")),
        ("stream", {"reads": [aligned[:15]]}, ValueError, ("60", "multiple of 64")),
        ("stream", {"reads": [aligned, torch.ones(32)]}, ValueError, ("128", "256", "one size")),
        ("stream", {"reads": [aligned] * 9}, ValueError, ("9 reads", "at most 8")),
        ("stream", {"reads": [aligned], "updates": [aligned]}, ValueError, ("share memory",)),
        ("stream", {"writes": [shifted[start:][:64]]}, ValueError, ("writes[0]", "4 modulo 64", "aligned")),
    ]
    return [(op, lambda a=arguments: a, error, words) for op, arguments, error, words in rows]


TABLES = (wrong_tensors, shared_memory_and_lists, numbers, formats, other_ops)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_refusals_name_what_is_wrong_and_write_nothing(table: Callable[[], list[Refusal]]) -> None:
    run_table(refused, ["op", "arguments", "error", "words"], table())


def test_neighbours_do_not_overlap() -> None:
    memory = torch.ones(4 * N)
    views = {name: memory[i * N : (i + 1) * N] for i, name in enumerate(ADAM_TENSORS)}
    ops.adam(**(adam_arguments() | views))
    assert memory[: N - 1].eq(memory[0]).all() and memory[0] < 1


def test_one_gradient_may_serve_two_parameters() -> None:
    grad = torch.ones(N)
    params = [torch.ones(N), torch.ones(N)]
    ops.sgd(params, [grad, grad], lr=0.5)
    assert params[0].eq(0.5).all() and params[1].eq(0.5).all()


def test_a_gradient_of_another_shape_is_refused_and_a_flat_one_is_not() -> None:
    param, exp_avg, exp_avg_sq = torch.ones(100, 3), torch.zeros(100, 3), torch.zeros(100, 3)
    with pytest.raises(ValueError, match=r"grad has shape \(3, 100\); param has \(100, 3\)"):
        ops.adam(param, torch.ones(3, 100), exp_avg, exp_avg_sq, lr=0.1, step=1)
    assert param.eq(1).all()
    ops.adam(param, torch.ones(300), exp_avg, exp_avg_sq, lr=0.1, step=1)
    assert param.ne(1).all()


# The C ABI, called as a program that is not ours may call it: what cannot be done is refused, and nothing is read.
MOST = 2**63 - 1


def test_null_pointers() -> None:
    library = native.library()
    assert library.zk_sumsq_partials(None, 3) < 0 == library.zk_sumsq_partials(None, 0)
    assert library.zk_crc32c(7, None, 1 << 40) == 7


@each("first", [MOST, MOST - 128 - 2])
def test_a_first_element_beyond_what_can_be_counted(first: int) -> None:
    param, grad = torch.ones(3), torch.ones(3)
    table = UpdateTable(1, 1)
    formats = {"grad_dtype": torch.float32, "param_dtype": torch.float32, "master_format": "fp32"}
    table.set_group(0, {"lr": 0.5}, algorithm="sgd", state_format="none", **formats)
    table.set_row(0, group=0, numel=3, master=param.data_ptr(), grad=grad.data_ptr(), first=first)
    with pytest.raises(KernelError, match="0"):
        table.run()
    assert param.eq(1.0).all()
