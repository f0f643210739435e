"""A table runs to its end, names every row that failed, and keeps rows apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tables import each, pairwise


def test_every_row_runs_and_each_that_failed_is_named() -> None:
    ran = []

    @each("word", "ab")
    @each("number, sign", [(1, "+"), (2, "-")])
    def table(word: str, number: int, sign: str) -> None:
        ran.append((word, number, sign))
        assert number == 1, f"{number} is not one"

    with pytest.raises(AssertionError, match=r"2 of 4 rows failed:") as caught:
        table()
    assert ran == [("a", 1, "+"), ("a", 2, "-"), ("b", 1, "+"), ("b", 2, "-")]
    assert "word='a', number=2, sign='-': AssertionError: 2 is not one" in str(caught.value)


def test_a_row_that_skips_is_a_failure() -> None:
    @each("number", [1, 2])
    def table(number: int) -> None:
        pytest.skip("needs a CUDA GPU")

    with pytest.raises(AssertionError, match="2 of 2 rows failed"):
        table()


@each("number", [1, 2])
def test_rows_have_folders_and_patches_of_their_own(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(tmp_path.iterdir()) == [] and not hasattr(torch, "a_row")
    (tmp_path / "file").touch()
    monkeypatch.setattr(torch, "a_row", number, raising=False)


def test_random_numbers_depend_on_the_row_alone() -> None:
    drawn: dict[int, list[float]] = {1: [], 2: []}

    def draw(number: int) -> None:
        drawn[number].append(torch.rand(()).item())

    for rows in ([1, 2], [2, 1]):
        each("number", rows)(draw)()
    assert drawn[1][0] == drawn[1][1] != drawn[2][0] == drawn[2][1]


@pytest.mark.parametrize("every, count", [(False, 9), (True, 27)])
def test_pairs_meet_unless_every_row_is_asked_for(every: bool, count: int) -> None:
    ran = []

    @pairwise
    @each("a", range(3))
    @each("b", range(3))
    @each("c", range(3))
    def table(a: int, b: int, c: int, every: bool) -> None:
        ran.append((a, b, c))

    table(every=every)
    assert count <= len(ran) <= count + 3
    assert all(len({(row[i], row[j]) for row in ran}) == 9 for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_table_of_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="proves nothing"):
        each("number", [])
    with pytest.raises(AssertionError, match="takes no numbers"):
        each("numbers", [1])(lambda number: None)
