"""zk.Muon against its definition written out slowly, against torch.optim.Muon, and across schedules and tiers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from muon_cases import FORMATS, Slowly
from optim_cases import FP32, contents, make_params, same_bits, set_grads
from tables import each
from torch import nn
from worlds import World, on_threads, refusal, says

import zerokern as zk
from zerokern.core.errors import StateError
from zerokern.kernels.orthogonal import iterate_
from zerokern.optim import Muon, matrix_table

SHAPES = ((16, 16), (40, 24), (24, 130), (300, 260))


def twins(shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = FP32) -> tuple[list, list]:
    return make_params(shapes, dtype), make_params(shapes, dtype)


@each("dtype, master_format, state_format", FORMATS)
@each("ns_dtype", ["fp32", "bf16"])
def test_the_bits_of_the_rule_written_out(
    dtype: torch.dtype, master_format: str | None, state_format: str, ns_dtype: str
) -> None:
    shapes = SHAPES if ns_dtype == "fp32" else SHAPES[:3]  # many CPUs multiply bf16 slowly
    params, others = twins(shapes, dtype)
    ours = Muon(params, lr=0.02, master_format=master_format, state_format=state_format, ns_dtype=ns_dtype)
    slow = Slowly(others, master_format, state_format, ns_dtype, lr=0.02)
    for step in range(4):
        set_grads(params, others, seed=step)
        ours.step()
        slow.step()
    assert slow.agrees(ours, params)


def test_the_default_multiplies_in_fp32_on_every_cpu() -> None:
    """`tests/core/test_machines.py` runs this on CPUs of other kinds."""
    params, others = twins()
    by_default, by_name = Muon(params, lr=0.02), Muon(others, lr=0.02, ns_dtype="fp32")
    set_grads(params, others)
    by_default.step()
    by_name.step()
    assert same_bits([param.detach() for param in params], [param.detach() for param in others])


@each("settings", [
    {"nesterov": False},
    {"maximize": True, "weight_decay": 0.0},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.3},
    {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 7, "eps": 0.1},
    {"lr": torch.tensor(0.05)},
])  # fmt: skip
def test_the_bits_of_every_setting(settings: dict) -> None:
    params, others = twins()
    ours = Muon(params, **{"lr": 0.02, **settings}, ns_dtype="fp32")
    slow = Slowly(
        others, None, "fp32", "fp32", **{"lr": 0.02, **{k: v if k != "lr" else float(v) for k, v in settings.items()}}
    )
    for step in range(3):
        set_grads(params, others, seed=step)
        ours.step()
        slow.step()
    assert slow.agrees(ours, params)


@each("shape, split", [((3 * 32, 48), 3), ((4, 16, 64), 4), ((2 * 12, 33), 2)])
@each("state_format", ["fp32", "int8"])
def test_slices_of_a_parameter_are_matrices_of_their_own(shape: tuple, split: int, state_format: str) -> None:
    if state_format == "int8" and shape[-1] == 33:
        with pytest.raises(ValueError, match="a multiple of 128"):
            step_once(Muon(make_params([shape]), split=split, state_format="int8"))
        return
    params, others = twins([shape])
    ours = Muon(params, lr=0.02, split=split, state_format=state_format, ns_dtype="fp32")
    slow = Slowly(others, None, state_format, "fp32", lr=0.02, split=split)
    for step in range(3):
        set_grads(params, others, seed=step)
        ours.step()
        slow.step()
    assert slow.agrees(ours, params)
    together = make_params([(shape[0], shape[-1])] if len(shape) == 2 else [(shape[0] * shape[1], shape[2])])
    other = Muon(together, lr=0.02, state_format=state_format, ns_dtype="fp32")
    for step in range(3):
        set_grads(together, seed=step)
        other.step()
    assert not torch.equal(together[0].view(-1), params[0].detach().view(-1)), "one matrix is another update"


def step_once(optimizer: Any, seed: int = 0, scale: float = 1.0) -> None:
    set_grads([param for group in optimizer.param_groups for param in group["params"]], seed=seed, scale=scale)
    optimizer.step()


def test_torch_is_followed() -> None:
    """As far as fp32 is from torch's bf16 iteration."""
    for settings in ({}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}, {"momentum": 0.2, "ns_steps": 3}):
        params, others = twins(SHAPES[:3])
        ours, theirs = Muon(params, lr=0.02, ns_dtype="bf16", **settings), torch.optim.Muon(others, lr=0.02, **settings)
        for step in range(5):
            set_grads(params, others, seed=step)
            ours.step()
            theirs.step()
        for param, other in zip(params, others, strict=True):
            torch.testing.assert_close(param, other, rtol=0, atol=2e-3)
            torch.testing.assert_close(
                ours.state[param]["momentum_buffer"], theirs.state[other]["momentum_buffer"], rtol=1e-6, atol=1e-6
            )


@each("stage", [1, 2])
def test_ranks_that_have_parts_of_a_matrix_all_refuse(stage: int) -> None:
    """Also the third, which has nothing of it."""

    def work(world: World) -> str:
        model = world.shard(nn.Linear(16, 16, bias=False), stage=stage)
        return refusal(lambda: Muon(model.parameters()), ValueError)

    for said in on_threads(3, work):
        says(said, [f"(16, 16), of which ranks have parts (stage {stage})", "stage=0", "whole=", "AdamW"])


def test_a_closure_and_parameters_without_gradients() -> None:
    params, others = twins(SHAPES[:2])
    ours, slow = Muon(params, lr=0.02, ns_dtype="fp32"), Slowly(others[:1], None, "fp32", "fp32", lr=0.02)
    set_grads(params, others)
    params[1].grad = None
    assert ours.step(lambda: 7.0) == 7.0
    slow.step()
    assert slow.agrees(ours, params[:1]) and torch.equal(params[1], others[1]) and params[1] not in ours.state


def test_a_failure_between_two_matrices_tears_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    params = make_params(SHAPES[:2])
    optimizer = Muon(params)
    step_once(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    calls = []

    def fails(*given: Any) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise RuntimeError("out of memory, say")
        iterate_(*given)

    with monkeypatch.context() as patch:
        patch.setattr(matrix_table, "iterate_", fails)
        with pytest.raises(RuntimeError, match="out of memory, say"):
            step_once(optimizer)
    with pytest.raises(StateError, match="load a checkpoint"):
        step_once(optimizer)
    optimizer.load_state_dict(saved)
    step_once(optimizer)


# State, in and out.


def test_state_goes_to_torch_and_back() -> None:
    params, others = twins(SHAPES[:2])
    ours, theirs = Muon(params, lr=0.02, ns_dtype="bf16"), torch.optim.Muon(others, lr=0.5, momentum=0.1)
    step_once(ours)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.param_groups[0]["lr"] == 0.02 and theirs.param_groups[0]["momentum"] == 0.95
    for param, other in zip(params, others, strict=True):
        assert list(theirs.state[other]) == ["momentum_buffer"]
        assert same_bits([ours.state[param]["momentum_buffer"]], [theirs.state[other]["momentum_buffer"]])
    with torch.no_grad():
        torch._foreach_copy_(others, params)
    fresh = Muon(params, lr=0.7)
    fresh.load_state_dict(theirs.state_dict())
    assert same_bits(contents(ours, params), contents(fresh, params)) and fresh.param_groups[0]["lr"] == 0.02
    set_grads(params, others, seed=5)
    theirs.step()
    fresh.step()
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=2e-3)


def test_state_in_another_format_is_converted_by_name() -> None:
    params = make_params(SHAPES[:2])
    exact, small = Muon(params), Muon(params, state_format="int8")
    step_once(exact)
    with pytest.raises(StateError, match=r"convert_state\(state_dict, state_format='int8'\)"):
        small.load_state_dict(exact.state_dict())
    small.load_state_dict(zk.convert_state(exact.state_dict(), state_format="int8"))
    assert small.state[params[0]]["momentum_buffer"].dtype == torch.int8
    back = Muon(params)
    back.load_state_dict(zk.convert_state(small.state_dict(), state_format="fp32"))
    torch.testing.assert_close(
        back.state[params[0]]["momentum_buffer"], exact.state[params[0]]["momentum_buffer"], rtol=0.02, atol=0.02
    )
    step_once(back)


# What is refused.


@each("what, words", [
    (lambda: Muon([nn.Parameter(torch.ones(3))]), ["(3,)", "two dimensions", "zk.muon_groups", "AdamW"]),
    (lambda: Muon([("stack", nn.Parameter(torch.ones(4, 2, 2)))]), ["stack", "(4, 2, 2)", "split=4"]),
    (lambda: Muon([nn.Parameter(torch.ones(4, 2, 2))], split=2), ["three with split=4"]),
    (lambda: Muon([nn.Parameter(torch.ones(4, 2))], split=3), ["split=3", "divides 4"]),
    (lambda: Muon([nn.Parameter(torch.ones(4, 2))], split=True), ["split=True", "1 or more"]),
    (
        lambda: Muon([nn.Parameter(torch.ones(2, 2))], tier=zk.Nvme("unused", ring_nbytes="1M")),
        ["ring_nbytes=1048576", "2097152", "Muon"],
    ),
    (lambda: Muon([nn.Parameter(torch.ones(2, 2))], ns_dtype="fp16"), ["ns_dtype='fp16'", "'bf16' | 'fp32'"]),
    (lambda: Muon([nn.Parameter(torch.ones(2, 2))], ns_steps=100), ["ns_steps=100", "0 to 99"]),
    (lambda: Muon([nn.Parameter(torch.ones(2, 2))], ns_coefficients=(1.0, 2.0)), ["ns_coefficients", "three"]),
    (lambda: Muon([nn.Parameter(torch.ones(2, 2))], adjust_lr_fn="rms"), ["adjust_lr_fn='rms'", "'original'"]),
    (lambda: Muon([nn.Parameter(torch.ones(2, 2))], momentum=-0.1), ["momentum=-0.1", ">= 0"]),
    (lambda: Muon([nn.Parameter(torch.ones(2, 2))], nesterov=1), ["nesterov=1", "False or True"]),
])  # fmt: skip
def test_what_is_refused_at_once(what: Any, words: list[str]) -> None:
    says(refusal(what, (ValueError, TypeError)), words)


def test_a_matrix_that_became_a_vector_is_refused_before_anything_changes() -> None:
    params = make_params(SHAPES[:2])
    optimizer = Muon(params)
    params[1].data = params[1].data.view(-1)
    before = [param.detach().clone() for param in params]
    says(refusal(lambda: step_once(optimizer), ValueError), ["(960,)", "two dimensions"])
    assert same_bits(before, [param.detach() for param in params])


# Which parameters are for it.


class Tied(nn.Module):
    """What a language model has: embeddings, a tied head, norms, biases, a fused projection, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 8), nn.Embedding(4, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "qkv": nn.Linear(8, 24, bias=False), "up": nn.Linear(8, 12), "norm": nn.LayerNorm(8),
            "lookup": nn.Embedding(4, 8),
        }) for _ in range(2))  # fmt: skip
        self.blocks[1].experts = nn.Parameter(torch.ones(3, 8, 4))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight


def names(groups: list[dict[str, Any]]) -> list[str]:
    return [name for group in groups for name, _ in group["params"]]


def test_what_is_proposed() -> None:
    with pytest.warns(UserWarning, match=r"2 parameters, such as blocks.0.qkv.weight, look fused"):
        groups = zk.muon_groups(Tied())
    one, rest = groups
    weights = [f"blocks.{number}.{name}.weight" for number in (0, 1) for name in ("qkv", "up")]
    assert names(one) == weights
    assert "blocks.1.experts" in names(rest) and "tokens.weight" in names(rest) and len(names(rest)) == 11
    assert "rest  blocks.1.experts" in str(groups) and "named in split=" in str(groups)
    assert "muon  blocks.0.qkv.weight" in str(groups) and "by its name several" in str(groups)


def test_what_is_named_wins() -> None:
    split = {"*.qkv.weight": 3, "blocks.1.experts": 3}
    one, rest = zk.muon_groups(Tied(), matrices=["places.weight"], rest=["blocks.0.up.*"], split=split)
    assert [group["split"] for group in one] == [1, 3]
    assert names(one[:1]) == ["places.weight", "blocks.1.up.weight"]
    assert names(one[1:]) == ["blocks.0.qkv.weight", "blocks.1.experts", "blocks.1.qkv.weight"]
    optimizers = zk.Muon(one), zk.AdamW(rest)
    for optimizer in optimizers:
        step_once(optimizer)
    says(
        refusal(lambda: zk.muon_groups(Tied(), rest=["block.*"]), ValueError),
        ["block.*", "No parameter has such a name"],
    )
    says(refusal(lambda: zk.muon_groups(Tied(), matrices=["*.up.bias"]), ValueError), ["up.bias", "two dimensions"])


def test_what_nobody_has_chosen_is_not_shown() -> None:
    """Also of a subclass whose signature does not name it."""

    class Own(zk.AdamW):
        def __init__(self, params: Any, **settings: Any) -> None:
            super().__init__(params, **settings)

    for build, usual in ((zk.Muon, "device"), (Own, "host")):
        for update in ("host", "device"):
            said = repr(build([nn.Parameter(torch.ones(2, 2))], update=update))
            assert ("update=" in said) == (update != usual)
