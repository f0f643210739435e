"""Sharded as the body of an nn.Parameter and as a gradient: what torch's own machinery does with them."""

from __future__ import annotations

import pytest
import torch
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


def test_state_dicts_of_any_dtype_and_strides_load_and_parts_of_others_do_not() -> None:
    source, model = nn.Linear(4, 3), rest(nn.Linear(4, 3))
    version = model.weight.local._version
    model.load_state_dict({"weight": source.weight.detach().t().contiguous().t().double()}, strict=False)
    assert torch.equal(model.weight.local, source.weight.detach().reshape(-1)[3:8])
    assert model.weight.local._version > version and model.weight.dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"not sharded alike: Sharded\(parameter 'weight'"):
        model.load_state_dict({"weight": part(torch.ones(3, 4), 0, 6)}, strict=False)


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
