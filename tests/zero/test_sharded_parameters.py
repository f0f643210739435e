"""Sharded as the body of an nn.Parameter and as a gradient: what torch's own machinery does with them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tables import each
from torch import nn

from zerokern.zero.sharded import Sharded, ShardedUseError

SPAN = (3, 8)  # this rank's elements of the weight


def part(full: torch.Tensor, start: int = SPAN[0], numel: int = SPAN[1] - SPAN[0], **options) -> Sharded:
    return Sharded(full.detach().reshape(-1)[start : start + numel].clone(), full.shape, start, **options)


def rest(module: nn.Module) -> nn.Module:
    """Parameters as stage 3 leaves them between steps, the same objects; a bias has all its elements on other ranks."""
    for name, own in module.named_parameters():
        body = part(own, *(() if name.endswith("weight") else (0, 0)), name=name)
        torch.utils.swap_tensors(own, nn.Parameter(body, requires_grad=own.requires_grad))
    return module


def test_a_parameter_keeps_its_identity_while_its_body_changes() -> None:
    model = nn.Linear(4, 3)
    weight, values = model.weight, model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rest(model)
    assert model.weight is weight is optimizer.param_groups[0]["params"][0] is dict(model.named_parameters())["weight"]
    assert type(weight) is Sharded and isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
    assert (weight.shape, weight.dtype, weight.name) == (values.shape, values.dtype, "weight")
    assert sum(one.numel() for one in model.parameters()) == 15
    assert not isinstance(weight.detach(), nn.Parameter) and weight.detach().name == "weight"
    weight.requires_grad_(False)
    weight.requires_grad = True
    torch.utils.swap_tensors(weight, nn.Parameter(values))
    assert type(weight) is nn.Parameter and torch.equal(weight, values)
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(values))


def test_a_body_can_change_after_backward_and_under_a_user_of_the_parameter() -> None:
    model = nn.Linear(4, 3)
    loss = model(torch.ones(2, 4)).sum()
    loss.backward()
    del loss
    model.zero_grad()
    rest(model)
    with torch.no_grad():
        assert model.weight.mul_(0.0).local.tolist() == [0.0] * 5


def test_a_dropped_gradient_gives_its_memory_back() -> None:
    own = nn.Parameter(torch.randn(3, 4))
    own.grad = part(torch.ones(3, 4), kind="gradient")
    local = weakref.ref(own.grad.local)
    gc.collect()
    assert local() is not None and isinstance(own.grad, Sharded)
    own.grad = None
    gc.collect()
    assert local() is None


def test_state_dicts_of_full_tensors_and_of_parts_load() -> None:
    source = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))
    model = rest(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4)))
    version = model[0].weight.local._version
    full = {name: value.t().contiguous().t().double() for name, value in source.state_dict().items() if value.ndim == 2}
    assert set(model.load_state_dict(full, strict=False).missing_keys) == {"0.bias", "1.bias"}
    assert torch.equal(model[0].weight.local, source[0].weight.detach().reshape(-1)[3:8])
    assert model[0].weight.local._version > version and model[0].weight.dtype == torch.float32

    parts = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(type(value) is Sharded for value in parts.values())
    with torch.no_grad():
        model[0].weight.zero_()
    assert model.state_dict()["0.weight"].local is model[0].weight.local and parts["0.weight"].local.any()
    model.load_state_dict(parts)
    assert torch.equal(model[0].weight.local, parts["0.weight"].local) and isinstance(model[0].weight, nn.Parameter)

    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
        model.load_state_dict({"0.weight": torch.ones(4, 4)}, strict=False)
    with pytest.raises(RuntimeError, match=r"not sharded alike: Sharded\(parameter '0.weight'"):
        model.load_state_dict({"0.weight": part(torch.ones(3, 4), 0, 6)}, strict=False)


def test_loading_with_swapped_parameters_is_refused() -> None:
    model = rest(nn.Linear(4, 3))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match="set_swap_module_params_on_conversion"):
            model.load_state_dict({"weight": torch.ones(3, 4)}, strict=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_a_module_is_moved_and_converted_before_it_is_sharded() -> None:
    model = rest(nn.Linear(4, 3))
    weight, local = model.weight, model.weight.local
    model.to("cpu").float().requires_grad_(False).train()
    assert model.weight is weight and weight.local is local and not weight.requires_grad
    for convert in (model.half, model.double):
        with pytest.raises(TypeError, match=r"change device or dtype before zk.shard"):
            convert()
    with pytest.raises(TypeError, match=r"Move the model before zk.shard"):
        model.to("meta")
    assert model.weight is weight and weight.local is local and weight.dtype == torch.float32


class Gathering:
    """Stands for zk.shard: gives the call the full tensor instead."""

    def __init__(self, owner: Sharded, full: torch.Tensor, answers: bool = True) -> None:
        self.owner, self.full, self.answers, self.calls = owner, full, answers, []

    def __call__(self, func, args: tuple, kwargs: dict):
        self.calls.append(getattr(func, "__name__", str(func)))
        if not self.answers:
            return NotImplemented
        return func(*(self.full if one is self.owner else one for one in args), **kwargs)


def in_use() -> tuple[nn.Parameter, Gathering]:
    full = nn.Parameter(torch.randn(3, 4))
    own = rest(nn.Linear(4, 3)).weight
    own.use = Gathering(own, full)
    return own, own.use


@pytest.fixture
def used() -> tuple[nn.Parameter, Gathering]:
    return in_use()


USES = {
    "linear": lambda p, x: nn.functional.linear(x, p),
    "operator": lambda p, x: x @ p.T,
    "operator_left": lambda p, x: p @ x.T,
    "sum": lambda p, x: p.sum(),
    "norm": lambda p, x: p.norm(),
    "index": lambda p, x: p[1:, ::2],
    "beside_full": lambda p, x: x[:1] + p,
    "elementwise": lambda p, x: torch.sigmoid(p),
    "conversion": lambda p, x: p.to(torch.float64),
    "scalar": lambda p, x: 2.0 * p - 1.0,
    "python_function": lambda p, x: nn.functional.normalize(p),
}


@each("name", USES)
def test_a_use_outside_the_module_meets_the_full_tensor(name: str) -> None:
    own, gathering = in_use()
    x = torch.randn(2, 4)
    result = USES[name](own, x)
    assert len(gathering.calls) == 1 and type(result) is torch.Tensor and result.requires_grad
    assert torch.equal(result, USES[name](gathering.full, x))
    result.sum().backward()
    assert gathering.full.grad is not None


def test_what_is_right_at_rest_is_done_at_rest(used: tuple[nn.Parameter, Gathering]) -> None:
    own, gathering = used
    (own.shape, own.dtype, own.grad, own.requires_grad, len(own), repr(own), own.is_contiguous(), own.numel())
    average = own.detach().clone()
    (own.clone(), own.data, torch.zeros_like(own), own.new_zeros(2), own.contiguous(), own.requires_grad_())
    with torch.no_grad():
        own.mul_(0.5).add_(average)
        average.lerp_(own, 0.1)
        own.copy_(torch.ones(3, 4))
        torch._foreach_mul_([own], 2.0)
        assert isinstance(own * 2.0, Sharded)
    assert gathering.calls == []


def test_what_writes_is_never_done_on_a_gathered_copy(used: tuple[nn.Parameter, Gathering]) -> None:
    own, gathering = used
    writes = [
        lambda: own.__setitem__(0, 1.0),
        lambda: own.__iadd__(torch.ones(4)),
        lambda: own.add_(torch.ones(4)),
        lambda: torch.mul(own, torch.ones(4), out=own),
        lambda: nn.init.normal_(own),
        lambda: torch._foreach_add_([own], [torch.ones(4)]),
        lambda: own.share_memory_(),
    ]
    for write in writes:
        with torch.no_grad(), pytest.raises(TypeError, match="'weight'"):
            write()
    with pytest.raises(RuntimeError, match="leaf"):
        own.mul_(2.0)  # torch's own words
    assert gathering.calls == []


def test_what_would_outlive_a_gathered_tensor_does_not_get_it(used: tuple[nn.Parameter, Gathering]) -> None:
    own, gathering = used
    with torch.no_grad():
        for take in (own.data_ptr, own.untyped_storage, own.numpy, own.__dlpack__):
            with pytest.raises(ShardedUseError, match="'weight'"):
                take()
        assert gathering.calls == []
        assert own.tolist() == gathering.full.tolist() and gathering.calls == ["tolist"]


def test_a_use_that_nobody_answers_is_refused(used: tuple[nn.Parameter, Gathering]) -> None:
    own, gathering = used
    gathering.answers = False
    with pytest.raises(TypeError, match=r"`with zk.gathered\(model\):`"):
        nn.functional.linear(torch.ones(2, 4), own)
    assert gathering.calls == ["linear"]
    assert isinstance(own * 2.0, Sharded)


def test_elementwise_results_in_a_forward_are_full_without_autograd_too(used: tuple[nn.Parameter, Gathering]) -> None:
    own, gathering = used
    forward = [True]
    own.in_forward = lambda: forward[0]
    with torch.no_grad():
        assert torch.equal(torch.exp(own) * torch.ones(3, 4), torch.exp(gathering.full))
        assert type(own.detach()) is torch.Tensor and type(own.data) is torch.Tensor
        forward[0] = False
        assert isinstance(torch.exp(own), Sharded)
    assert gathering.calls == ["exp", "detach", "__get__"]


def test_autocast_meets_the_full_tensor(used: tuple[nn.Parameter, Gathering]) -> None:
    own, gathering = used
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, torch.autocast("cpu", dtype=torch.bfloat16):
            result = nn.functional.linear(torch.ones(2, 4), own)
        assert type(result) is torch.Tensor and result.dtype == torch.bfloat16
    assert gathering.calls == ["linear"] * 2
