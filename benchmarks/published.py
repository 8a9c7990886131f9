"""How well the clock and the memory of a transformer's step predict published runs.

    python -m benchmarks.published rows.csv [--json benchmarks/results/published.json]

Every row with enough columns is predicted. Rows that parameters were fitted on (`FITTED` in published_rows.py) and
rows that they were not are reported apart. The roofline beside is the arithmetic of the model, with what is
recomputed, at the peak rate, times the pipeline's bubble.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from benchmarks.published_rows import Published, read_published
from benchmarks.results_file import write_result
from shardwise.fit.operations import flops_of
from shardwise.fit.published import Prediction, predict

PUBLISHED_BY_OTHERS = (
    "vTrain, of its own runs, from profiled kernels: mean 8.4 % on one node, 14.7 % on up to 512 GPUs "
    "(arXiv:2312.12391)",
    "Calculon, of 8 Megatron runs: mean 3.7 %; without new tables, of vTrain's runs: mean 38.9 % on one node, 11.2 % "
    "on several (our runs of calculon-ai/calculon)",
)


@dataclass(frozen=True)
class Result:
    published: Published
    prediction: Prediction

    @property
    def error(self) -> float | None:
        """Of the step time, as a share of the measured one."""
        measured, predicted = self.published.step_seconds, self.prediction.step_seconds
        return None if measured is None or predicted is None else predicted / measured - 1

    @property
    def roofline_error(self) -> float | None:
        measured, run = self.published.step_seconds, self.published.run
        if measured is None or run is None:
            return None
        job = run.job
        layer = job.layers.layer(with_experts=job.model.experts is not None)
        head = job.layers.head()
        each = flops_of((*layer.forward, *layer.backward, *layer.weights, *layer.recompute))
        flops = each * job.model.num_layers + flops_of((*head.forward, *head.backward))
        slots = job.num_micro_batches + (job.pp - 1) / job.num_chunks
        peak = run.hardware().peak(job.how.product_dtype or job.how.dtype)
        return flops / job.pp / peak * slots / measured - 1


def results_of(path: Path) -> list[Result]:
    found = []
    for published in read_published(path):
        prediction = predict(published.row) if published.run is not None else Prediction(reason=published.reason)
        found.append(Result(published, prediction))
    return found


def regimes(result: Result) -> Iterable[str]:
    run = result.published.run
    if run is None:
        return
    job = run.job
    yield "experts" if job.model.experts is not None else "dense"
    yield run.gpu
    if job.offloads:
        yield "offload"
    elif job.zero == 3:
        yield "ZeRO-3, FSDP"
    elif job.pp > 1:
        yield "pipeline"
    elif job.how.tp > 1:
        yield "tensor parallel, no pipeline"
    else:
        yield "data parallel only"
    yield "one node" if job.world_size <= run.per_node else "several nodes"


def times(results: Sequence[Result]) -> dict[str, float]:
    """Of what was measured and predicted: errors in percent."""
    errors = [one.error for one in results if one.error is not None]
    if not errors:
        return {}
    sizes = sorted(map(abs, errors))
    naive = [abs(one.roofline_error) for one in results if one.error is not None and one.roofline_error is not None]
    return {
        "rows": len(errors),
        "median": 100 * median(sizes),
        "mean": 100 * mean(sizes),
        "bias": 100 * median(errors),
        "p90": 100 * sizes[int(0.9 * (len(sizes) - 1))],
        "roofline_median": 100 * median(naive),
    }


def verdicts(results: Sequence[Result], *, only_said: bool) -> dict[str, float]:
    """Whether runs fit: those of which a source says so, or with all that were measured."""
    known = [
        (one.prediction.fits, one.published.fits)
        for one in results
        if one.prediction.fits is not None
        and one.published.fits is not None
        and (not only_said or "fits" in one.published.measured)
    ]
    if not known:
        return {}
    return {
        "rows": len(known),
        "right": 100 * sum(predicted == truth for predicted, truth in known) / len(known),
        "false_fits": sum(predicted and not truth for predicted, truth in known),
        "false_oom": sum(truth and not predicted for predicted, truth in known),
    }


def grouped(results: Sequence[Result], keys: Callable[[Result], Iterable[str]]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for one in results:
        for key in keys(one):
            found.setdefault(key, []).append(one)
    return found


def source(result: Result) -> Iterable[str]:
    return (result.published.source,)


def _times_by(results: Sequence[Result], keys: Callable[[Result], Iterable[str]]) -> dict[str, dict[str, float]]:
    found = {name: times(some) for name, some in grouped(results, keys).items()}
    return {name: figures for name, figures in found.items() if figures}


def report(results: Sequence[Result]) -> dict[str, object]:
    fitted = [one for one in results if one.published.is_fitted]
    others = [one for one in results if not one.published.is_fitted]
    memory = grouped(results, source)
    return {
        "runs": len(results),
        "with a prediction": sum(one.prediction.step_seconds is not None for one in results),
        "step time": {"fitted on": times(fitted), "not fitted on": times(others)},
        "step time by source, not fitted on": _times_by(others, source),
        "step time by source, fitted on": _times_by(fitted, source),
        "step time by regime, not fitted on": _times_by(others, regimes),
        "fits, where sources say so": {
            "fitted on": verdicts(fitted, only_said=True),
            "not fitted on": verdicts(others, only_said=True),
        },
        "fits, with all that ran": {
            "fitted on": verdicts(fitted, only_said=False),
            "not fitted on": verdicts(others, only_said=False),
        },
        "fits by source, with all that ran": {
            name: verdicts(some, only_said=False) for name, some in memory.items() if verdicts(some, only_said=False)
        },
        "published by others": PUBLISHED_BY_OTHERS,
    }


def as_text(value: object, indent: str = "") -> str:
    if not isinstance(value, dict):
        return "\n".join(f"{indent}{one}" for one in value) if isinstance(value, tuple) else f"{indent}{value}"
    lines = []
    for name, inner in value.items():
        if isinstance(inner, dict) and inner and not any(isinstance(one, dict) for one in inner.values()):
            figures = "  ".join(f"{key} {figure:.1f}".replace(".0", "") for key, figure in inner.items())
            lines.append(f"{indent}{name[:72]:74s} {figures}")
        elif isinstance(inner, dict | tuple):
            lines += [f"{indent}{name}", as_text(inner, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {inner}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = report(results_of(given.rows))
    print(as_text(found))
    if given.json is not None:
        write_result(given.json, found)


if __name__ == "__main__":
    main()
