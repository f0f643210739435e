"""Whatever becomes of our own files: an error of ours before anything is changed, or the values that were saved."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zerokern as zk
from zerokern.checkpoint import rng
from zerokern.checkpoint.rng import get_state
from zerokern.core import native
from zerokern.core.errors import StateError, ZerokernError

MANY = pytest.mark.slow


def trained(value: float = 1.0) -> tuple[torch.nn.Module, zk.AdamW]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5))
    opt = zk.AdamW(model.parameters(), lr=value)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    model(torch.eye(6)).square().sum().backward()
    opt.step()
    return model, opt


def everything(model: torch.nn.Module, opt: zk.AdamW) -> dict[str, Any]:
    """All that a load could have changed."""
    found = {name: one.clone() for name, one in model.state_dict().items()}
    for number, entry in opt.state_dict()["state"].items():
        found |= {f"{number}.{key}": one.clone() for key, one in entry.items()}
    return found | {"lr": torch.tensor(opt.param_groups[0]["lr"])}


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    model, opt = trained()
    extra = {"step": 3, "tensor": torch.arange(5), "nested": {"a": [1, (2, 3)], "b": float("inf")}}
    zk.save(tmp_path / "c", model, opt, extra=extra)
    return tmp_path / "c", everything(model, opt)


def tried(folder: Path, wanted: dict[str, Any] | None) -> bool:
    """Loads; whether it was refused, and then without a change. `wanted`: what may have been loaded otherwise."""
    model, opt = trained(2.0)
    before, generators = everything(model, opt), get_state()
    try:
        zk.load(folder, model, opt)
    except (ZerokernError, ValueError, TypeError):
        assert alike(everything(model, opt), before) and get_state() == generators
        opt.step()
        return True
    assert wanted is None or alike(everything(model, opt), wanted)
    return False


@pytest.mark.parametrize("count", [6, pytest.param(30, marks=MANY)])
def test_a_flipped_bit_is_noticed_or_harmless(saved: tuple[Path, dict[str, Any]], count: int) -> None:
    folder, wanted = saved
    for path in (folder / "zerokern.json", next(folder.glob("*.distcp")), folder / ".metadata"):
        flipped(folder, path, wanted, count)


def flipped(folder: Path, path: Path, wanted: dict[str, Any], count: int) -> None:
    whole = path.read_bytes()
    for number in range(count):
        at = number * len(whole) // count
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << number % 8]) + whole[at + 1 :])
        refused = tried(folder, wanted)
        assert refused == (path.name != ".metadata"), at  # torch's index is not looked at, and all else counts
    path.write_bytes(whole)
    assert not tried(folder, wanted)


def sealed(folder: Path, body: Any) -> None:
    """An index whose checksum somebody has made right again."""
    text = json.dumps(body).encode() + b"\n"
    head = b'{"zerokern": 1, "crc32c": "%08x"}\n' % native.library().zk_crc32c(0, text, len(text))
    (folder / "zerokern.json").write_bytes(head + text)


def index_of(folder: Path) -> Any:
    return json.loads((folder / "zerokern.json").read_bytes().partition(b"\n")[2])


ODD = [None, True, 0, -1, 1, 1 << 62, 1 << 70, 0.5, "", "x", [], {}, [[]], [None], {"x": 1}, {"all": None}, {"map": 3}]


def places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container with every key in it."""
    pairs = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    return [(tree, key) for key, _ in pairs] + [place for _, one in pairs for place in places(one)]


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 20), marks=MANY)])
def test_nonsense_under_a_sound_checksum_is_refused_without_a_change(
    saved: tuple[Path, dict[str, Any]], seeds: range
) -> None:
    body = json.dumps(index_of(saved[0]))
    for rolls in map(random.Random, seeds):
        for _ in range(8):
            changed = json.loads(body)
            tree, key = rolls.choice(places(changed))
            if rolls.random() < 0.3:
                del tree[key]
            else:
                tree[key] = rolls.choice(ODD)
            sealed(saved[0], changed)
            tried(saved[0], None)


def deep(body: Any) -> None:
    tree: Any = []
    for _ in range(900):
        tree = [tree]
    body["values"]["extra"]["step"] = {"all": tree}


def overlap(row: Any) -> None:
    where = row[2][:4]
    row[2] = [*where, 0, 0, 3, 5, *where, 2, 0, 3, 5]


CRAFTED: dict[str, Callable[[Any], object]] = {
    "nested": deep,
    "no ranks drew numbers": lambda body: body["values"]["rng"].__setitem__("world", 0),
    "no width": lambda body: body["values"]["rng"].__setitem__("width", -1),
    "a shape of words": lambda body: next(iter(body["tensors"].values())).__setitem__(1, ["a"]),
    "a dtype that is none": lambda body: next(iter(body["tensors"].values())).__setitem__(0, "float7"),
    "a tensor that is not there": lambda body: body["values"]["extra"]["tensor"].__setitem__("all", {"tensor": "no"}),
    "values in a list": lambda body: body.__setitem__("values", []),
    "groups of numbers": lambda body: body["values"].__setitem__("groups", [3]),
    "beside in a list": lambda body: body["values"]["optimizers"][0].__setitem__("beside", []),
    "a norm of words": lambda body: body["values"]["optimizers"][0]["counters"].__setitem__("grad_norm", "x"),
    "steps not counted": lambda body: body["values"]["optimizers"][0]["counters"].pop("skipped_steps"),
    "state of no module": lambda body: body["values"].__setitem__("extra_state", [3]),
    "boxes in one place": lambda body: overlap(body["tensors"]["model.0.weight"]),
}


def test_crafted_indexes_are_refused_in_words(saved: tuple[Path, dict[str, Any]]) -> None:
    whole = json.dumps(index_of(saved[0]))
    for name, change in CRAFTED.items():
        change(body := json.loads(whole))
        sealed(saved[0], body)
        assert tried(saved[0], None), name
    text = b"[" * 100_000 + b"]" * 100_000 + b"\n"
    head = b'{"zerokern": 1, "crc32c": "%08x"}\n' % native.library().zk_crc32c(0, text, len(text))
    (saved[0] / "zerokern.json").write_bytes(head + text)  # nested beyond reading
    assert tried(saved[0], None)


DRAWN: dict[str, Callable[[Any], object]] = {
    "no word of Python's": lambda states: states.pop("python"),
    "too few words": lambda states: states["python"][1].pop(),
    "words that are none": lambda states: states["python"][1].__setitem__(3, -1),
    "a drawn word": lambda states: states["python"].__setitem__(2, "x"),
    "half of torch's": lambda states: states.__setitem__("torch", states["torch"][:5000]),
    "torch's is nonsense": lambda states: states.__setitem__("torch", "ff" * (len(states["torch"]) // 2)),
    "another kind of NumPy's": lambda states: states.__setitem__("numpy", ["x", "", 0, 0, 0.0]),
}


def test_random_states_that_nobody_can_go_on_from_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = json.dumps(json.loads(get_state()))
    for name, change in DRAWN.items():
        change(states := json.loads(before))
        with monkeypatch.context() as patched:
            patched.setattr(rng, "get_state", lambda states=states: json.dumps(states).encode())
            zk.save(tmp_path / name, *trained())
            assert tried(tmp_path / name, None), name
            into = trained(2.0)
            with pytest.raises(StateError, match="load with rng=False"):
                zk.load(tmp_path / name, *into)
            zk.load(tmp_path / name, *into, rng=False)
