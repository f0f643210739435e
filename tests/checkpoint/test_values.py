"""What is kept beside the tensors comes back exactly as it was, or is refused by its place."""

from __future__ import annotations

import enum
import json
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy
import pytest
import torch

from zerokern.checkpoint.extra import decode, encode
from zerokern.core.errors import StateError


def through_text(value: object) -> object:
    """As a checkpoint does it: JSON is written and read."""
    tree, tensors = encode(value)
    return decode(json.loads(json.dumps(tree, allow_nan=False)), tensors)


def test_values_come_back_equal_and_of_their_types() -> None:
    for value in [
        None, True, False, 0, -1, 2**64, -(2**200), "", "ü\n\0", b"", b"\x00\xff", 0.1, -0.0, 5e-324,
        1.7976931348623157e308, float("inf"), float("-inf"), 1 + 2j, complex("-0-infj"), [], [1, [2]], (),
        (1, (2, [3])), {}, {"map": {"dict": 1}}, {"tuple": [1]}, {1: 2, "1": 3, (1, 2): 4, None: 5, 2.5: 6, 7: 7},
        {True: 1}, torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1), OrderedDict(a=1, b=[2]),
        Counter({3: 2, 5: 1}), random.Random(7).getstate(), {b"k": {"": None}},
        {"float": "nan"}, [{"tensor": "extra.0"}],
    ]:  # fmt: skip
        again = through_text(value)
        assert again == value and type(again) is type(value), value
        assert repr(again) == repr(value)


def test_tensors_keep_every_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        tensor = torch.randint(0, 2, (3, 5)).to(dtype)
        tree, tensors = encode({"a": [tensor.t()], "b": torch.nn.Parameter(torch.ones(2)), "scalar": torch.tensor(3)})
        assert json.dumps(tree).count('"tensor"') == 3 and list(tensors) == ["extra.0", "extra.1", "extra.2"]
        again = decode(tree, tensors)
        found = again["a"][0]
        assert found.dtype == dtype and torch.equal(found.to(torch.complex64), tensor.t().to(torch.complex64))
        assert not again["b"].requires_grad


def test_numpy_keeps_type_and_shape() -> None:
    for name in "bool int8 uint16 int64 float16 float32 float64 complex128".split():
        square, scalar = numpy.array([[1, 0], [1, 1]], dtype=name)[::-1], numpy.zeros((), dtype=name)
        for value in (square, scalar, numpy.dtype(name).type(1), numpy.zeros((0, 3), dtype=name)):
            again = through_text(value)
            assert type(again) is type(value) and again.dtype == value.dtype and again.shape == value.shape
            assert numpy.array_equal(again, value)


def test_schedulers_and_scalers_come_back() -> None:
    def make() -> tuple[torch.optim.Optimizer, list]:
        opt = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        one = torch.optim.lr_scheduler
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9)
        return opt, [one.MultiStepLR(opt, [2, 5]), one.CosineAnnealingLR(opt, 10), one.OneCycleLR(opt, 1.0, 20), scaler]

    opt, saved = make()
    for _ in range(3):
        opt.step()
        for scheduler in saved[:3]:
            scheduler.step()
    scaler = saved[3]
    scaler.load_state_dict({**scaler.state_dict(), "scale": 128.0, "_growth_tracker": 4})
    _, fresh = make()
    for before, after in zip(saved, fresh, strict=True):
        tree, tensors = encode({"it": before})
        after.load_state_dict(decode(json.loads(json.dumps(tree))["map"]["it"], tensors))
        assert after.state_dict() == before.state_dict()
    assert decode(*encode([saved[0]]))[0]["milestones"] == Counter([2, 5])


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


Point = namedtuple("Point", "x y")


def test_what_cannot_be_saved_is_refused_by_its_place() -> None:
    for value, where in [
        ({"a": [1, 2, object()]}, r"extra\['a'\]\[2\] is an object, which"),
        ({"a": {4: (lambda: 0,)}}, r"extra\['a'\]\[4\]\[0\] is a function"),
        ([Color.RED], r"extra\[0\] is a Color, .* Save its name or its value"),
        ([Level.LOW], r"extra\[0\] is a Level, .* Save its name"),
        ([Point(1, 2)], r"extra\[0\] is a Point, .* a plain tuple: save tuple\(\.\.\.\)"),
        ([defaultdict(list)], r"extra\[0\] is a defaultdict, .* plain dict"),
        ([{1, 2}], r"extra\[0\] is a set"),
        ([torch.nn.Linear], r"extra\[0\] is a type"),
        ({frozenset(): 1}, r"a key of extra, frozenset\(\), is a frozenset"),
        ([torch.zeros(2, device="meta")], r"extra\[0\] is a Tensor \(torch.strided, on meta\)"),
        ([torch.zeros(2, 2).to_sparse()], r"extra\[0\] is a Tensor \(torch.sparse_coo"),
        ([numpy.array(["a"])], r"extra\[0\] is a numpy ndarray of <U1"),
        ([numpy.array([1], dtype=">i4")], r"extra\[0\] is a numpy ndarray of >i4"),
        ([numpy.datetime64("2026-01-01")], r"extra\[0\] is a numpy datetime64"),
        ([1 << 9000], r"extra\[0\] is an int of 9001 bits"),
    ]:
        with pytest.raises(TypeError, match=where):
            encode(value)


def test_what_contains_itself_is_refused() -> None:
    loop: list = [1]
    loop.append({"again": loop})
    with pytest.raises(TypeError, match=r"extra\[1\]\['again'\] contains itself"):
        encode(loop)
    twice = [1]
    assert through_text([twice, twice]) == [[1], [1]]


def test_a_tree_of_somebody_else_is_refused() -> None:
    trees = {"no form of a value": [{"pickle": "x"}, {}, {"tuple": [], "map": {}}]}
    trees |= {"names the tensor 'extra.9'": [{"tensor": "extra.9"}], "names the dtype": [{"dtype": "float99"}]}
    trees["names the dtype 'save'"] = [{"dtype": "save"}]
    for says, some in trees.items():
        for tree in some:
            with pytest.raises(StateError, match=says):
                decode(tree, {})
