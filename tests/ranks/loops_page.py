"""The matrix as a page of the docs: `python tests/ranks/loops_page.py` writes docs/plain-loops.md."""

from __future__ import annotations

from pathlib import Path

import loops_cells  # noqa: F401  # all actions
from loops_matrix import ACTIONS, Action
from loops_verdicts import OPEN, REFUSED, REFUSED_WHERE_SHARDED

HEAD = """\
# Reference: plain PyTorch loops

What a plain PyTorch loop does with a model, an optimizer and a gradient, and what becomes of it. Every operation is
either **equal** to the same loop on one process, or refused with an error; nothing is ignored.
{counts}

- *Equal*: parameters, and all values that the loop reads, agree up to rounding, as closely as the plain loop agrees
  with itself when it runs its halves in the opposite order.
- Values of a rank's own half batch (its loss, a gradient inside a hook, `torch.autograd.grad`) are local; their mean
  over ranks is the plain loop's value.
- All ranks must do the same operations in the same order: reading a parameter or its `grad` is collective, and so is
  `model.state_dict()`.
- After a refusal nothing has changed and training can continue, unless the error states otherwise.
- A forward that writes to a parameter through `.data`, or as `F.batch_norm`'s running statistics, is detected, and
  refused, only while a pass is recorded: the first one and each that deviates from it. Torch does not count such
  writes, and checking every pass would cost time. In other passes the write is lost where parameters are gathered.
- `p.data = tensor` and `p.grad = tensor` copy. What `p.data` or `p.grad` was keeps its values, and so do views of it. A
  later write to `tensor`, which would be one to the parameter in PyTorch, is refused at the parameter's next use. It
  goes unseen if what was assigned is `tensor.data` or `tensor.detach()`. In the other direction nothing is shared:
  `tensor` does not follow the training.
- `torch.tensor(p)`, `torch.Tensor(p)`, `other.new_tensor(p)`, `torch.as_tensor(p, dtype=...)`,
  `torch.nested.nested_tensor([p])`, functions compiled by `torch.jit`, and `torch.vmap(f)(p)`, `torch.func.grad(f)(p)`
  and `vjp(f, p)` ask no tensor whether it can be read, so under `zero3` they are not refused: they find NaN, or, where
  ranks share memory, what another rank may be writing between a step and the next forward. `torch.tensor(p)` warns.
  Give them `p.detach().clone()`; `p.detach()` alone is refused.
- A view of a parameter that a forward returns (`self.positions[:n]`, `self.weight.detach()`), also in a list, a dict or
  a dataclass, or keeps in an attribute of a module (`self.kept = self.weight.t()`), is a copy where parameters are
  gathered: it passes gradients on, and does not follow later steps. One that it keeps elsewhere (in a closure, in an
  object that is no module), or in an attribute only in later passes than those that are recorded, has NaN once its unit
  is freed, or, where ranks share memory, what another rank may be writing from the next step on. Keep a `.clone()`.
- `p.detach().numpy()` has the values of that moment, and does not follow the training.
- Between forward and backward, a write by `p.data` goes through, as in PyTorch, and `p.data = tensor` does not:
  PyTorch's error in the backward says that the parameter was "modified by an inplace operation". Assign before the
  forward or after the backward.
- `optimizer.zero_grad()` drops the gradients of the optimizer's own parameters. Those of others stay and add up, as in
  PyTorch, and count if the parameters are clipped, or get a group, later; checkpoints have none of them.
  `engine.step()` drops all, and so does the only optimizer of a model in pipeline stages.

`tests/ranks/test_plain_loops.py` runs each operation under `zero3`, `zero2`, `zero1` and `ddp`, with shared memory and
with messages, and random combinations of them. {open}This page is written by `tests/ranks/loops_page.py`, from that
test's table.
"""


NOT_YET = """\
A line marked **not yet** is not equal so far; it says how it differs, and its test fails as soon as it is equal. """


def page() -> str:
    groups: dict[str, list[Action]] = {}
    for one in ACTIONS.values():
        groups.setdefault(one.group, []).append(one)
    refused = [one for one in ACTIONS.values() if one.name in REFUSED]
    equal = len(ACTIONS) - len(refused) - len(OPEN)
    counts = f"Of {len(ACTIONS)} operations {equal} are equal, {len(REFUSED_WHERE_SHARDED)} of them not under `zero3`."
    parts = [HEAD.replace("{open}", NOT_YET if OPEN else "").replace("{counts}", counts)]
    parts.append(_table("Refused", refused))
    parts += [_table(group, actions) for group, actions in groups.items()]
    return "\n".join(parts)


def _table(title: str, actions: list[Action]) -> str:
    rows = [f"| {_cell(one.about)} | {_verdict(one.name)} |" for one in actions]
    return "\n".join([f"## {title}", "", "| operation | result |", "|---|---|", *rows, ""])


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
