"""Parts as even as possible are those of `torch.tensor_split`."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.system.even_parts import even_bounds, even_sizes, even_start


@given(st.integers(0, 50), st.integers(1, 12))
def test_sizes_and_bounds(num_items: int, num_parts: int) -> None:
    parts = torch.arange(num_items).tensor_split(num_parts)
    assert even_sizes(num_items, num_parts) == [len(part) for part in parts]
    bounds = even_bounds(num_items, num_parts)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, num_items, num_parts + 1)
    assert [list(range(num_items))[bounds[at] : bounds[at + 1]] for at in range(num_parts)] == [
        part.tolist() for part in parts
    ]
    assert [even_start(num_items, num_parts, part) for part in range(num_parts + 1)] == bounds
