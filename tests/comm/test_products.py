"""Rows that stand for a product: whatever meets in it meets in one of them, and they are few."""

from __future__ import annotations

import itertools

import pytest
from products import Array, where_they_meet

PRODUCT = list(itertools.product("abc", range(4), (True, False), "xy", range(3)))


def meetings(cases: list[tuple], meet: int) -> set[tuple]:
    return {one for case in cases for one in itertools.combinations(enumerate(case), meet)}


@pytest.mark.parametrize("meet, most", [(2, 18), (3, 60)])
def test_all_that_meet_in_the_product_meet_in_few_rows(meet: int, most: int) -> None:
    chosen = where_they_meet(PRODUCT, meet)
    assert meetings(chosen, meet) == meetings(PRODUCT, meet) and len(chosen) <= most < len(PRODUCT)


def test_what_never_meets_is_not_asked_for() -> None:
    cases = [case for case in PRODUCT if case[:2] != ("a", 0)]
    assert set(where_they_meet(cases, 2)) <= set(cases)


@pytest.mark.parametrize("meet, most", [(2, 18), (3, 60)])
def test_an_array_shows_all_that_its_rules_let_meet(meet: int, most: int) -> None:
    factors = dict(zip("pqrst", ["abc", range(4), (True, False), "xy", range(3)], strict=True))
    rules = [(("p", "q"), lambda p, q: p != "a" or q != 0), (("q", "r", "t"), lambda q, r, t: q != 3 or r or t == 1)]
    allowed = [one for one in PRODUCT if one[:2] != ("a", 0) and (one[1] != 3 or one[2] or one[4] == 1)]
    rows = [tuple(row.values()) for row in Array(factors, rules).rows(meet)]
    assert set(rows) <= set(allowed) and len(rows) <= most
    assert meetings(rows, meet) == meetings(allowed, meet)
    assert rows == [tuple(row.values()) for row in Array(factors, rules).rows(meet)]
