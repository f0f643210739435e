"""Bad input: an error that names the argument, what was found and what is allowed, and nothing written."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kernel_cases import BLOCK
from tables import each
from torch import Tensor

from zerokern.core.errors import BackendError
from zerokern.kernels import ops

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


def refused(op: Callable[..., object], arguments: Arguments, error: type[Exception] | tuple, *words: str) -> None:
    """The call raises, every word is in the message, and no tensor has changed."""
    before = {name: [t.clone() for t in tensors_in(value)] for name, value in arguments.items()}
    with pytest.raises(error) as caught:
        op(**arguments)
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    for name, copies in before.items():
        for tensor, copy in zip(tensors_in(arguments[name]), copies, strict=True):
            assert torch.equal(tensor, copy), f"{name} was written"


def tensors_in(value: object) -> list[Tensor]:
    """Those that can be compared: dense and on the CPU."""
    tensors = value if isinstance(value, list) else [value]
    return [t for t in tensors if isinstance(t, Tensor) and t.layout is torch.strided and t.device.type == "cpu"]


ADAM_TENSORS = ("param", "grad", "exp_avg", "exp_avg_sq")


@each("name", ADAM_TENSORS)
@each("dtype", [torch.float64, torch.int32, torch.complex64, torch.bool])
def test_wrong_dtype(name: str, dtype: torch.dtype) -> None:
    refused(ops.adam, adam_arguments() | {name: torch.ones(N).to(dtype)}, TypeError, name, str(dtype), "allowed")


@each(
    "name, dtype",
    [
        ("remainder", torch.float32),
        ("remainder", torch.uint8),
        ("exp_avg", torch.uint8),
        ("exp_avg_sq", torch.int8),
        ("exp_avg_sq", torch.float32),
        ("exp_avg_scale", torch.float64),
        ("exp_avg_sq_scale", torch.bfloat16),
        ("out", torch.float32),
    ],
)
def test_wrong_dtype_of_a_format(name: str, dtype: torch.dtype) -> None:
    arguments = int8_arguments()
    wrong = torch.ones_like(arguments.get(name, arguments["param"]), dtype=dtype)
    refused(ops.adam, arguments | {name: wrong}, TypeError, name, str(dtype), "allowed")


@each("name", ["grad", "exp_avg", "exp_avg_sq", "remainder", "exp_avg_scale", "exp_avg_sq_scale", "out"])
def test_wrong_shape(name: str) -> None:
    arguments = int8_arguments() | {"out": torch.ones(N, dtype=torch.bfloat16)}
    longer = torch.ones(N + 1 if arguments[name].numel() == N else 9, dtype=arguments[name].dtype)
    refused(
        ops.adam,
        arguments | {name: longer},
        ValueError,
        name,
        str(longer.numel()),
        str(arguments[name].numel()),
        "allowed",
    )


@each("name", ADAM_TENSORS)
def test_wrong_device(name: str) -> None:
    refused(ops.adam, adam_arguments() | {name: torch.ones(N, device="meta")}, ValueError, name, "meta", "allowed: cpu")


@each("name", ADAM_TENSORS)
def test_not_contiguous(name: str) -> None:
    refused(ops.adam, adam_arguments() | {name: torch.ones(N, 2)[:, 0]}, ValueError, name, "(2,)", "contiguous")
    transposed = {key: torch.ones(3, 100) for key in ADAM_TENSORS} | {name: torch.ones(100, 3).t()}
    refused(ops.adam, adam_arguments() | transposed, ValueError, name, "contiguous")


@each("name", ADAM_TENSORS)
def test_expanded(name: str) -> None:
    refused(ops.adam, adam_arguments() | {name: torch.ones(1).expand(N)}, ValueError, name, "contiguous")


def test_sparse_gradients() -> None:
    refused(ops.adam, adam_arguments() | {"grad": torch.ones(N).to_sparse()}, TypeError, "grad", "sparse", "allowed")


@each("name", ADAM_TENSORS)
def test_not_a_tensor(name: str) -> None:
    refused(ops.adam, adam_arguments() | {name: [[1.0] * N]}, TypeError, name, "list", "allowed")


@each("names", [("param", "grad"), ("param", "exp_avg"), ("exp_avg", "exp_avg_sq"), ("grad", "exp_avg_sq")])
@each("shift", [0, 1, N - 1])
def test_overlapping_memory(names: tuple[str, str], shift: int) -> None:
    memory = torch.ones(2 * N)
    overlapping = {names[0]: memory[:N], names[1]: memory[shift : shift + N]}
    refused(ops.adam, adam_arguments() | overlapping, ValueError, *names, "share memory", "allowed")


def test_neighbours_do_not_overlap() -> None:
    memory = torch.ones(4 * N)
    views = {name: memory[i * N : (i + 1) * N] for i, name in enumerate(ADAM_TENSORS)}
    ops.adam(**(adam_arguments() | views))
    assert memory[: N - 1].eq(memory[0]).all() and memory[0] < 1


def test_the_same_parameter_twice() -> None:
    one = adam_arguments()
    two = {name: [one[name], torch.ones(N)] for name in ADAM_TENSORS} | {"param": [one["param"], one["param"]]}
    refused(ops.adam, one | two, ValueError, "param[0]", "param[1]", "share memory")


def test_one_gradient_may_serve_two_parameters() -> None:
    grad = torch.ones(N)
    params = [torch.ones(N), torch.ones(N)]
    ops.sgd(params, [grad, grad], lr=0.5)
    assert params[0].eq(0.5).all() and params[1].eq(0.5).all()


def test_a_list_with_one_bad_row_changes_no_row() -> None:
    lists = {name: [torch.ones(N) for _ in range(3)] for name in ADAM_TENSORS}
    lists["grad"][2] = torch.ones(N, dtype=torch.float64)
    refused(ops.adam, adam_arguments() | lists, TypeError, "grad[2]", "float64")


@each("name", ["grad", "exp_avg", "exp_avg_sq"])
def test_lists_of_different_lengths(name: str) -> None:
    lists = {key: [torch.ones(N)] * (1 if key == name else 2) for key in ADAM_TENSORS}
    refused(ops.adam, adam_arguments() | lists, ValueError, name, "1", "2", "allowed")


@each("value", BAD_NUMBERS)
@each("name", ["lr", "eps", "weight_decay", "beta1", "beta2"])
def test_adam_numbers(name: str, value: float) -> None:
    refused(ops.adam, adam_arguments() | {name: value}, ValueError, f"{name}={value!r}", "must be")


@each("name", ["beta1", "beta2"])
def test_a_beta_of_one(name: str) -> None:
    refused(ops.adam, adam_arguments() | {name: 1.0}, ValueError, f"{name}=1.0", "[0, 1)")


@each("value", BAD_NUMBERS)
@each(
    "op, name",
    [
        *(("lion", name) for name in ("lr", "weight_decay", "beta1", "beta2")),
        *(("adagrad", name) for name in ("lr", "lr_decay", "eps", "weight_decay")),
        *(("sgd", name) for name in ("lr", "momentum", "weight_decay")),
    ],
)
def test_numbers_of_the_others(op: str, name: str, value: float) -> None:
    refused(getattr(ops, op), other_arguments(op) | {name: value}, ValueError, f"{name}={value!r}", "must be")


@each("value", [math.nan, math.inf])
def test_a_scale_that_is_not_finite(value: float) -> None:
    refused(ops.adam, adam_arguments() | {"scale": value}, ValueError, f"scale={value!r}", "must be")


@each("value", [0, -1])
def test_a_step_below_one(value: int) -> None:
    refused(ops.adam, adam_arguments() | {"step": value}, ValueError, f"step={value}", "must be")


@each("name, value", [("lr", "0.1"), ("lr", None), ("step", 1.5), ("decoupled", 1), ("beta1", None)])
def test_arguments_of_the_wrong_type(name: str, value: object) -> None:
    refused(ops.adam, adam_arguments() | {name: value}, TypeError, f"{name}={value!r}", "must be")


def test_formats_that_do_not_fit_together() -> None:
    int8 = int8_arguments()
    master = torch.ones(N)
    bf16 = torch.ones(N, dtype=torch.bfloat16)
    refused(ops.adam, int8 | {"master": master}, ValueError, "master", "remainder", "allowed")
    refused(ops.adam, adam_arguments() | {"master": master}, TypeError, "master", "float32", "allowed")
    refused(ops.adam, int8 | {"param": torch.ones(N)}, TypeError, "param", "float32", "remainder", "bfloat16")
    refused(ops.adam, int8 | {"exp_avg_scale": None}, ValueError, "exp_avg_scale", "missing", "allowed")
    refused(
        ops.adam, adam_arguments() | {"param": bf16, "master": master, "out": bf16.clone()}, ValueError, "out", "master"
    )
    refused(ops.adam, int8 | {"stochastic_seed": 1}, ValueError, "stochastic_seed=1", "remainder")
    refused(ops.sgd, other_arguments("sgd") | {"momentum_buffer": None}, ValueError, "momentum=0.9", "momentum_buffer")


@each("seed", [-1, 1.5, "1"])
def test_a_seed_that_is_no_count(seed: object) -> None:
    arguments = adam_arguments() | {"param": torch.ones(N, dtype=torch.bfloat16), "stochastic_seed": seed}
    refused(ops.adam, arguments, (TypeError, ValueError), f"stochastic_seed={seed!r}", "must be")


def test_unknown_formats_of_the_codecs() -> None:
    x = torch.ones(N)
    refused(ops.split, {"x": x, "master_format": "split4"}, ValueError, "master_format='split4'", "split16", "split8")
    refused(ops.encode_int8, {"x": x, "kind": "momentum"}, ValueError, "kind='momentum'", "exp_avg")
    refused(ops.decode_int8, {"codes": x.to(torch.int8), "scale": x[:3], "kind": 3}, ValueError, "kind=3", "exp_avg")


def test_codec_tensors() -> None:
    codes = torch.ones(N, dtype=torch.int8)
    refused(ops.decode_int8, {"codes": codes, "scale": torch.ones(2)}, ValueError, "scale", "2", "3")
    refused(
        ops.decode_int8, {"codes": codes.to(torch.uint8), "scale": torch.ones(3)}, TypeError, "codes", "uint8", "int8"
    )
    refused(ops.encode_int8, {"x": torch.ones(N).half()}, TypeError, "x", "float16", "float32")
    refused(ops.split, {"x": torch.ones(N, 2)[:, 0], "master_format": "split16"}, ValueError, "x", "contiguous")
    hi = torch.ones(N, dtype=torch.bfloat16)
    refused(ops.join, {"hi": hi, "remainder": hi}, TypeError, "remainder", "bfloat16", "int16")
    refused(ops.join, {"hi": hi, "remainder": codes[:5]}, ValueError, "remainder", "5", str(N))


def test_sumsq_tensors() -> None:
    good = torch.ones(N)
    refused(ops.sumsq, {"tensors": [good, good.double()]}, TypeError, "tensors[1]", "float64", "allowed")
    refused(ops.sumsq, {"tensors": [good.to_sparse()]}, TypeError, "tensors[0]", "sparse")
    refused(ops.sumsq, {"tensors": [good.view(-1, 2)[:, 0]]}, ValueError, "tensors[0]", "contiguous")
    refused(ops.sumsq, {"tensors": [good], "impl": "cpu.mmx"}, BackendError, "cpu.mmx", "cpu.scalar")


def test_accumulate_and_cast_tensors() -> None:
    dst, src = torch.zeros(N), torch.ones(N)
    refused(ops.accumulate, {"dst": dst, "srcs": []}, ValueError, "srcs", "empty", "allowed")
    refused(ops.accumulate, {"dst": dst, "srcs": [src, src.half()]}, TypeError, "srcs", "float16", "allowed")
    refused(ops.accumulate, {"dst": dst, "srcs": [src[1:]]}, ValueError, "srcs[0]", str(N - 1), str(N))
    refused(ops.accumulate, {"dst": dst.int(), "srcs": [src]}, TypeError, "dst", "int32", "allowed")
    refused(ops.accumulate, {"dst": dst, "srcs": [src], "scale": math.nan}, ValueError, "scale=nan", "must be")
    refused(ops.accumulate, {"dst": dst, "srcs": [src], "add": 1}, TypeError, "add=1", "must be")
    memory = torch.ones(2 * N)
    refused(
        ops.accumulate, {"dst": memory[:N], "srcs": [memory[1 : N + 1]]}, ValueError, "dst", "srcs[0]", "share memory"
    )
    refused(ops.cast, {"src": memory[1 : N + 1], "dst": memory[:N]}, ValueError, "dst", "share memory")
    narrow = memory[:N].view(torch.bfloat16)[:N]
    refused(ops.cast, {"src": memory[:N], "dst": narrow}, ValueError, "dst", "share memory")


def test_stream_tensors() -> None:
    aligned = torch.ones(64)
    refused(ops.stream, {"reads": [aligned[:15]]}, ValueError, "60", "multiple of 64")
    refused(ops.stream, {"reads": [aligned, torch.ones(32)]}, ValueError, "128", "256", "one size")
    refused(ops.stream, {"reads": [aligned] * 9}, ValueError, "9 reads", "at most 8")
    refused(ops.stream, {"reads": [aligned], "updates": [aligned]}, ValueError, "share memory")
    shifted = torch.ones(64 + 32)
    start = 1 + (-shifted.data_ptr() % 64) // 4
    refused(ops.stream, {"writes": [shifted[start : start + 64]]}, ValueError, "writes[0]", "4 modulo 64", "aligned")


def test_a_gradient_of_another_shape_is_refused_and_a_flat_one_is_not() -> None:
    param, exp_avg, exp_avg_sq = torch.ones(100, 3), torch.zeros(100, 3), torch.zeros(100, 3)
    with pytest.raises(ValueError, match=r"grad has shape \(3, 100\); param has \(100, 3\)"):
        ops.adam(param, torch.ones(3, 100), exp_avg, exp_avg_sq, lr=0.1, step=1)
    assert param.eq(1).all()
    ops.adam(param, torch.ones(300), exp_avg, exp_avg_sq, lr=0.1, step=1)
    assert param.ne(1).all()


def test_a_lazily_negated_view_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lazily negated view; .*resolve_neg"):
        ops.sumsq(torch._neg_view(torch.ones(3)))
