"""`python -m benchmarks.pictures [NAME ...]`: draw the pictures of the docs anew."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from benchmarks.fresh import ROOT
from benchmarks.pictures import jobs, plans, steps
from benchmarks.pictures.rooms import rooms
from benchmarks.pictures.style import save

FOLDER = ROOT / "docs" / "pictures"
MEASURED = ROOT / "runs" / "pictures"
"""What was measured for a picture, so that `--redraw` need not measure again."""
COMPUTED: dict[str, Callable[[], Figure]] = {
    "table-to-program": plans.table_to_program,
    "mesh": plans.ranks_in_a_mesh,
    "schedules": plans.stage_schedules,
    "rooms": rooms,
}
RUN: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], Figure]]] = {
    "overlap": (steps.measure_overlap, steps.draw_overlap),
    "memory": (steps.measure_memory, steps.draw_memory),
    "lost-rank": (jobs.measure_lost_rank, jobs.draw_lost_rank),
}
NAMES = (*COMPUTED, *RUN)


def figure_of(name: str, *, redraw: bool = False) -> Figure:
    """With `redraw`, from what was measured the last time."""
    if name in COMPUTED:
        return COMPUTED[name]()
    measure, draw = RUN[name]
    file = MEASURED / f"{name}.json"
    if not redraw:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(measure()))
    return draw(json.loads(file.read_text()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--redraw", action="store_true", help="from what was measured the last time")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in NAMES]
    if unknown:
        parser.error(f"no picture {unknown[0]!r}; there are {', '.join(NAMES)}")
    for name in args.names or NAMES:
        save(figure_of(name, redraw=args.redraw), FOLDER / f"{name}.svg")
        print(FOLDER / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
