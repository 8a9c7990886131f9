"""Gathers run ahead of the computation, within a budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.program.action import Action, Block, Program


def prefetch(program: Program, full_bytes: Mapping[str, int], budget_bytes: int) -> Program:
    """Move every gather as far ahead as the budget allows.

    At no moment do more than `budget_bytes` of units lie gathered, or in flight, before their own
    moment has come. A gather never passes the last use of its own flat buffer. `full_bytes` has the
    whole size of each flat buffer by name.
    """
    blocks = [list(block.actions) for block in program]
    ahead_bytes = [0] * len(program)
    for home, block in enumerate(program):
        bundles = _bundles(block.actions)
        for flat, bundle in bundles.items():
            goal = _earliest(program, home, flat, ahead_bytes, full_bytes[flat], budget_bytes)
            if goal == home:
                continue
            blocks[home] = [action for action in blocks[home] if action not in bundle]
            blocks[goal] += bundle
            for index in range(goal, home):
                ahead_bytes[index] += full_bytes[flat]
    return tuple(Block(block.moment, tuple(actions)) for block, actions in zip(program, blocks, strict=True))


def _bundles(actions: tuple[Action, ...]) -> dict[str, list[Action]]:
    """The gathers of one block by flat buffer; several axes are several gathers, and stay together."""
    bundles: dict[str, list[Action]] = {}
    for action in actions:
        if action.verb == "gather":
            bundles.setdefault(action.flat, []).append(action)
    return bundles


def _earliest(
    program: Program, home: int, flat: str, ahead_bytes: list[int], flat_bytes: int, budget_bytes: int
) -> int:
    """The earliest block, a `before` one, into which the gather of `flat` that is due at `home` may move."""
    goal = home
    for index in range(home - 1, -1, -1):
        if ahead_bytes[index] + flat_bytes > budget_bytes:
            break
        if any(action.flat == flat for action in program[index].actions):
            break
        if program[index].moment.edge == "before":
            goal = index
    return goal
