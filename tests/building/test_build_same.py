"""zk.build gives the bits of zk.shard(fn()), whatever a constructor does, and leaves the same random numbers behind."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tables import each
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector as flat
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.nn.utils import vector_to_parameters as unflat
from worlds import full, on_ranks, ranked, step_and_zero
from zero_cases import Net

import zerokern as zk
from zerokern.building import construction

SLOW = pytest.mark.slow


@pytest.fixture(autouse=True, params=["tight", pytest.param("as it is", marks=SLOW)])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tight: whatever can be computed again is emptied as soon as an operator has returned."""
    if request.param == "tight":
        monkeypatch.setattr(construction, "LIVE_NBYTES", 0)
        monkeypatch.setattr(construction, "SMALL_NBYTES", 0)


def both(make: Callable[[], nn.Module], **settings: Any) -> tuple[nn.Module, nn.Module]:
    """Constructed as a whole and in parts; the same tree, values, aliases of buffers, and random numbers to come."""
    torch.manual_seed(3)
    whole = zk.shard(make(), **settings)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    built = zk.build(make, **settings)
    assert torch.equal(torch.get_rng_state(), after), "other random numbers have been drawn"
    mine, theirs = ({**full(one), **dict(one.named_buffers())} for one in (built, whole))
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert mine[name].dtype == value.dtype and mine[name].shape == value.shape, name
        assert torch.equal(mine[name], value), f"{name} differs by {(mine[name] - value).abs().max()}"
    return whole, built


LAYERS: list[Callable[[], nn.Module]] = [
    *(lambda kind=kind: kind(2, 4, 3) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
    *(lambda kind=kind: kind(2, 4, 3) for kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)),
    *(lambda kind=kind: kind(5) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.RMSNorm)),
    *(lambda kind=kind: kind(5, affine=True) for kind in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)),
    *(lambda kind=kind: kind(5, 7, 2, bidirectional=True) for kind in (nn.RNN, nn.LSTM, nn.GRU)),
    *(lambda kind=kind: kind(5, 7) for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell, nn.Linear, nn.Embedding)),
    lambda: nn.LSTM(5, 7, proj_size=3),
    lambda: nn.EmbeddingBag(5, 7, mode="sum"),
    lambda: nn.Embedding(5, 7, padding_idx=2),
    lambda: nn.Embedding.from_pretrained(torch.randn(5, 7), freeze=False),
    lambda: nn.Bilinear(3, 4, 5),
    lambda: nn.PReLU(4),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10]),
    lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    lambda: nn.MultiheadAttention(8, 2, kdim=3, vdim=5),
    lambda: nn.TransformerEncoderLayer(8, 2, 9),
    lambda: nn.TransformerDecoderLayer(8, 2, 9),
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 9, batch_first=True), 3),
    lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 9), 3),
    lambda: nn.Transformer(8, 2, 2, 2, 9, batch_first=True),
]


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=SLOW)])
def test_every_layer_of_torch(stage: int) -> None:
    for make in LAYERS:
        both(make, stage=stage)


def two(write: Callable[[nn.ModuleDict], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        net = nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(9, 9)})
        with torch.no_grad():
            write(net)
        return net

    return make


def through_a_file(net: nn.ModuleDict) -> None:
    file = io.BytesIO()
    torch.save(net["a"].state_dict(), file)
    file.seek(0)
    net["b"].load_state_dict(torch.load(file))


def kept_by_numpy(net: nn.ModuleDict) -> None:
    view = net["a"].weight.numpy()
    net["b"].weight.normal_()
    view[1] = 4


def until_small(net: nn.ModuleDict) -> None:
    while net["a"].weight.abs().max() > 0.3:
        net["a"].weight.uniform_(-0.31, 0.31)


def copied_and_changed(net: nn.ModuleDict) -> None:
    net["target"] = copy.deepcopy(net["a"])
    net["a"].weight.normal_()
    net["target"].weight.mul_(0.5)


def seeded_within(net: nn.ModuleDict) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        net["a"].weight.normal_()
    net["b"].weight.normal_()


def one_generator(net: nn.ModuleDict) -> None:
    generator = torch.Generator().manual_seed(5)
    for layer in net.values():
        layer.weight.normal_(generator=generator)


def trained(net: nn.ModuleDict) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    for _ in range(3):
        with torch.enable_grad():
            net["b"](net["a"](torch.randn(4, 9))).square().mean().backward()
        step_and_zero(optimizer)


def a_long_story(net: nn.ModuleDict) -> None:
    for number in range(600):
        net["a"].weight[number % 9].add_(number * 1e-3)


def source_changed_later(net: nn.ModuleDict) -> None:
    source, scale = torch.arange(81.0).view(9, 9), torch.tensor([2.0])
    net["a"].weight.copy_(source)
    net["b"].weight.mul_(scale)
    source.zero_()
    scale.zero_()


DONE: dict[str, Callable[[nn.ModuleDict], object]] = {
    "an element set": lambda net: net["a"].weight.view(-1).__setitem__(-1, 7.0),
    "rows set": lambda net: net["a"].weight.__setitem__(slice(0, 2), net["b"].weight[3:5]),
    "eye_": lambda net: nn.init.eye_(net["a"].weight),
    "divided by its norm": lambda net: net["a"].weight.fill_(2.0).div_(net["b"].weight.norm()),
    "normal_ of a view": lambda net: nn.init.normal_(net["a"].weight.t()[1:], 9.0, 0.1),
    "deepcopy": lambda net: net.update({"target": copy.deepcopy(net["a"])}),
    "deepcopy, changed": copied_and_changed,
    "pickle": lambda net: net.update({"target": pickle.loads(pickle.dumps(net["a"]))}),
    "torch.save": through_a_file,
    "load_state_dict": lambda net: net["b"].load_state_dict(net["a"].state_dict()),
    "data =": lambda net: setattr(net["a"].weight, "data", torch.randn(9, 9)),
    "data = another's": lambda net: setattr(net["a"].weight, "data", net["b"].weight.data.t().clone()),
    "set_": lambda net: net["a"].weight.set_(torch.randn(9, 9)),
    "swap_tensors": lambda net: torch.utils.swap_tensors(net["a"].weight, net["b"].weight),
    "resize_": lambda net: net["a"].weight.data.resize_(9, 9).mul_(2),
    "numpy": lambda net: net["b"].weight.copy_(torch.from_numpy(net["a"].weight.numpy() * 2)),
    "asarray": lambda net: net["b"].weight.copy_(torch.tensor(np.asarray(net["a"].weight))),
    "kept by numpy": kept_by_numpy,
    "dlpack": lambda net: net["b"].weight.copy_(torch.from_dlpack(net["a"].weight.detach())),
    "tolist": lambda net: net["b"].weight.copy_(torch.tensor(net["a"].weight.tolist())),
    "item": lambda net: net["b"].weight.fill_(net["a"].weight[1, 2].item()),
    "repr": lambda net: net["b"].weight.fill_(len(repr(net["a"].weight))),
    "format": lambda net: net["b"].weight.fill_(float(f"{net['a'].weight[0, 0]:.3f}")),
    "a comparison": lambda net: net["b"].weight.fill_(1.0 if net["a"].weight.sum() > 0 else -1.0),
    "a loop until it is right": until_small,
    "trunc_normal_": lambda net: nn.init.trunc_normal_(net["a"].weight, 5.0, 1.0, 4.0, 6.0),
    "orthogonal_": lambda net: nn.init.orthogonal_(net["a"].weight),
    "sparse_": lambda net: nn.init.sparse_(net["a"].weight, 0.3),
    "foreach": lambda net: torch._foreach_mul_([net["a"].weight, net["b"].weight], 2.0),
    "out=": lambda net: torch.mm(net["a"].weight, net["b"].weight, out=net["b"].weight.data),
    "a mask": lambda net: net["a"].weight.__setitem__(net["a"].weight < 0, 0.5),
    "a permutation": lambda net: net["a"].weight.copy_(net["a"].weight[torch.randperm(9)]),
    "dropout": lambda net: net["a"].weight.copy_(F.dropout(net["b"].weight, 0.5)),
    "one generator": one_generator,
    "seeded within": seeded_within,
    "a buffer of it": lambda net: net["a"].register_buffer("first", net["a"].weight.detach().norm(dim=1)),
    "a buffer over it": lambda net: net["a"].register_buffer("first", net["a"].weight.detach()),
    "tied": lambda net: setattr(net["a"], "weight", net["b"].weight),
    "one vector": lambda net: unflat(flat(net["a"].parameters()) * 2, net["b"].parameters()),
    "a forward": lambda net: net["a"].bias.copy_(net["b"](torch.ones(3, 9)).mean(0)),
    "trained": trained,
    "a long story": a_long_story,
    "a source that changes later": source_changed_later,
    "complex": lambda net: net["a"].weight.copy_(torch.view_as_complex(torch.randn(9, 9, 2)).conj().imag),
    "negated": lambda net: net["a"].weight.copy_(torch._neg_view(net["b"].weight)),
    "old weight_norm": lambda net: weight_norm(net["a"]),
    "weight_norm": lambda net: parametrizations.weight_norm(net["a"]),
    "weight_norm taken off": lambda net: parametrize.remove_parametrizations(
        parametrizations.weight_norm(net["a"]), "weight"
    ),
    "spectral_norm": lambda net: spectral_norm(net["a"]),
    "orthogonal": lambda net: parametrizations.orthogonal(net["a"]),
    "pruned": lambda net: prune.l1_unstructured(net["a"], "weight", amount=0.5),
    "another dtype": lambda net: net["a"].half(),
    "converted twice": lambda net: net.double().float(),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@each("how", DONE)
def test_what_constructors_do(how: str) -> None:
    both(two(DONE[how]), stage=0)


def svd() -> nn.Module:
    left, values, right = torch.linalg.svd(torch.randn(9, 9))
    return nn.ParameterList([nn.Parameter(left), nn.Parameter(values), nn.Parameter(right.t().contiguous())])


def lazy() -> nn.Module:
    net = nn.Sequential(nn.LazyLinear(9), nn.LazyBatchNorm1d())
    net(torch.randn(3, 4))
    return net


def narrowed() -> nn.Module:
    return Net().to(torch.bfloat16)


def under_another_default() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.ParameterList([torch.randn(9) / 3]))
    finally:
        torch.set_default_dtype(before)


@each("make", [svd, lazy, narrowed, under_another_default])
def test_parameters_that_are_made_of_others(make: Callable[[], nn.Module]) -> None:
    both(make, stage=0)


class Student(nn.Module):
    """BYOL: a target that begins as a copy of what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Net()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.calls = CALLS.append(1)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.online(x), self.target(x).detach() + 1)


CALLS: list[int] = []


@each("stage", [0, 3])
def test_a_target_that_is_a_copy(stage: int) -> None:
    CALLS.clear()
    whole, built = both(Student, stage=stage)
    assert len(CALLS) == 2, "a constructor is run once"
    values = full(built)
    assert all(torch.equal(values[f"target.{name}"], values[f"online.{name}"]) for name, _ in Net().named_parameters())
    losses = []
    for model in (whole, built):
        optimizer = zk.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            loss = model(torch.full((2, 6), float(step)))
            loss.backward()
            step_and_zero(optimizer)
        losses.append(loss.item())
    assert losses[0] == losses[1]


@ranked
def on_real_ranks(world: Any) -> None:
    construction.LIVE_NBYTES = construction.SMALL_NBYTES = 0
    both(Student, stage=3)
    both(lambda: nn.Transformer(8, 2, 1, 1, 9), stage=2)


def test_the_same_on_real_ranks() -> None:
    on_ranks(2, on_real_ranks)


def shared() -> nn.Module:
    layers = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])
    layers[0].weight.data = layers[1].weight.data
    return layers


def test_two_parameters_over_one_memory_are_refused_as_by_shard() -> None:
    for work in (lambda: zk.shard(shared()), lambda: zk.build(shared)):
        with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' share memory"):
            work()


class Half(nn.Module):
    """One parameter has values of its own, the other one is left to `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 9))
        self.left = nn.Parameter(torch.empty(9))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.ones_(self.left)


def test_what_has_values_keeps_them_when_the_rest_is_reset() -> None:
    torch.manual_seed(1)
    expected = torch.randn(9, 9)
    torch.manual_seed(1)
    values = full(zk.build(Half, stage=3))
    assert torch.equal(values["weight"], expected) and torch.equal(values["left"], torch.ones(9))
