"""Gathers run ahead of the computation, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.program.action import Action, Block, Program, by_flat


def prefetch(program: Program, full_bytes: Mapping[str, int], budget_bytes: int) -> Program:
    """Move every gather as far ahead as the budget allows.

    At no moment are more than `budget_bytes` of units gathered, or being gathered, before their own moment has come. A
    gather never passes the last use of its own flat buffer. `full_bytes` has the whole size of each flat buffer by
    name.
    """
    changed: dict[int, list[Action]] = {}
    """By block, its actions."""
    ahead = _AheadBytes(len(program))
    next_before = _next_before(program)
    last_use: dict[str, int] = {}
    for home, block in enumerate(program):
        if not block.actions:
            continue
        for flat, bundle in _bundles(block.actions).items():
            full = ahead.last_above(home, budget_bytes - full_bytes[flat], last_use.get(flat, -1))
            goal = next_before[full + 1]
            if goal >= home:
                continue
            left = changed.get(home, block.actions)
            changed[home] = [action for action in left if action not in bundle]
            changed[goal] = [*changed.get(goal, program[goal].actions), *bundle]
            ahead.add(goal, home, full_bytes[flat])
        last_use.update((action.flat, home) for action in block.actions)
    return tuple(
        Block(block.moment, tuple(changed[index])) if index in changed else block for index, block in enumerate(program)
    )


def _bundles(actions: tuple[Action, ...]) -> dict[str, list[Action]]:
    """The gathers of one block by flat buffer. Gathers over several axes stay together, with the fetch that precedes
    them."""
    return by_flat(one for one in actions if one.verb in ("gather", "fetch"))


def _next_before(program: Program) -> list[int]:
    """For each block, the first block from it on that precedes a computation; the number of blocks if there is none."""
    found = [len(program)] * (len(program) + 1)
    for index in range(len(program) - 1, -1, -1):
        found[index] = index if program[index].moment.edge == "before" else found[index + 1]
    return found


class _AheadBytes:
    """The bytes gathered ahead at each block. Most gathers run ahead of a few blocks, for which these are looked at one
    by one; others are found by a segment tree over the blocks, so that each takes logarithmic time even for thousands
    of units."""

    NEAR = 16

    def __init__(self, num_blocks: int) -> None:
        self._near = [0] * num_blocks
        """Right for the last `NEAR` blocks before the last gather."""
        self._new: list[tuple[int, int, int]] = []
        """What was added to the blocks, and not yet in the tree."""
        self._size = 1 << max(0, num_blocks - 1).bit_length()
        self._added = [0] * (2 * self._size)
        """Added to all blocks below a node."""
        self._most = [0] * (2 * self._size)
        """The most at any block below a node, without what was added above it."""

    def add(self, start: int, stop: int, num_bytes: int) -> None:
        """Add to the blocks `start` up to, but not including, `stop`, which is never less than before."""
        self._new.append((start, stop, num_bytes))
        for block in range(max(start, stop - self.NEAR), stop):
            self._near[block] += num_bytes

    def _add(self, node: int, low: int, high: int, start: int, stop: int, num_bytes: int) -> None:
        if stop <= low or high <= start:
            return
        if start <= low and high <= stop:
            self._added[node] += num_bytes
            self._most[node] += num_bytes
            return
        middle = (low + high) // 2
        self._add(2 * node, low, middle, start, stop, num_bytes)
        self._add(2 * node + 1, middle, high, start, stop, num_bytes)
        self._most[node] = self._added[node] + max(self._most[2 * node], self._most[2 * node + 1])

    def last_above(self, stop: int, limit_bytes: int, least: int) -> int:
        """The last block before `stop` with more than `limit_bytes` gathered ahead, or `least` if that is later."""
        first = max(stop - self.NEAR, least + 1)
        for block in range(stop - 1, first - 1, -1):
            if self._near[block] > limit_bytes:
                return block
        if first == least + 1:
            return least
        for added in self._new:
            self._add(1, 0, self._size, *added)
        self._new.clear()
        return max(least, self._last_above(1, 0, self._size, stop, limit_bytes))

    def _last_above(self, node: int, low: int, high: int, stop: int, limit_bytes: int) -> int:
        if stop <= low or self._most[node] <= limit_bytes:
            return -1
        if high - low == 1:
            return low
        middle, left_bytes = (low + high) // 2, limit_bytes - self._added[node]
        found = self._last_above(2 * node + 1, middle, high, stop, left_bytes)
        return found if found >= 0 else self._last_above(2 * node, low, middle, stop, left_bytes)
