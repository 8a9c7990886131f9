"""A program as text, and back."""

from __future__ import annotations

import re

from shardwise.program.action import Action, Block, Moment, Program, actions_of

NUM_ENDS = 5
"""Actions of a long block that are shown at its beginning, and as many at its end."""


def render(program: Program) -> str:
    """One line per moment and one indented line per action, in columns. Moments without actions are kept, because they
    show the order in which the units ran."""
    rows = [action.cells() for action in actions_of(program)]
    widths = [max((len(row[i]) for row in rows if len(row) > i), default=0) for i in range(7)]
    lines = []
    for block in program:
        lines.append(str(block.moment))
        lines += [_line(action, widths) for action in block.actions]
    return "\n".join(lines) + "\n"


def parse(text: str) -> Program:
    """The program that `render` printed. Blank lines and lines that begin with # are skipped."""
    blocks: list[Block] = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if line[0].isspace() and blocks:
            last = blocks.pop()
            blocks.append(Block(last.moment, (*last.actions, Action.parse(line))))
        else:
            blocks.append(Block(Moment.parse(line)))
    return tuple(blocks)


def _line(action: Action, widths: list[int]) -> str:
    cells = action.cells()
    padded = [
        cell.rjust(width) if index == 5 else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=False))
    ]
    return ("    " + "  ".join(padded)).rstrip()


def shortened(text: str, num_moments: int = 6) -> str:
    """A rendered program without its repetitions: `num_moments` moments each from the beginning, from the turn from
    forward to backward, and from the end. Long moments lose their middle. The result still parses."""
    moments = [moment.splitlines() for moment in re.split(r"\n(?=\S)", text.rstrip("\n"))]
    turn = next((index for index, lines in enumerate(moments) if lines[0].startswith("before backward")), 0)
    near = num_moments // 2
    kept: list[str] = []
    num_left_out = 0
    for index, lines in enumerate(moments):
        if index < num_moments or index >= len(moments) - num_moments or turn - near <= index < turn + near:
            kept += [f"# ... {num_left_out} moments ..."] if num_left_out else []
            kept += _folded(lines)
            num_left_out = 0
        else:
            num_left_out += 1
    return "\n".join(kept) + "\n"


def _folded(lines: list[str]) -> list[str]:
    num_left_out = len(lines) - 2 * NUM_ENDS
    if num_left_out < 2:
        return lines
    return [*lines[:NUM_ENDS], f"    # ... {num_left_out} actions ...", *lines[-NUM_ENDS:]]
