"""The matrix as a page of the docs: `python tests/ranks/loops_page.py` writes docs/plain-loops.md."""

from __future__ import annotations

from pathlib import Path

import loops_cells  # noqa: F401  # all actions
from loops_matrix import ACTIONS, Action
from loops_verdicts import OPEN, REFUSED, REFUSED_WHERE_SHARDED

HEAD = """\
# Plain PyTorch loops

Every operation below that a plain PyTorch loop does with a model, an optimizer and a gradient is either **equal** to
the same loop on one process, or refused with an error; nothing is ignored. `tests/ranks/test_plain_loops.py` runs each
one under `zero3`, `zero2`, `zero1` and `ddp`, with shared memory and with messages, and compares it with a plain loop
that runs the same half batches one after the other. It also runs random combinations of them.

*Equal* means that parameters, and all values that the loop reads, agree up to rounding: as closely as the plain loop
agrees with itself when it runs its halves in the opposite order. Values of a rank's own half batch (its loss, a
gradient inside a hook, `torch.autograd.grad`) are local; their mean over ranks is the plain loop's value. After a
refusal nothing has changed and training can continue, unless the error states otherwise. All ranks must do the same
operations in the same order: reading a parameter or its `grad` is collective, and so is `model.state_dict()`.

A forward that writes to a parameter through `.data` is detected only while a pass is recorded, which is the first pass
and each one that deviates from it. Torch does not count such writes, and checking every pass would cost time. Where
parameters are gathered the write is lost; when detected, it is refused like any other write in a forward.

{open}This page is written by `tests/ranks/loops_page.py`, from the test's table.
"""


NOT_YET = """\
A line marked **not yet** is not equal so far; it says how it differs, and its test fails as soon as it is equal.

"""


def page() -> str:
    groups: dict[str, list[Action]] = {}
    for one in ACTIONS.values():
        groups.setdefault(one.group, []).append(one)
    parts = [HEAD.replace("{open}", NOT_YET if OPEN else "")]
    for group, actions in groups.items():
        rows = [f"| {_cell(one.about)} | {_verdict(one.name)} |" for one in actions]
        parts.append("\n".join([f"## {group}", "", "| operation | result |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _verdict(name: str) -> str:
    if name in OPEN:
        return f"**not yet**: {OPEN[name]}"
    if name in REFUSED_WHERE_SHARDED:
        return f"equal; under `zero3` {_said(REFUSED_WHERE_SHARDED[name])}"
    return _said(REFUSED.get(name, ""))


def _said(words: str) -> str:
    return f"refused: \u201c… {_cell(words)} …\u201d" if words else "equal"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "plain-loops.md").write_text(page())
