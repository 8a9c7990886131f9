"""The search for functions that are nearly the same."""

from __future__ import annotations

import pytest

from tests.alike import alike

SUMS = '''
def first(values, limit):
    """Of what is allowed."""
    total = 0
    for value in values:
        if value.size < limit:
            total += value.size * 2
        else:
            raise ValueError(f"{value} is above {limit}")
    return [total, len(values), max(values, key=lambda one: one.size), min(values, key=lambda one: one.size)]
'''
COPIED = SUMS.replace("first", "second").replace("total", "found").replace("Of what", "All that").replace("* 2", "* 3")


def test_a_copy_with_other_names_and_numbers_is_found() -> None:
    assert alike({"a.py": SUMS, "b.py": COPIED}) == [(pytest.approx(1.0), "a.py:2 first", "b.py:2 second")]
    assert alike({"a.py": SUMS, "b.py": COPIED.replace(".size", ".rank").replace("key=", "default=")}) == []
