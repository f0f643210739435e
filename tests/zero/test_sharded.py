"""Sharded: right on one rank's span where no other rank is needed, and a refusal that teaches everywhere else."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from tables import each
from torch import nn

from zerokern.zero.sharded import Sharded, ShardedUseError, Spanned

SHAPE = torch.Size([5, 7])
SPANS = [(0, 12), (12, 13), (25, 0), (25, 10)]  # one rank owns nothing of it


def part(full: torch.Tensor, start: int, numel: int, **options) -> Sharded:
    return Sharded(full.detach().reshape(-1)[start : start + numel].clone(), full.shape, start, name="w", **options)


def parts(full: torch.Tensor, **options) -> list[Sharded]:
    return [part(full, start, numel, **options) for start, numel in SPANS]


def whole(shards: list[Sharded]) -> torch.Tensor:
    return torch.cat([one.local for one in shards]).view(shards[0].shape)


def parameter(body: Sharded) -> nn.Parameter:
    """An ordinary parameter whose body is then exchanged, as zk.shard does."""
    own = nn.Parameter(torch.zeros(body.shape, dtype=body.dtype))
    torch.utils.swap_tensors(own, nn.Parameter(body))
    return own


FULL = torch.arange(SHAPE.numel()).view(SHAPE).float()

ELEMENTWISE = {
    "ema": lambda p, q: p.detach().clone().mul_(0.9).add_(q, alpha=0.1),
    "lerp": lambda p, q: p.clone().lerp_(q, 0.1),
    "lerp_tensor": lambda p, q: p.lerp(q, torch.tensor(0.25)),
    "addcdiv": lambda p, q: p.addcdiv_(q, q.square().add(1.0), value=-0.01),
    "addcmul": lambda p, q: torch.addcmul(p, q, q, value=0.5),
    "arithmetic": lambda p, q: (2.0 - p) / (q.abs() + 1) ** 2 - p // 0.3 + -q % 2,
    "in_place": lambda p, q: p.__imul__(0.5).__isub__(q).__itruediv__(3.0),
    "clamp": lambda p, q: p.clamp_(-0.5, 0.5).clamp_min_(q),
    "where": lambda p, q: torch.where(p > q, p, torch.tensor(0.0)).masked_fill_(q < 0, 7.0),
    "predicates": lambda p, q: torch.isfinite(p / q) & ~(p == q) | (p != p),
    "out": lambda p, q: torch.add(p, q, out=torch.empty_like(p)),
    "unary": lambda p, q: p.exp_().log1p().sigmoid().neg().nan_to_num_(0.0).sign(),
    "fills": lambda p, q: p.zero_().add_(torch.ones_like(q)).mul_(torch.full_like(p, 3.0)).add_(q.fill_(0.25)),
    "dtypes": lambda p, q: (p.to(torch.bfloat16) * q.half()).float().double(),
    "copies": lambda p, q: p.copy_(q) + torch.zeros_like(p).copy_(0.5),
    "same_shape": lambda p, q: p.view(5, 7).view_as(q).expand(5, -1).reshape(5, 7).add_(1.0),
    "data": lambda p, q: (p.data.copy_(q.data), p)[1],
    "two_results": lambda p, q: torch.frexp(p)[0],
    "integers": lambda p, q: (p * 10).long().bitwise_and(3),
    "foreach": lambda p, q: torch._foreach_add(torch._foreach_mul([p, q], [2.0, 3.0]), [q, p], alpha=0.5)[1],
    "foreach_in_place": lambda p, q: (torch._foreach_lerp_([p], [q], 0.1), torch._foreach_sqrt_([p.abs_()]), p)[2],
    "foreach_adam": lambda p, q: (torch._foreach_addcdiv_([p], [q], [q.square() + 1], [-0.1]), p)[1],
    "foreach_tensor": lambda p, q: (torch._foreach_mul_([p, q], torch.tensor(0.5)), p + q)[1],
    "foreach_zero": lambda p, q: (torch._foreach_zero_([p]), torch._foreach_copy_([p], [q]), p)[2],
    "foreach_max": lambda p, q: torch._foreach_maximum([p], [q])[0],
    "full_operand": lambda p, q: p + FULL,
    "full_operand_left": lambda p, q: FULL.to(p.dtype) * p,
    "full_compared": lambda p, q: p == FULL,
    "full_in_place": lambda p, q: p.__iadd__(FULL.to(p.dtype)).lerp_(FULL.to(p.dtype), 0.25),
    "full_beside_two": lambda p, q: torch.addcmul(p, q, FULL.t().contiguous().t().to(p.dtype), value=0.5),
    "full_foreach": lambda p, q: (torch._foreach_add_([p, q], [FULL.to(p.dtype), q], alpha=2.0), p)[1],
}


@each("dtype", [torch.float32, torch.bfloat16])
@each("name", ELEMENTWISE)
@torch.no_grad()
def test_elementwise_work_on_parts_is_that_work_on_the_whole(name: str, dtype: torch.dtype) -> None:
    one, two = torch.randn(SHAPE, dtype=dtype), torch.randn(SHAPE, dtype=dtype)
    results = [ELEMENTWISE[name](*pair) for pair in zip(parts(one), parts(two), strict=True)]
    expected = ELEMENTWISE[name](one.clone(), two.clone())
    assert all(isinstance(result, Sharded) for result in results)
    assert {(result.shape, result.dtype, result.stride()) for result in results} == {
        (expected.shape, expected.dtype, expected.stride())
    }
    torch.testing.assert_close(whole(results), expected, equal_nan=True)


def callables() -> list[tuple[str, tuple]]:
    names = [name for name in dir(torch.Tensor) if not name.startswith("__") and callable(getattr(torch.Tensor, name))]
    return [
        (name, arguments)
        for name in names
        for arguments in ((), (0.5,), (2,), ("other",), ("other", "other"), ("full",), ("other", "full"))
    ]


@pytest.mark.filterwarnings("ignore")  # torch's own, about methods that it means to drop
@torch.no_grad()
def test_no_method_of_a_tensor_is_silently_wrong() -> None:
    """Every method that torch has: the part of what it gives on the whole tensor, or a refusal, or a fresh tensor."""
    full = torch.rand(4, 4) + 0.1
    right = refused = 0
    for name, arguments in callables():
        if name.startswith(("new", "empty")):
            continue
        try:
            whole_ones = [full.clone() if one in ("other", "full") else one for one in arguments]
            expected = getattr(full.clone(), name)(*whole_ones)
        except Exception:  # not a call that torch knows
            continue
        try:
            sharded_ones = [{"other": part(full, 3, 6), "full": full.clone()}.get(one, one) for one in arguments]
            result = getattr(part(full, 3, 6), name)(*sharded_ones)
        except ShardedUseError:
            refused += 1
            continue
        pairs = zip(result, expected, strict=True) if isinstance(result, tuple) and result else [(result, expected)]
        for got, want in pairs:
            if isinstance(want, torch.Tensor):
                assert isinstance(got, Sharded) and got.dtype == want.dtype and got.shape == want.shape, name
                span = want.reshape(-1)[3:9]
                torch.testing.assert_close(
                    got.local, span, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
                )
            else:
                assert got == want, name
        right += 1
    assert right > 300 and refused > 150


FUSED_SGD = dict.fromkeys(["weight_decay", "momentum", "lr", "dampening"], 0.0) | dict.fromkeys(
    ["nesterov", "maximize", "is_first_step"], False
)
REFUSED = {
    "sum": (lambda p: p.sum(), "zk.gathered"),
    "matmul": (lambda p: torch.ones(2, 5) @ p, "zk.gathered"),
    "matmul_left": (lambda p: p @ torch.ones(7, 2), "zk.gathered"),
    "linear": (lambda p: nn.functional.linear(torch.ones(2, 7), p), "zk.gathered"),
    "index": (lambda p: p[0], "zk.gathered"),
    "index_write": (lambda p: p.__setitem__(0, 1.0), "write=True"),
    "iterate": (lambda p: list(p), "zk.gathered"),
    "transpose": (lambda p: p.T, "zk.gathered"),
    "flatten": (lambda p: p.flatten(), "zk.gathered"),
    "equal": (lambda p: torch.equal(p, p), "zk.gathered"),
    "item": (lambda p: p.item(), "zk.gathered"),
    "bool": (lambda p: bool(p), "zk.gathered"),
    "float": (lambda p: float(p), "zk.gathered"),
    "tolist": (lambda p: p.tolist(), "zk.gathered"),
    "numpy": (lambda p: p.detach().numpy(), "zk.gathered"),
    "array": (lambda p: np.asarray(p.detach()), "zk.gathered"),
    "dlpack": (lambda p: torch.from_dlpack(p.detach()), "zk.gathered"),
    "pointer": (lambda p: p.data_ptr(), "zk.gathered"),
    "storage": (lambda p: p.untyped_storage(), "zk.gathered"),
    "share": (lambda p: p.detach().share_memory_(), "zk.gathered"),
    "norm": (lambda p: p.norm(), "zk.clip_grad_norm_"),
    "vector_norm": (lambda p: torch.linalg.vector_norm(p), "zk.clip_grad_norm_"),
    "foreach_norm": (lambda p: torch._foreach_norm([p]), "zk.clip_grad_norm_"),
    "foreach_max": (lambda p: torch._foreach_max([p]), "zk.gathered"),
    "normal": (lambda p: p.normal_(), "each rank"),
    "init": (lambda p: nn.init.xavier_uniform_(p), "each rank"),
    "rand_like": (lambda p: torch.rand_like(p), "each rank"),
    "dropout": (lambda p: nn.functional.dropout(p), "each rank"),
    "device": (lambda p: p.to("meta"), "Move the model before zk.shard"),
    "device_like": (lambda p: torch.empty_like(p, device="meta"), "Move the model before zk.shard"),
    "broadcast": (lambda p: p.mul_(torch.ones(7)), "sharded alike"),
    "broadcast_copy": (lambda p: p.copy_(torch.ones(7)), "sharded alike"),
    "other_layout": (lambda p: p.add_(part(torch.ones(SHAPE), 2, 12)), "elements 2:14 of 35"),
    "into_plain": (lambda p: torch.zeros(SHAPE).copy_(p), "to be written into"),
    "into_plain_add": (lambda p: torch.zeros(()).add_(p), "to be written into"),
    "foreach_into_plain": (lambda p: torch._foreach_add_([torch.zeros(SHAPE)], [p]), "to be written into"),
    "ema_of_full": (lambda p: torch._foreach_lerp_([torch.zeros(SHAPE)], [p], 0.1), "to be written into"),
    "deepcopy": (lambda p: copy.deepcopy(p), "before zk.shard"),
    "copy": (lambda p: copy.copy(p), "zk.gathered"),
    "pickle": (lambda p: pickle.dumps(p), "state_dict"),
    "save": (lambda p: torch.save({"w": p}, io.BytesIO()), "state_dict"),
    "set_data": (lambda p: setattr(p, "data", torch.ones(SHAPE)), "p.data.copy_"),
    "set_data_sharded": (lambda p: setattr(p, "data", p.detach() * 2), "p.data.copy_"),
    "hook": (lambda p: p.register_hook(print), "stage 2"),
    "accumulate_hook": (lambda p: p.register_post_accumulate_grad_hook(print), "stage 2"),
    "autograd_grad": (lambda p: torch.autograd.grad(torch.ones((), requires_grad=True) * 2, [p]), "backward()"),
    "fused": (lambda p: torch._fused_sgd_([p], [p.data], [], **FUSED_SGD), "zk.shards(model)"),
}


@each("name", REFUSED)
def test_what_needs_other_ranks_is_refused_and_taught(name: str) -> None:
    owner = parameter(part(torch.randn(SHAPE), 0, 12))
    before, version = owner.local.clone(), owner.local._version
    call, advice = REFUSED[name]
    with torch.no_grad(), pytest.raises(TypeError) as caught:
        call(owner)
    message = str(caught.value)
    assert "Sharded(parameter 'w', shape (5, 7), elements 0:12 of 35 here" in message
    assert advice in message
    assert torch.equal(owner.local, before) and owner.local._version == version


def test_what_is_shown_of_it() -> None:
    body = part(torch.ones(SHAPE, dtype=torch.float32), 12, 13, kind="gradient", dtype=torch.bfloat16)
    says = "Sharded(gradient 'w', shape (5, 7), elements 12:25 of 35 here, torch.bfloat16 (kept as torch.float32))"
    assert repr(body) == str(body) == f"{body}" == says
    assert "all 35 elements, " in repr(part(torch.ones(SHAPE), 0, 35))
    assert (body.ndim, body.numel(), len(body), body.stride()) == (2, 35, 5, (7, 1))
    assert body.is_contiguous() and body.device == torch.device("cpu") and body.is_floating_point()
    assert body.contiguous() is body and body.cpu() is body and body.to(torch.bfloat16) is body
    assert {body: 1}[body] == 1 and body in [torch.ones(1), body][1:] and (body == None) is False  # noqa: E711
    assert body.new_zeros(3).equal(torch.zeros(3, dtype=torch.bfloat16))


@each(
    "local, start, says",
    [(torch.ones(2, 2), 0, "1-D"), (torch.ones(4), 32, "start=32"), (torch.ones(4), -1, "start=-1")],
)
def test_a_part_that_does_not_fit_is_refused(local: torch.Tensor, start: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sharded(local, SHAPE, start)
    with pytest.raises(ValueError, match="kind='weight'"):
        Sharded(torch.ones(4), SHAPE, 0, kind="weight")


def test_the_shown_dtype_outlives_arithmetic_and_ends_with_a_conversion() -> None:
    gradient = part(torch.rand(SHAPE), 0, 12, kind="gradient", dtype=torch.bfloat16)
    exact = gradient.local.clone()
    for kept in (
        gradient * 0.5,
        gradient.detach().mul_(1.0),
        gradient.clone(),
        torch.zeros_like(gradient),
        gradient.data,
    ):
        assert (kept.dtype, kept.local.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal((gradient * 0.5).local, exact * 0.5)
    assert (
        gradient > 0
    ).dtype == torch.bool and gradient.float().local.dtype == gradient.float().dtype == torch.float32
    weight = part(torch.rand(SHAPE, dtype=torch.bfloat16), 0, 12)
    assert (weight + gradient).dtype == torch.bfloat16 and (weight * gradient.float()).dtype == torch.float32
    expected = weight.local.clone().add_(exact, alpha=-0.1)
    assert torch.equal(weight.add_(gradient, alpha=-0.1).local, expected)
    assert gradient.copy_(torch.full(SHAPE, 1.001)).local[0] == torch.tensor(1.001)


def test_a_zero_dim_parameter() -> None:
    here, elsewhere = (Sharded(torch.ones(numel), torch.Size([]), 0) for numel in (1, 0))
    for one in (here, elsewhere):
        assert one.mul_(3.0).add(torch.tensor(1.0)).copy_(torch.tensor(5.0)).shape == ()
        with pytest.raises(TypeError, match="float64 tensor"):  # beside it, a 0-dim tensor does decide the dtype
            one * torch.tensor(1.0, dtype=torch.float64)
    assert here.copy_(torch.tensor(5.0)).local.tolist() == [5.0]


def test_writes_bump_the_versions_of_local_and_of_what_shares_it() -> None:
    owner = parameter(part(torch.ones(SHAPE), 0, 12))
    writes = [
        lambda: owner.mul_(2.0),
        lambda: owner.data.copy_(torch.ones(SHAPE)),
        lambda: owner.detach().zero_(),
        lambda: torch._foreach_add_([owner, torch.ones(3)], 1.0),
        lambda: torch._foreach_copy_([owner], [torch.ones(SHAPE)]),
        lambda: torch.add(owner, 1.0, out=owner.data),
        lambda: nn.init.ones_(owner),
        lambda: owner.data.__imul__(0.5),
    ]
    for write in writes:
        version = owner.local._version
        with torch.no_grad():
            write()
        assert owner.local._version > version
    version = owner.local._version
    assert owner.detach().local is owner.local and owner.data.local is owner.local
    (owner.detach() * 2, owner.requires_grad_(False), repr(owner), owner.shape)
    assert owner.local._version == version


def test_inference_mode_works_on_it() -> None:
    owner = parameter(part(torch.ones(SHAPE), 0, 12))
    with torch.inference_mode():
        assert owner.mul_(2.0).add(1.0).mul_(2.0).local.tolist() == [6.0] * 12
    assert owner.local.tolist() == [2.0] * 12


def test_a_span_of_a_box() -> None:
    """What is left where dimensions are divided, and then flat elements: of the columns 3 to 5, five."""
    here = Spanned(torch.Size([4, 6]), (0, 3), (4, 3), 2, 5)
    whole = torch.arange(24.0).view(4, 6)
    one = Sharded.of(here.cut(whole).clone(), here)
    assert (one.shape, one.start, one.local.tolist()) == (whole.shape, 5, [5, 9, 10, 11, 15])
    assert (one + whole).local.tolist() == [10, 18, 20, 22, 30]
    assert one.is_same_layout(one.clone()) and not one.is_same_layout(Sharded(torch.zeros(5), whole.shape, 5))
    for item in one.__create_write_items__("w", None):
        at, sizes = item.index.offset, item.tensor_data.chunk.sizes
        box = whole[tuple(slice(a, a + size) for a, size in zip(at, sizes, strict=True))]
        assert torch.equal(one.__get_tensor_shard__(item.index), box)
    shown = here.show(one.span)
    assert here.show(one.span, shown) is shown
