"""How well published runs are predicted by fits that have seen nothing of who published them.

    python -m benchmarks.left_out rows.csv [--gpu a100 h100 ...] [--json benchmarks/results/published-left-out.json]

For each publisher of rows that were fitted on (`FITTED` in published_rows.py), a device is fitted once more on all
others' rows alone, and every row of this publisher that has a time is predicted with it. What its frameworks do is
unknown then, too: those figures of published_software.yaml that are fitted have the values of a framework that nothing
is known of. Where a device has a single publisher, its sources are left out one by one. Fits begin at what a device
without any fit has, not at what the profiles say. Rows of publishers that nothing was fitted on are predicted as ever.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.fit_published import GENERATIONS, Case, Parameters, errors, fit
from benchmarks.published_rows import Published, read_published
from benchmarks.results_file import write_result
from shardwise.errors import ShardwiseError

PRODUCTS = {"products.share": 0.7, "products.half_area": 5e5}
LINKS = {"local.share": 0.8, "network.share": 0.8}
DEVICES: Mapping[str, Parameters] = {
    "a100": {**PRODUCTS, "products.half_depth": 256.0, "launch_norm": 8.0, **LINKS, "local.latency_seconds": 3e-6},
    "h100": PRODUCTS,
    "v100": {"network.share": 0.8},
    "gb200": {"products.share": 0.7, "products_in.fp4.share": 0.7},
    "gb300": {"products.share": 0.7, "products_in.fp4.share": 0.7},
}
"""What is fitted of each, and where that begins."""
FRAMEWORKS: Mapping[str, Sequence[str]] = {
    "passes": (
        "vtrain", "aleph-alpha", "mosaicml", "internlm", "202412_torchtitan.*compile", "202412_torchtitan",
        "torchtitan.*compile", "torchtitan", "nanotron", "tr3m", "experiments/gpt2.md",
    ),
    "launches": ("vtrain", "aleph-alpha", "experiments/gpt2.md"),
}  # fmt: skip
"""What is fitted of frameworks, by their `match`."""
UNKNOWN: Parameters = {f"{what} {match}": 1.0 for what, matches in FRAMEWORKS.items() for match in matches}
PER_SOURCE = 20
STEPS = 4


@dataclass(frozen=True)
class LeftOut:
    """Rows that a fit has not seen, and by how much their times are predicted wrong, in logarithms."""

    name: str
    generation: str
    found: Parameters
    errors: Sequence[float]
    num_fitted: int
    """Rows that it was fitted on."""

    @property
    def shares(self) -> list[float]:
        """The errors in percent of the measured time."""
        return [100 * (float(np.exp(error)) - 1) for error in self.errors]

    def figures(self) -> dict[str, float]:
        return figures_of(self.shares)

    def __str__(self) -> str:
        said = "  ".join(f"{name} {figure:.1f}" for name, figure in self.figures().items())
        return f"{self.generation:6s} {self.name[:56]:56s} {said}  fitted on {self.num_fitted}"


def figures_of(shares: Sequence[float]) -> dict[str, float]:
    sizes = np.abs(shares)
    return {
        "rows": len(shares),
        "median": float(np.median(sizes)),
        "mean": float(sizes.mean()),
        "bias": float(np.median(shares)),
    }


def publisher(published: Published) -> str:
    """The owner of the repository in which a source lies."""
    return published.source.split("/")[0].split(" ")[0]


def timed_cases(path: Path, generation: str) -> Iterator[Case]:
    """Every row of its devices with a time that is measured, and one that can be predicted."""
    for one in read_published(path):
        if one.run is None or one.step_seconds is None or one.run.gpu not in GENERATIONS[generation]:
            continue
        case = Case(one, one.run, one.step_seconds)
        try:
            case.predicted({})
        except ShardwiseError:
            continue
        yield case


def left_out(cases: Sequence[Case], generation: str, steps: int = STEPS) -> Iterator[LeftOut]:
    """Of one generation of devices, whose rows are `cases`: each publisher of rows that are fitted on, or each source
    of a single one."""
    fitted = [case for case in cases if case.published.is_fitted]
    by = publisher if len({publisher(case.published) for case in fitted}) > 1 else _source
    for name in dict.fromkeys(by(case.published) for case in fitted):
        own = [case for case in cases if by(case.published) == name]
        others = _sampled([case for case in fitted if by(case.published) != name])
        start = {**DEVICES[generation], **{key: UNKNOWN[key] for key in _frameworks(others)}}
        found = [start, *fit(others, start, steps)][-1] if others else start
        with_unknown = {**UNKNOWN, **found}
        yield LeftOut(name, generation, found, errors(own, with_unknown).tolist(), len(others))


def _source(published: Published) -> str:
    return published.source


def _frameworks(cases: Sequence[Case]) -> list[str]:
    """What is fitted of the frameworks of `cases`."""
    used = {case.run.software.match for case in cases}
    return [key for key in UNKNOWN if key.partition(" ")[2] in used]


def _sampled(cases: Sequence[Case]) -> list[Case]:
    """Some of each source, evenly by their place, so that none outweighs the others."""
    by_source: dict[str, list[Case]] = {}
    for case in cases:
        by_source.setdefault(case.published.source, []).append(case)
    found = []
    for some in by_source.values():
        count = min(len(some), PER_SOURCE)
        found += [some[len(some) * place // count] for place in range(count)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--gpu", choices=GENERATIONS, nargs="+", default=list(GENERATIONS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    for generation in given.gpu:
        for one in left_out(list(timed_cases(given.rows, generation)), generation, given.steps):
            print(one, flush=True)
            found.append(one)
    shares = [share for one in found for share in one.shares]
    print(f"all of them: {figures_of(shares)}")
    if given.json is not None:
        rows = {f"{one.generation} without {one.name}": one.figures() | {"found": one.found} for one in found}
        write_result(given.json, {"all": figures_of(shares), "left out": rows})


if __name__ == "__main__":
    main()
