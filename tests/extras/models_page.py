"""The models of the zoo as a page of the docs: `python tests/extras/models_page.py` writes docs/models.md."""

from __future__ import annotations

from pathlib import Path

from zoo import CASES

HEAD = """\
# Models that were tried

`tests/extras/test_zoo.py` builds each of these small, with random weights and dropout off, and trains it for three
steps with AdamW: under `zero3` and `zero2` on two ranks, and in a plain loop on one process that goes through the same
two half batches in turn and steps on their mean gradient. Compared are the losses of each half batch and step, and all
parameters at the end: they have **the same bits**. What is not compared are running statistics (BatchNorm), which a
plain loop updates from both halves in turn, and ranks from their own; all ranks have rank 0's.

Models with a mixture of experts route the tokens of each half on their own, in both loops. `make extras` runs the test.
This page is written by `tests/extras/models_page.py`.
"""


def page() -> str:
    by_source: dict[str, list[str]] = {}
    for case in CASES.values():
        by_source.setdefault(case.source, []).append(f"`{case.name.removeprefix(case.source + '-')}`")
    rows = [f"| {source} | {len(names)} | {', '.join(names)} |" for source, names in by_source.items()]
    table = ["| library | models | by name |", "|---|---:|---|", *rows, ""]
    return "\n".join([HEAD, f"In all {len(CASES)} models.", "", *table])


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "models.md").write_text(page())
