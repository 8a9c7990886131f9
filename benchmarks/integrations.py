"""Scripts of other libraries in their own form and on our engine, in turns: losses, time of a step, peak memory.

Another system is a module like `integrations_huggingface.py`, with a function for each of its forms in `FORMS`, and its
entries in `ENTRIES` here.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.forks import begin_with, run_forks
from benchmarks.integrations_rank import SYSTEMS, measured
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.schedule import interleaved
from benchmarks.show import show_figures

NUM_RANKS = 2
TOLERANCE = 1e-5
MOST_SECONDS_OVER_ENGINE = 1.03
MOST_BYTES_OF_PEER = 0.9
ENGINE = "engine"
"""A plain loop over our engine."""


class Entry(NamedTuple):
    """One form of a script: the library, whose engine (`peer`, `ours`, or the plain loop), and the sharding."""

    system: str
    form: str
    sharding: str

    @property
    def name(self) -> str:
        return f"{self.system} {self.form} {self.sharding}"


_HUGGING_FACE = [
    Entry(system, form, sharding)
    for sharding in ("ddp", "zero3")
    for system in ("trainer", "accelerate")
    for form in ("peer", "ours")
]
_DEEPSPEED = [Entry("deepspeed", form, f"zero{stage}") for stage in (1, 2, 3) for form in ("peer", "ours")]
_LIGHTNING = [Entry("lightning", "peer", "ddp"), *(Entry("lightning", "ours", one) for one in ("ddp", "zero3"))]
_HUGGING_FACES = ("transformers", "accelerate")
NEEDS = {"trainer": _HUGGING_FACES, "accelerate": _HUGGING_FACES, "deepspeed": ("transformers", "deepspeed")}
NEEDS["lightning"] = ("transformers", "lightning")
IMPORTS = (
    "torch._dynamo", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "shardwise.engine",
    "benchmarks.integrations_rank",
)  # fmt: skip


def entries() -> list[Entry]:
    """Those whose libraries are installed, each behind the plain loop of its sharding."""
    there = [one for one in (*_HUGGING_FACE, *_LIGHTNING, *_DEEPSPEED) if all(map(find_spec, NEEDS[one.system]))]
    shardings = sorted({one.sharding for one in there})
    return [
        one
        for sharding in shardings
        for one in (Entry("plain", ENGINE, sharding), *(each for each in there if each.sharding == sharding))
    ]


def main(args: argparse.Namespace, console: Console) -> int:
    """0; 1 if a script trains otherwise on our engine than in its own form."""
    size, num_rounds, num_steps = ("tiny", 1, 3) if args.quick else ("small", args.rounds or 3, 5)
    chosen = {one.name: one for one in entries()}
    homes = {SYSTEMS[one.system] for one in chosen.values()}
    begin_with(
        (*IMPORTS, *sorted(homes)), ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
    )
    result: dict[str, Any] = header(args.note) | {"benchmark": "integrations", "size": size, "runs": []}
    for number, name in interleaved(list(chosen), num_rounds):
        one = chosen[name]
        ranks = run_forks(measured, *one, size, num_steps, num_ranks=NUM_RANKS, timeout_seconds=240)
        result["runs"].append({**one._asdict(), "round": number, "ranks": ranks})
        result["summary"] = [row._asdict() for row in summary_of(result["runs"])]
        file = write_result(args.out / "integrations.json", result)
    rows = summary_of(result["runs"])
    columns = [
        "script",
        "engine",
        "sharding",
        "ms/step",
        "CPU ms",
        "peak MiB",
        "x peer",
        "CPU",
        "memory",
        "x plain",
        "CPU",
    ]
    show_figures(f"{NUM_RANKS} ranks, {size}, fp32", columns, list(map(_line, rows)), console)
    wrong = [
        f"{row.system} {row.sharding}: the loss is {row.loss:.7f}, in its own form {row.peer_loss:.7f}."
        for row in rows
        if row.peer_loss is not None and abs(row.loss - row.peer_loss) > TOLERANCE * abs(row.peer_loss)
    ]
    for sentence in (*wrong, *missed(rows), f"\n{file}"):
        console.print(sentence, markup=False)
    return 1 if wrong else 0


class Row(NamedTuple):
    """One entry over all rounds: medians, and medians of ratios to its peer and to the plain loop in the same round."""

    system: str
    form: str
    sharding: str
    step_seconds: float
    cpu_seconds: float
    peak_bytes: float
    loss: float
    peer_loss: float | None
    seconds_of_peer: float | None
    cpu_of_peer: float | None
    bytes_of_peer: float | None
    seconds_of_engine: float | None
    cpu_of_engine: float | None


def summary_of(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """Of each run the slower and larger rank counts."""
    by_round = {
        (Entry(run["system"], run["form"], run["sharding"]), run["round"]): _worst(run["ranks"]) for run in runs
    }
    return [_row(one, by_round) for one in dict.fromkeys(entry for entry, _ in by_round)]


def _row(one: Entry, by_round: Mapping[tuple[Entry, int], Mapping[str, Any]]) -> Row:
    own = {number: figures for (entry, number), figures in by_round.items() if entry == one}

    def over(other: Entry | None, figure: str) -> float | None:
        ratios = [
            figures[figure] / by_round[other, number][figure]
            for number, figures in own.items()
            if other is not None and (other, number) in by_round
        ]
        return median(ratios) if ratios else None

    peer = one._replace(form="peer") if one.form == "ours" else None
    engine = Entry("plain", ENGINE, one.sharding) if one.form == "ours" else None
    losses = [figures["loss"] for (entry, _), figures in by_round.items() if entry == peer]
    middle = {name: median(figures[name] for figures in own.values()) for name in _FIGURES}
    return Row(
        **one._asdict(),
        **middle,
        loss=next(iter(own.values()))["loss"],
        peer_loss=losses[0] if losses else None,
        seconds_of_peer=over(peer, "step_seconds"),
        cpu_of_peer=over(peer, "cpu_seconds"),
        bytes_of_peer=over(peer, "peak_bytes"),
        seconds_of_engine=over(engine, "step_seconds"),
        cpu_of_engine=over(engine, "cpu_seconds"),
    )


_FIGURES = ("step_seconds", "cpu_seconds", "peak_bytes")


def _worst(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: max(rank[name] for rank in ranks) for name in _FIGURES} | {"loss": ranks[0]["loss"]}


def missed(rows: Sequence[Row]) -> list[str]:
    """A sentence for each of our aims that a row misses, by the processor's time where that is told."""
    found = []
    for row in rows:
        where = f"{row.system} {row.sharding}"
        if row.cpu_of_engine is not None and row.cpu_of_engine > MOST_SECONDS_OVER_ENGINE:
            found.append(f"{where}: {row.cpu_of_engine:.2f} of the plain loop's CPU time.")
        if row.seconds_of_peer is not None and row.seconds_of_peer > 1:
            found.append(f"{where}: {row.seconds_of_peer:.2f} of its own form's time.")
        if row.sharding != "ddp" and row.bytes_of_peer is not None and row.bytes_of_peer > MOST_BYTES_OF_PEER:
            found.append(f"{where}: {row.bytes_of_peer:.2f} of its own form's memory.")
    return found


def _line(row: Row) -> list[str]:
    ratios = (row.seconds_of_peer, row.cpu_of_peer, row.bytes_of_peer, row.seconds_of_engine, row.cpu_of_engine)
    times = [f"{seconds * 1000:.0f}" for seconds in (row.step_seconds, row.cpu_seconds)]
    shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
    return [row.system, row.form, row.sharding, *times, f"{row.peak_bytes / 2**20:.0f}", *shown]
