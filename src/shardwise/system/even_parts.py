"""Parts as even as possible: where a number of items does not divide, earlier parts have one more, or it is padded."""

from __future__ import annotations

import math
from itertools import pairwise


def even_start(num_items: int, num_parts: int, part: int) -> int:
    """The first item of `part`; of the part after the last one, `num_items`."""
    least, more = divmod(num_items, num_parts)
    return part * least + min(part, more)


def even_bounds(num_items: int, num_parts: int) -> list[int]:
    """Where each part begins, and then `num_items`."""
    return [even_start(num_items, num_parts, part) for part in range(num_parts + 1)]


def even_sizes(num_items: int, num_parts: int) -> list[int]:
    """The number of items in each part."""
    return [stop - start for start, stop in pairwise(even_bounds(num_items, num_parts))]


def divisors(number: int) -> list[int]:
    """Into how many equal parts so many items can be divided."""
    low = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*low, *(number // one for one in low)})


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple
