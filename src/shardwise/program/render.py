"""A program as text, and back."""

from __future__ import annotations

from shardwise.program.action import Action, Block, Moment, Program


def render(program: Program) -> str:
    """One line per moment, one indented line per action, in columns. Moments with nothing due are kept:
    they are the order in which the units ran."""
    rows = [action.cells() for block in program for action in block.actions]
    widths = [max((len(row[i]) for row in rows if len(row) > i), default=0) for i in range(7)]
    lines = []
    for block in program:
        lines.append(str(block.moment))
        lines += [_line(action, widths) for action in block.actions]
    return "\n".join(lines) + "\n"


def parse(text: str) -> Program:
    """The program that `render` printed. Blank lines and lines that begin with # are passed over."""
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
