"""Fingerprints: an edit of any kind shows, on every device and for every alignment; lists take one launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import SIZES
from tables import each
from torch import Tensor

from zerokern.kernels import ops, reference_device

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TILE = 16384
IMPLS = ["cpu", "reference"]


def values(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


def swapped(x: Tensor) -> Tensor:
    y = x.clone()
    y[0], y[1] = x[1], x[0]
    return y


EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "halved": lambda x: x * 0.5,
    "unscaled": lambda x: x * 2.0**-16,
    "negated": lambda x: -x,
    "zeroed": lambda x: x * 0,
    "turned round": lambda x: x.flip(0),
    "moved by one": lambda x: x.roll(1),
    "one swap": swapped,
    "the last element": lambda x: torch.cat([x[:-1], x[-1:] + 1]),
}


@each("kind", IMPLS)
@each("edit", EDITS)
@each("numel", [2, (1 << 12) + 3])
def test_every_edit_shows(numel: int, edit: str, kind: str) -> None:
    """Of random values, and of equal ones: of gradients of a sum. Equal ones do not show that they have moved."""
    for dtype in DTYPES:
        for x in (values(numel, dtype), torch.ones(numel, dtype=dtype)):
            edited = EDITS[edit](x)
            found = ops.fingerprints([x, edited], impl=None if kind == "cpu" else kind)
            assert (found[0] == found[1]) == torch.equal(x, edited)


@each("kind", IMPLS)
@each("factor", [0.5, 2.0**-16])
def test_a_power_of_two_shows_however_large_a_tensor_is(kind: str, factor: float) -> None:
    """It adds one number to the exponent of each element: a weighted sum of words is the same again modulo 2 ** 64."""
    x = torch.rand(1 << 23) + 0.1
    found = ops.fingerprints([x, x * factor], impl=None if kind == "cpu" else kind)
    assert found[0] != found[1]


def test_each_of_a_list_has_its_own() -> None:
    tensors = [values(numel, dtype) for numel in SIZES for dtype in DTYPES]
    for kind in (None, "reference"):
        together = ops.fingerprints(tensors, impl=kind)
        assert together.tolist() == [int(ops.fingerprints([one], impl=kind)) for one in tensors]


def test_what_is_no_list_of_contiguous_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        ops.fingerprints([torch.ones(4, 4)[:, 0]])
    with pytest.raises(TypeError, match="float64"):
        ops.fingerprints([torch.ones(4, dtype=torch.float64)])


class TestOnADevice:
    """The kernel: interpreted, or on a GPU."""

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")

    @pytest.fixture(autouse=True)
    def needs_triton(self) -> None:
        pytest.importorskip("triton", reason="needs triton")

    @each("dtype", DTYPES)
    def test_has_the_bits_of_its_reference(self, dtype: torch.dtype) -> None:
        sizes = (0, 1, 17, 2048, TILE - 1, TILE, TILE + 1, 2 * TILE + 77)
        tensors = [values(numel, dtype).to(self.device) for numel in sizes]
        expected = [int(reference_device.fingerprint(one.cpu())) for one in tensors]
        assert ops.fingerprints(tensors, impl="triton").tolist() == expected

    @each("dtype", DTYPES)
    def test_alignment_does_not_show(self, dtype: torch.dtype) -> None:
        x = values(TILE + 5, dtype).to(self.device)
        shifted = [torch.empty(x.numel() + i, dtype=dtype, device=self.device)[i:].copy_(x) for i in range(9)]
        assert len(set(ops.fingerprints(shifted, impl="triton").tolist())) == 1

    def test_widths_may_be_mixed_and_numbers_are_written_where_asked(self) -> None:
        tensors = [values(300, dtype).to(self.device) for dtype in DTYPES * 2]
        out = torch.full((6,), 77, dtype=torch.int64, device=self.device)
        for _ in range(2):
            assert ops.fingerprints(tensors, out, impl="triton") is out
            assert out.tolist() == [int(reference_device.fingerprint(one.cpu())) for one in tensors]

    def test_a_list_takes_one_launch_for_each_width(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from zerokern.kernels.triton import fingerprint

        launches = []
        original = fingerprint.fingerprint_tiles

        class Counted:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable:
                launches.append(grid)
                return original[grid]

        monkeypatch.setattr(fingerprint, "fingerprint_tiles", Counted())
        ops.fingerprints([values(numel).to(self.device) for numel in (5, 300, TILE + 1)], impl="triton")
        assert launches == [(4,)]
