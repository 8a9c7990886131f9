"""The models of the zoo as a page of the docs: `python tests/extras/models_page.py` writes docs/models.md."""

from __future__ import annotations

from pathlib import Path

from zoo import CASES

HEAD = """\
# Tested models

`tests/extras/test_zoo.py` builds a small version of each model, with random weights and without dropout, and trains it
for three steps with AdamW: with `zero3` and `zero2` on two ranks, and in a plain loop on one process that runs the same
two half batches one after the other and steps with their mean gradient. The losses of each half batch and step, and all
parameters at the end, are **bit-identical**. Running statistics (BatchNorm) are not compared: a plain loop updates them
from both halves in turn, ranks update them from their own half, and all ranks then take rank 0's.

Models with a mixture of experts route the tokens of each half separately, in both loops. `make zoo` runs the test.
This page is written by `tests/extras/models_page.py`.
"""


def page() -> str:
    by_source: dict[str, list[str]] = {}
    for case in CASES.values():
        by_source.setdefault(case.source, []).append(f"`{case.name.removeprefix(case.source + '-')}`")
    rows = [f"| {source} | {len(names)} | {', '.join(names)} |" for source, names in by_source.items()]
    table = ["| library | models | names |", "|---|---:|---|", *rows, ""]
    return "\n".join([HEAD, f"{len(CASES)} models in total.", "", *table])


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "models.md").write_text(page())
