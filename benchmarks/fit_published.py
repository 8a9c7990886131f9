"""Fit what a profile cannot say by published figures: shares of peaks, and what frameworks do, by the clock itself.

    python -m benchmarks.fit_published rows.csv --gpu a100 --free products.share=0.8 local.share=0.8

Fits on rows of `FITTED` (published_rows.py) only, of which it takes a few of each source, so that no source outweighs
the others. Damped Gauss-Newton on the logarithms of parameters and of times, with a loss that grows linearly for
outliers, and a weak pull to where it begins. Prints the parameters, which belong into src/shardwise/fit/profiles and
published_software.yaml. What a fit is worth for publishers that it has not seen, `python -m benchmarks.left_out` says.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.published_rows import Published, read_published
from shardwise.errors import ShardwiseError
from shardwise.fit.clock import RankProgram
from shardwise.fit.hardware import Hardware, hardware
from shardwise.fit.published import Run, hardware_of
from shardwise.fit.transformer_step import Job, parts_of_ranks, rank_programs, step_seconds_of, timed

Parameters = dict[str, float]
Array = npt.NDArray[np.float64]
GENERATIONS = {
    "a100": ("a100-80", "a100-40"),
    "v100": ("v100-32",),
    "h100": ("h100-sxm", "h200"),
    "gb200": ("b200", "b300", "gb200"),
    "gb300": ("gb300",),
}
PER_SOURCE = 40
MAX_STAGES = 40
"""Of the pipelines that are fitted: timing grows with them."""
LINEAR = 0.1
PULL = 0.0005


@dataclass
class Case:
    """A row whose programs are planned once, and timed with other parameters."""

    published: Published
    run: Run
    seconds: float
    weight: float = 1.0
    programs: dict[int, list[RankProgram]] = field(default_factory=dict)

    def predicted(self, parameters: Parameters) -> float:
        run = self.run
        name = run.software.match
        software = replace(run.software, launches=parameters.get(f"launches {name}", run.software.launches))
        passes = parameters.get(f"passes {name}", run.software.passes)
        job = replace(run.job, how=replace(run.job.how, passes=passes))
        machine = hardware_of(replace(run, software=software), with_parameters(hardware(run.gpu), parameters))
        works = [parts.work for parts in parts_of_ranks(job)]

        def seconds(one: Job) -> float:
            key = one.num_micro_batches
            if key not in self.programs:
                self.programs[key] = rank_programs(one)
            programs = [replace(program, work=work) for program, work in zip(self.programs[key], works, strict=True)]
            return timed(programs, one, machine).step_seconds

        return step_seconds_of(job, seconds)


def with_parameters(profile: Hardware, parameters: Mapping[str, float]) -> Hardware:
    """Parameters are named by the path of their field, such as `products.share` and `products_in.fp8.share`."""
    changed: dict[str, Any] = {}
    for path, value in parameters.items():
        if " " in path:
            continue
        bounded = min(1.0, value) if path.endswith("share") else value
        section, *keys = path.split(".")
        inner: Any = changed.get(section) or getattr(profile, section)
        if not keys:
            changed[section] = bounded
        elif len(keys) == 1:
            changed[section] = inner.model_copy(update={keys[0]: bounded})
        else:
            dtype, part = keys
            one = inner.get(dtype) or changed.get("products") or profile.products
            changed[section] = {**inner, dtype: one.model_copy(update={part: bounded})}
    return profile.model_copy(update=changed)


def cases_of(path: Path, gpus: Sequence[str], *, seed: int = 0, per_source: int = PER_SOURCE) -> list[Case]:
    chosen = random.Random(seed)
    by_source: dict[str, list[Published]] = {}
    for one in read_published(path):
        if one.run is None or not one.is_fitted or one.run.gpu not in gpus or one.run.job.offloads:
            continue
        if one.step_seconds is not None and one.run.job.pp * one.run.job.num_chunks <= MAX_STAGES:
            by_source.setdefault(one.source.split(" ")[0], []).append(one)
    found = []
    for name, rows in by_source.items():
        count = min(len(rows), per_source * (2 if "vTrain" in name else 1))
        for row in chosen.sample(rows, count):
            if row.run is None or row.step_seconds is None:
                continue
            try:
                case = Case(row, row.run, row.step_seconds, weight=min(1.0, count / 20) * 40 / count)
                case.predicted({})
                found.append(case)
            except ShardwiseError as error:
                print(f"left out: {row.source[:50]}: {error}")
    return found


def errors(cases: Sequence[Case], parameters: Parameters) -> Array:
    found: Array = np.log(np.array([case.predicted(parameters) / case.seconds for case in cases]))
    return found


def fit(cases: Sequence[Case], start: Parameters, steps: int) -> Iterator[Parameters]:
    names = list(start)
    begin = np.log([start[name] for name in names])
    weights = np.array([case.weight for case in cases])
    weights = weights / weights.sum()

    def named(at: Array) -> Parameters:
        return dict(zip(names, map(float, np.exp(at)), strict=True))

    def loss(error: Array, at: Array) -> float:
        spread = LINEAR**2 * (np.sqrt(1 + (error / LINEAR) ** 2) - 1)
        return float((weights * spread).sum() + 0.5 * PULL * ((at - begin) ** 2).sum())

    at, damping = begin.copy(), 1e-3
    error = errors(cases, named(at))
    for _ in range(steps):
        slopes = np.stack([(errors(cases, named(at + 0.02 * unit)) - error) / 0.02 for unit in np.eye(len(at))], axis=1)
        robust = weights / np.sqrt(1 + (error / LINEAR) ** 2)
        curvature = slopes.T @ (slopes * robust[:, None]) + PULL * np.eye(len(at))
        gradient = slopes.T @ (robust * error) + PULL * (at - begin)
        now = loss(error, at)
        for _ in range(5):
            step = np.clip(-np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient), -0.5, 0.5)
            tried = errors(cases, named(at + step))
            if loss(tried, at + step) < now:
                break
            damping = max(damping * 10, 0.1)
        else:
            return
        at, error, damping = at + step, tried, damping / 5
        yield named(at)


def by_source(cases: Sequence[Case], error: Array) -> str:
    found: dict[str, list[float]] = {}
    for case, one in zip(cases, error, strict=True):
        found.setdefault(case.published.source[:60], []).append(100 * (np.exp(one) - 1))
    return "\n".join(
        f"{len(some):4d} {name:60s} median {np.median(np.abs(some)):5.1f} % mean {np.mean(np.abs(some)):5.1f} % bias "
        f"{np.median(some):+5.1f} %"
        for name, some in found.items()
    )


def _rounded(found: Parameters) -> str:
    return json.dumps({name: float(f"{value:.4g}") for name, value in found.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--gpu", choices=GENERATIONS, required=True)
    parser.add_argument("--free", nargs="+", required=True, help="names of parameters, each with =START or not")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--per-source", type=int, default=PER_SOURCE)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cases = cases_of(given.rows, GENERATIONS[given.gpu], per_source=given.per_source)
    start = {name: float(value) for name, _, value in (one.rpartition("=") for one in given.free)}
    print(f"{len(cases)} rows\n{by_source(cases, errors(cases, start))}", flush=True)
    found = start
    for found in fit(cases, start, given.steps):
        print(_rounded(found), flush=True)
        if given.out:
            given.out.write_text(json.dumps(found))
    print(by_source(cases, errors(cases, found)))


if __name__ == "__main__":
    main()
