"""The matrix as a page of the docs: `python tests/ranks/loops_page.py` writes docs/plain-loops.md."""

from __future__ import annotations

from pathlib import Path

import loops_cells  # noqa: F401  # all actions
from loops_matrix import ACTIONS, Action
from loops_verdicts import OPEN, REFUSED, REFUSED_WHERE_SHARDED

HEAD = """\
# What a plain loop does

Whatever a plain PyTorch loop does with a model, an optimizer and a gradient is **equal** to the same loop on one
process, or it is refused with a sentence; nothing is ignored. `tests/ranks/test_plain_loops.py` runs every line below
under `zero3`, `zero2`, `zero1` and `ddp`, with memory in common and over messages, beside a plain loop that goes
through the same half batches in turn, and then many of them in drawn order.

*Equal* means that parameters, and what the loop reads, are the same to rounding, where rounding is what the plain loop
itself differs by when it takes its halves in the other order. What a rank sees of its own half batch (its loss, a
gradient inside of a hook, `torch.autograd.grad`) is its own, and the mean over ranks is the plain loop's. After a
refusal nothing has changed, and training can go on, unless it says otherwise. All ranks do the same things in the same
order: reading a parameter or its `grad` is collective, and so is `model.state_dict()`.

One thing is seen only while a pass is recorded, which is the first and each that differs from it: a forward that writes
to a parameter through `.data`. Torch counts no such write, and to look for it would cost something in every pass. Where
parameters are gathered it is lost; as any other write of a forward it is refused where it is seen.

{open}This page is written by `tests/ranks/loops_page.py`, from the table that the test goes by.
"""


NOT_YET = """\
A line with **not yet** does not keep this promise so far, and says how; its test fails as soon as it does.

"""


def page() -> str:
    groups: dict[str, list[Action]] = {}
    for one in ACTIONS.values():
        groups.setdefault(one.group, []).append(one)
    parts = [HEAD.replace("{open}", NOT_YET if OPEN else "")]
    for group, actions in groups.items():
        rows = [f"| {_cell(one.about)} | {_verdict(one.name)} |" for one in actions]
        parts.append("\n".join([f"## {group}", "", "| what the loop does | here |", "|---|---|", *rows, ""]))
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
