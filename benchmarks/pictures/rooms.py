"""Which rooms of the package import which, before the engine and the packages were put together anew, and now."""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.fresh import ROOT
from benchmarks.pictures.style import BLUE, FAINT, INK, LINE, MONO, area, bare, card

BEFORE = "75bafc4c"
"""The last commit before `Engine` was one class again, which began it."""
_DOTS = (1, 4, 0.4), (4, 16, 0.6), (16, 10_000, 0.85)
"""From so many imports on, and up to so many: the width of a dot, of a row's height."""
Arrows = Mapping[tuple[str, str], int]
"""By a room and one that it imports: how many of its modules' imports there are."""


def rooms() -> Figure:
    figure = card(
        11.2, 6.6, "Who imports whom", "a row imports the columns with a dot, larger for more imports; below the "
        "diagonal there would be rings"
    )  # fmt: skip
    for left, title, commit in ((0.25, "before", BEFORE), (5.75, "now", "HEAD")):
        arrows = arrows_of(sources_at(commit))
        names = in_order(arrows)
        axes = bare(area(figure, left, 0.2, 5.2, 5.4))
        said = f"{title}: {len(names)} rooms, {len(arrows)} arrows"
        axes.set_title(said, fontsize=10, color=INK, loc="left", fontweight="bold")
        _draw(axes, names, arrows)
    return figure


def sources_at(commit: str) -> dict[str, str]:
    """The modules of the package, by name."""
    done = subprocess.run(["git", "archive", commit, "src/shardwise"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.name.endswith(".py")}
        return {
            name.removeprefix("src/")
            .removesuffix(".py")
            .removesuffix("/__init__")
            .replace("/", "."): file.read().decode()
            for name, file in files.items()
            if file is not None
        }


def arrows_of(sources: Mapping[str, str]) -> Arrows:
    """Imports between rooms, those in functions and for types included."""
    found: Counter[tuple[str, str]] = Counter()
    for name, text in sources.items():
        for imported in _imports(text):
            here, there = _room(name), _room(imported)
            if here and there and here != there:
                found[here, there] += 1
    return found


def in_order(arrows: Arrows) -> list[str]:
    """The rooms, each before those that it imports as far as there is no ring: by how many they reach."""
    below: dict[str, set[str]] = {}
    for here, there in arrows:
        below.setdefault(here, set()).add(there)
        below.setdefault(there, set())
    return sorted(below, key=lambda room: (-len(_reached(room, below)), room))


def _reached(room: str, below: Mapping[str, Iterable[str]]) -> set[str]:
    found: set[str] = set()
    new = {room}
    while new:
        new = {other for one in new for other in below[one]} - found
        found |= new
    return found


def _imports(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shardwise"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("shardwise."))


def _room(module: str) -> str:
    """The package or loose module at the root in which it is; "" for the root itself."""
    _, _, inner = module.partition(".")
    room = inner.partition(".")[0]
    return "" if room in ("", "__main__") or not room.islower() else room


def _draw(axes: Axes, names: list[str], arrows: Arrows) -> None:
    size = len(names)
    font = min(7.5, 190 / size)
    axes.set_xlim(-0.22 * size, size)
    axes.set_ylim(size + 0.5, -1)
    axes.plot([0, size], [0, size], color=LINE, linewidth=0.8)
    place = {name: number + 0.5 for number, name in enumerate(names)}
    for name, at in place.items():
        axes.text(-0.4, at, name, fontsize=font, family=MONO, color=FAINT, ha="right", va="center")
    for least, most, width in _DOTS:  # a few sizes only, as each has a shape of its own in the file
        some = [arrow for arrow, number in arrows.items() if least <= number < most]
        across, down = [place[there] for _, there in some], [place[here] for here, _ in some]
        axes.scatter(across, down, s=(width * 300 / size) ** 2, color=BLUE, linewidths=0)
