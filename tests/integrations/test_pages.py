"""The pages of docs/ cannot rot: what they show runs, to the same losses on both sides; what they quote is said."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import doc_pages
import pytest
import torch
import torch.distributed as dist

import zerokern as zk
from zerokern.integrations.deepspeed_keys import KEYS

ERROR = 1e-4  # five steps, rounded in other places
ADOPTION = doc_pages.blocks("adoption.md")
SETUP = ADOPTION[0][1]
DIFFS = [text for language, text in ADOPTION if language == "diff"]
SHOWN = [text for language, text in ADOPTION[1:] if language == "python"]
CALL = re.compile(r"zk\.(\w+)\(([^()]*)\)?")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a block runs; the process group that it may start ends with it."""
    monkeypatch.chdir(tmp_path)
    (config,) = [text for language, text in ADOPTION if language == "json"]
    (tmp_path / "ds_config.json").write_text(config)
    yield tmp_path
    if dist.is_initialized():
        dist.destroy_process_group()


def run(*texts: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    torch.manual_seed(0)
    for text in texts:
        exec(compile(text, "a block of docs/", "exec"), names)
    return names


@pytest.mark.parametrize("diff", DIFFS, ids=range(len(DIFFS)))
def test_both_sides_come_to_the_same_losses(diff: str, folder: Path) -> None:
    before, after = doc_pages.sides(diff)
    ours = run(SETUP, after)["losses"]
    assert len(ours) >= 5 and ours[-1] < ours[0]
    if "deepspeed." not in before:
        assert run(SETUP, before)["losses"] == pytest.approx(ours, abs=ERROR)


@pytest.mark.parametrize("text", SHOWN, ids=range(len(SHOWN)))
def test_a_block_runs(text: str, folder: Path) -> None:
    run(SETUP, text)


def test_the_loops_of_frameworks_run(folder: Path) -> None:
    from hf_cases import fresh

    shown = [text for language, text in doc_pages.blocks("frameworks.md") if language == "python"]
    assert len(shown) >= 4
    for text in shown:
        with fresh():
            run(text)


def test_the_format_is_as_described(folder: Path) -> None:
    run(*(text for language, text in doc_pages.blocks("checkpoint-format.md") if language == "python"))


def test_deepspeeds_loop_means_what_ours_does(folder: Path) -> None:
    """That block cannot run without an engine; the losses are those of the batches as a whole."""
    (diff,) = [diff for diff in DIFFS if "deepspeed." in doc_pages.sides(diff)[0]]
    names = run(SETUP, doc_pages.sides(diff)[1])
    settings = names["settings"]
    assert (settings.shard["stage"], settings.accumulation, settings.arguments["tier"]) == (3, 2, "cpu")


def called(text: str) -> list[tuple[str, list[str]]]:
    """Functions of zk, with the keywords that they are shown with."""
    return [(name, re.findall(r"(\w+)=(?!=)", inside)) for name, inside in CALL.findall(text)]


def wrong_calls(text: str) -> list[str]:
    found = []
    for name, keywords in called(text):
        if name not in zk.__all__:
            found.append(f"zk.{name}")
            continue
        known = inspect.signature(getattr(zk, name)).parameters
        open_ended = any(one.kind is one.VAR_KEYWORD for one in known.values())
        found += [f"zk.{name}({word}=)" for word in keywords if word not in known and not open_ended]
    return found


def test_what_is_called_exists() -> None:
    for name in ("adoption.md", "troubleshooting.md", "checkpoint-format.md"):
        assert len(called(doc_pages.page(name))) >= 3
        assert wrong_calls(doc_pages.page(name)) == []
    wrong = "`zk.shard(model, level=3)`, `zk.fully(model)`, `zk.build(fn, stage=3)`"
    assert wrong_calls(wrong) == ["zk.shard(level=)", "zk.fully"]


def test_quoted_messages_exist() -> None:
    quotes = doc_pages.quoted("troubleshooting.md") + doc_pages.quoted("contract.md")
    assert [quote for quote in quotes if not doc_pages.is_said(quote, doc_pages.messages())] == []


def test_what_nobody_says_is_found() -> None:
    assert len(doc_pages.quoted("troubleshooting.md")) > 50
    texts = ("model … is sharded already; shard a model once", "the memory of …")
    assert doc_pages.is_said("… is sharded already; …", texts)
    assert not doc_pages.is_said("… is divided already", texts)
    assert not doc_pages.is_said("shard a model once … is sharded already", texts)


REAL: dict[str, Callable[[], Any]] = {
    "… is sharded already; shard a model once, as a whole": lambda: zk.shard(zk.shard(torch.nn.Linear(2, 2))),
    "… is on the meta device and has no values": lambda: zk.shard(torch.nn.Linear(2, 2, device="meta")),
    "needs all elements in memory here": lambda: zk.shard(torch.nn.Linear(2, 2), stage=3).weight.detach().numpy(),
    "is no checkpoint: there is no … in it": lambda: zk.load(".", torch.nn.Linear(2, 2)),
    "… is no key of DeepSpeed": lambda: zk.from_deepspeed({"zero_optimisation": {}}),
}


def test_messages_are_raised_as_quoted(folder: Path) -> None:
    for quote, work in REAL.items():
        assert quote in doc_pages.quoted("troubleshooting.md")
        with pytest.raises((ValueError, TypeError, zk.ZerokernError)) as raised:
            work()
        assert doc_pages.is_said(quote, (str(raised.value),))


KINDS = {
    "mapped": "Mapped", "ignored": "Ignored, and why", "yours": "Left to you", "refused": "Refused, and what to do",
}  # fmt: skip


def table_of_keys() -> str:
    """One row for each saying, with the keys that share it."""
    lines = []
    for kind, title in KINDS.items():
        rows: dict[str, list[str]] = {}
        for path, key in KEYS.items():
            if key.kind == kind:
                rows.setdefault(key.says, []).append(f"`{path}`")
        lines += [f"## {title}", "", "| key | |", "| --- | --- |"]
        lines += [f"| {', '.join(paths)} | {says} |" for says, paths in rows.items()] + [""]
    return "\n".join(lines)


def test_the_table_of_keys_is_that_of_the_code() -> None:
    """Replace what stands between the markers by what this says: python tests/integrations/test_pages.py."""
    between = doc_pages.page("deepspeed-keys.md").split("<!-- keys:begin -->\n")[1].split("<!-- keys:end -->")[0]
    assert between == table_of_keys()


if __name__ == "__main__":
    print(table_of_keys(), end="")
