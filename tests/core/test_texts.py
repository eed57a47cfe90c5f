"""Tables and lists as text, as messages and reprs show them."""

from __future__ import annotations

from qtensor.core.texts import aligned, some


def test_columns_are_as_wide_as_their_longest_cell() -> None:
    rows = [("name", "bits"), ("a", "4"), ("longer", "")]
    assert aligned(rows) == ["name    bits", "a       4", "longer"]


def test_numbers_are_aligned_to_the_right() -> None:
    rows = [("name", "count"), ("a", "7")]
    assert aligned(rows, numbers_from=1) == ["name  count", "a         7"]


def test_a_long_list_is_cut() -> None:
    assert some("abc", 3) == "a, b, c"
    assert some("abcd", 3) == "a, b, c, ..."
    assert some([]) == ""
