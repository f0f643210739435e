"""`zk.Muon(ns_form="gram")` and coefficients for each iteration: in steps, in checkpoints, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import zerokern as zk
from zerokern.examples.played_device import EMULATED_DRIVERS, PlayedDevice
from zerokern.kernels.gram import goes_by_gram
from zerokern.optim.matrices import BATCH_NUMEL

ALIGNMENT = 64  # of memory that torch allocates for a CPU
EACH = ((4.0, -6.0, 3.0), (3.0, -4.0, 2.0), (2.0, -1.5, 0.5))


def stepped(steps: int = 1, **settings: object) -> tuple[nn.Linear, zk.Muon]:
    torch.manual_seed(0)
    model = nn.Linear(2048, 128, bias=False)
    opt = zk.Muon(model.named_parameters(), lr=0.5, weight_decay=0.0, **settings)
    for _ in range(steps):
        model.weight.grad = torch.randn(128, 2048)
        opt.step()
    return model, opt


@pytest.mark.parametrize("settings", [{}, {"ns_coefficients": EACH, "ns_steps": 3}, {"tier": "cpu"}])
def test_it_differs_from_the_standard_form_by_rounding(settings: dict[str, object]) -> None:
    standard, mine = (stepped(2, ns_form=form, **settings)[0].weight for form in ("standard", "gram"))
    assert not torch.equal(standard, mine)
    torch.testing.assert_close(standard, mine, rtol=1e-4, atol=1e-5)


def test_what_is_updated_together_begins_where_a_matrix_alone_would() -> None:
    """They are multiplied one by one, where they lie in their batch, and bits may follow from how addresses are round:
    so each size of which a batch has room for two is a multiple of what memory is aligned to."""
    sizes = [
        (small, large)
        for small in range(1, math.isqrt(BATCH_NUMEL // 2) + 1)
        for large in range(small, BATCH_NUMEL // (2 * small) + 1)
        if goes_by_gram(small, large, torch.float32)
    ]
    assert (256, 1024) in sizes
    assert [one for one in sizes if math.prod(one) * torch.float32.itemsize % ALIGNMENT] == []


def test_a_list_of_equal_coefficients_has_the_bits_of_one() -> None:
    one, each = ((3.0, -4.0, 2.0), [[3.0, -4.0, 2.0]] * 5)
    found = [stepped(2, ns_coefficients=some)[0].weight for some in (one, each)]
    assert torch.equal(*found)


def test_a_checkpoint_keeps_both(tmp_path: Path) -> None:
    settings = {"ns_form": "gram", "ns_coefficients": EACH, "ns_steps": 3}
    model, opt = stepped(2, **settings)
    zk.save(tmp_path / "one", model, opt)
    other, theirs = stepped(0, **settings)
    zk.load(tmp_path / "one", other, theirs)
    group = theirs.param_groups[0]
    assert (group["ns_form"], len(group["ns_coefficients"])) == ("gram", 3)
    for mine, one in (model, opt), (other, theirs):
        mine.weight.grad = torch.ones(128, 2048)
        one.step()
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"ns_form": "gramm"}, ["ns_form='gramm'", "'standard' | 'gram'"]),
        ({"ns_coefficients": EACH}, ["ns_steps=5", "3, as many as ns_coefficients has triples"]),
        ({"ns_coefficients": ((1.0, 2.0),), "ns_steps": 1}, ["ns_coefficients[0]", "three finite numbers"]),
        ({"ns_coefficients": ()}, ["ns_coefficients=()", "three finite numbers"]),
        ({"ns_form": "gram", "ns_dtype": "bf16"}, ["ns_form='gram'", "'standard' with ns_dtype='bf16'", "'fp32'"]),
    ],
)
def test_what_is_refused(settings: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ValueError, match="ns_") as error:
        stepped(**settings)
    assert all(word in str(error.value) for word in words), error.value


def test_on_a_device_it_is_refused_when_made_and_before_a_step_writes() -> None:
    for place in [torch.device("meta"), PlayedDevice()]:
        weight = nn.Parameter(torch.ones(128, 2048, device=place if isinstance(place, torch.device) else None))
        if not isinstance(place, torch.device):
            EMULATED_DRIVERS[weight] = place
        with pytest.raises(ValueError, match=r"ns_form='gram'.*measured on CPUs alone"):
            zk.Muon([weight], ns_form="gram")
    model, opt = stepped(1, ns_form="gram")
    before = model.weight.detach().clone()
    EMULATED_DRIVERS[model.weight] = PlayedDevice()
    model.weight.grad = torch.ones(128, 2048)
    with pytest.raises(ValueError, match="measured on CPUs alone"):
        opt.step()
    assert torch.equal(model.weight, before)
