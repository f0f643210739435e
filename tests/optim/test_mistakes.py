"""Mistakes are told where they are made, with what to write instead."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from device_double import Double
from ranks import run_ranks
from tables import each
from torch import nn

import zerokern as zk


def model() -> nn.Module:
    return nn.Linear(4, 4)


@each("options", [{"max_grad_norm": 1.0}, {"tier": "cpu"}, {"schedule": "overlap"}, {"group": None}])
@each("kind", [zk.AdamW, zk.Adam, zk.Lion, zk.Adagrad, zk.SGD])
def test_what_is_no_option_of_a_group(kind: Any, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"param_group\['{name}'\].*one for all groups"):
        kind([{"params": list(model().parameters()), **options}], lr=1e-3)


def test_names_that_others_put_into_groups_stay() -> None:
    own = {"name": "all", "initial_lr": 1e-3, "team": "vision"}
    opt = zk.AdamW([{"params": list(model().parameters()), **own}])
    for group in (opt.param_groups[0], opt.state_dict()["param_groups"][0]):
        assert own.items() <= group.items()


def test_a_module_is_not_built() -> None:
    with pytest.raises(TypeError, match=r"zk\.build\(lambda: Model\(\)\).*zk\.shard\(model\)"):
        zk.build(model())  # type: ignore[arg-type]


def test_a_name_of_the_hub() -> None:
    with pytest.raises(zk.IoError, match=r'snapshot_download\("org/name"\)'):
        zk.load_pretrained(model(), "org/name")


def test_an_optimizer_says_what_it_does() -> None:
    said = repr(zk.AdamW(model().parameters(), tier="cpu", max_grad_norm=1.0))
    assert said.startswith("AdamW (tier='cpu', schedule='sync', max_grad_norm=1.0\nParameter Group 0\n")
    assert "state_format: fp32" in said


def stepped(kind: nn.Module, **options: Any) -> zk.AdamW:
    opt = zk.AdamW(kind.parameters(), lr=0.1, **options)
    kind(torch.ones(2, 4)).sum().backward()
    opt.step()
    opt.flush()
    return opt


def test_overlap_that_hides_nothing_warns() -> None:
    with pytest.warns(UserWarning, match=r'schedule="overlap" hides nothing here.*zk\.shard\(model\)'):
        stepped(model(), schedule="overlap")


@each("stage", [1, 2, 3])
def test_overlap_that_hides_something_does_not_warn(stage: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(zk.shard(model(), stage=stage), schedule="overlap")
        stepped(model(), schedule="sync")


@each("stage", [None, 0, 2, 3])
def test_an_infinite_limit_measures_the_norm_and_clips_nothing(stage: Any) -> None:
    torch.manual_seed(0)
    one = model()
    other = copy.deepcopy(one)
    if stage is not None:
        zk.shard(one, stage=stage), zk.shard(other, stage=stage)
    measured, plain = stepped(one, max_grad_norm=math.inf), stepped(other)
    with zk.gathered(one), zk.gathered(other):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
        squares = [p.numel() * 4.0 for p in one.parameters()]
    assert measured.grad_norm == pytest.approx(math.sqrt(sum(squares)), rel=1e-12)
    assert stage is not None or plain.grad_norm is None


@each("params", [
    lambda param: [param],
    lambda param: [{"params": param}],
    lambda param: [{"params": [nn.Parameter(torch.ones(1))]}, {"params": [param]}],
    lambda param: [("phase", param)],
])  # fmt: skip
@each("kind", [zk.AdamW, zk.SGD])
def test_complex_parameters_are_refused_where_the_optimizer_is_built(kind: Any, params: Any) -> None:
    param = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"dtype=torch\.complex64: must be torch\.float32.*torch\.view_as_real"):
        kind(params(param), lr=0.1)
    with pytest.raises(TypeError, match=r"complex64; allowed: dense, real tensors"):
        zk.shard(nn.ParameterList([param]))
    kind(params(param.requires_grad_(False)), lr=0.1)  # nothing updates it


def not_finite(opt: Any, weight: nn.Parameter, value: float = math.inf, **of_the_scaler: Any) -> list[str]:
    """What a step says whose gradient has such a number in it."""
    weight.grad = torch.tensor([1.0, value])
    for name, given in of_the_scaler.items():
        setattr(opt, name, torch.tensor(given))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        opt.step()
    return [str(one.message) for one in told]


@each("of_the_scaler, says", [
    ({}, "their norm is nan"),
    ({"grad_scale": 65536.0}, "their norm is nan, with a loss scale of 65536"),
    ({"grad_scale": 1024.0, "found_inf": 1.0}, "the GradScaler found an infinity or NaN, with a loss scale of 1024"),
])  # fmt: skip
def test_ten_skipped_steps_in_a_row_say_so_once(of_the_scaler: dict[str, float], says: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    opt = zk.AdamW([weight], lr=0.1, max_grad_norm=1.0)
    assert [not_finite(opt, weight, math.nan, **of_the_scaler) for _ in range(9)] == [[]] * 9
    (told,) = not_finite(opt, weight, math.nan, **of_the_scaler)
    assert f"10 steps in a row changed nothing, for their gradients were not finite: {says}. This is said once" in told
    assert [not_finite(opt, weight, math.nan, **of_the_scaler) for _ in range(15)] == [[]] * 15
    assert opt.skipped_steps == 25 and weight.tolist() == [1.0, 1.0]


@each("every", [1, 10])
def test_on_a_device_whoever_asks_how_many_were_skipped_is_told(every: int, double: Double) -> None:
    """The device decides, and a step waits for nothing: asking does."""
    with double.on(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        weight = nn.Parameter(torch.ones(2))
        opt = zk.AdamW([weight], lr=0.1, max_grad_norm=1.0)
        for step in range(1, 41):
            weight.grad = torch.tensor([1.0, 1.0 if step in (9, 18) else math.nan])
            opt.step()
            if step % every == 0:
                assert opt.skipped_steps == step - (step >= 9) - (step >= 18)
                assert len(told) == (step >= (28 if every == 1 else 30))
    assert "10 steps in a row changed nothing" in str(told[0].message)


@each("schedule", ["sync", "overlap"])
def test_skipped_steps_of_a_sharded_model_say_so_and_those_between_others_do_not(schedule: Any) -> None:
    one = zk.shard(model(), stage=2)
    opt = zk.AdamW(one.parameters(), lr=0.1, schedule=schedule)

    def steps(value: float, count: int) -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(count):
                one(torch.full((2, 4), value)).sum().backward()
                opt.step()
                opt.zero_grad()
            opt.flush()
        return [str(one_told.message) for one_told in told if "in a row" in str(one_told.message)]

    assert steps(math.inf, 9) == steps(1.0, 1) == steps(math.inf, 9) == steps(1.0, 1) == []
    assert len(steps(math.inf, 12)) == 1 and opt.skipped_steps == 30


@each("stage", [1, 3])
def test_a_write_that_zk_gathered_does_not_keep_is_told(stage: Any) -> None:
    one = zk.shard(model(), stage=stage)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with zk.gathered(one), torch.no_grad():
            one.weight.zero_()
        with zk.gathered(one, write=True), torch.no_grad():
            one.bias.zero_()
        with zk.gathered(one):  # no write: neither a pass, nor gradients
            one(torch.ones(1, 4)).sum().backward()
            one.zero_grad()
        with zk.gathered(one), zk.gathered(one.weight, write=True), torch.no_grad():
            one.weight.fill_(2.0)
    lost = [one_told for one_told in told if "zk.gathered" in str(one_told.message)]
    with zk.gathered(one):
        assert one.bias.tolist() == [0.0] * 4 and one.weight.flatten().tolist() == [2.0] * 16
    assert len(lost) == (stage == 3)  # below stage 3 it is the parameter itself that is written
    assert all("what was written to 'weight' within zk.gathered is gone" in str(one_told.message) for one_told in lost)
    assert all(one_told.filename == __file__ for one_told in lost)


def state_on_disk(rank: int, folder: str) -> tuple[list[str], list[float]]:
    torch.manual_seed(0)
    one = zk.shard(model(), stage=1)
    opt = stepped(one, tier=zk.Nvme(folder, ring_nbytes="1M"))
    made = sorted(path.name for path in Path(folder).iterdir())
    assert f"state-{rank}" in made and opt.state
    return made, one.weight.flatten().tolist()


def test_ranks_that_are_given_one_folder_make_one_each_below_it(tmp_path: Path) -> None:
    (folders, first), (_, second) = run_ranks(2, state_on_disk, str(tmp_path / "swap"))
    assert set(folders) <= {"state-0", "state-1"} and first == second
    torch.manual_seed(0)
    plain = model()
    stepped(plain)
    assert plain.weight.flatten().tolist() == first
