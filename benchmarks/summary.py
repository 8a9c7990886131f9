"""What many runs come to: medians, ratios, and whether all engines trained the same. Pure: runs in, rows out.

[Note: ratios] Other work on a machine comes and goes over minutes. A ratio is therefore taken within a round,
where its two runs were neighbours in time, and the median of the rounds' ratios is what is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.names import COUNTERPARTS, OF_ONE_BATCH, REFERENCE, SINGLE

# Largest distance of an engine's loss from the reference's, as a share of the latter. In fp32 only the order of
# sums differs; in bf16 also whether gradients travel, and are summed, in bf16 or in fp32.
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}


@dataclass(frozen=True)
class Run:
    """One engine's run in one round: the figures of its ranks, or why there are none."""

    size: str
    dtype: str
    engine: str
    round: int
    ranks: tuple[dict[str, Any], ...] = ()
    error: str = ""
    others_cores: float = 0.0
    """Cores that other processes of the machine used meanwhile, on average."""

    @property
    def seconds(self) -> float:
        """Median step of the slowest rank."""
        return max(float(median(rank["step_seconds"])) for rank in self.ranks)

    @property
    def cpu_seconds(self) -> float:
        return max(float(rank["cpu_seconds"]) for rank in self.ranks)

    @property
    def peak_bytes(self) -> int:
        """Of the rank that took most."""
        return max(int(rank["peak_bytes"]) for rank in self.ranks)

    @property
    def over_promised(self) -> float | None:
        """The peak as a multiple of what the engine promised, on the rank where that is most."""
        told = [(rank["peak_bytes"], rank["promised_bytes"]) for rank in self.ranks if rank.get("promised_bytes")]
        return max(peak / promised for peak, promised in told) if told else None

    @property
    def sent_bytes(self) -> float | None:
        told = [rank["sent_bytes"] for rank in self.ranks if rank["sent_bytes"] is not None]
        return max(told) if told else None

    @property
    def loss(self) -> float:
        """The mean over ranks, of which each has a micro-batch of the same length."""
        return fmean(rank["loss"] for rank in self.ranks)


@dataclass(frozen=True)
class Row:
    """One engine in one race. `loss_off` is the distance from the reference, as a share of it."""

    engine: str
    rounds: int
    seconds: float
    fastest_seconds: float
    slowest_seconds: float
    cpu_seconds: float
    over_single: float | None
    peak_bytes: float
    over_promised: float | None
    sent_bytes: float | None
    loss: float
    loss_off: float | None
    agrees: bool | None


@dataclass(frozen=True)
class Ratio:
    """How many times our figure a peer's is, for the same sharding: above 1, the peer takes more."""

    ours: str
    peer: str
    seconds: float
    cpu_seconds: float
    peak_bytes: float


def races_of(runs: Iterable[Run]) -> list[tuple[str, str]]:
    """The pairs of size and dtype that were run, in the order in which they were."""
    return list(dict.fromkeys((run.size, run.dtype) for run in runs))


def rows_of(runs: Sequence[Run], size: str, dtype: str) -> list[Row]:
    """A row per engine, in the order in which they first ran; the reference has none."""
    done = _done(runs, size, dtype)
    reference = done.get(REFERENCE, {})
    loss = next(iter(reference.values())).loss if reference else None
    return [
        _row(engine, rounds, done.get(SINGLE, {}), loss, TOLERANCE[dtype])
        for engine, rounds in done.items()
        if engine != REFERENCE
    ]


def ratios_of(runs: Sequence[Run], size: str, dtype: str) -> list[Ratio]:
    """Each of our engines against those peers that shard as it does, where both ran in the same rounds."""
    done = _done(runs, size, dtype)
    ratios = []
    for ours, peers in COUNTERPARTS.items():
        for peer in peers:
            pairs = _pairs(done.get(peer, {}), done.get(ours, {}))
            if pairs:
                ratios.append(
                    Ratio(
                        ours,
                        peer,
                        seconds=median(theirs.seconds / own.seconds for theirs, own in pairs),
                        cpu_seconds=median(theirs.cpu_seconds / own.cpu_seconds for theirs, own in pairs),
                        peak_bytes=median(theirs.peak_bytes / own.peak_bytes for theirs, own in pairs),
                    )
                )
    return ratios


def others_cores_of(runs: Iterable[Run]) -> float:
    """What others used in the middle one of the runs."""
    return median([run.others_cores for run in runs] or [0.0])


def failures_of(runs: Iterable[Run], size: str, dtype: str) -> list[Run]:
    return [run for run in runs if (run.size, run.dtype) == (size, dtype) and run.error]


def _done(runs: Sequence[Run], size: str, dtype: str) -> dict[str, dict[int, Run]]:
    """What ended well, by engine and round."""
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        if (run.size, run.dtype) == (size, dtype) and not run.error:
            found.setdefault(run.engine, {})[run.round] = run
    return found


def _pairs(peers: dict[int, Run], ours: dict[int, Run]) -> list[tuple[Run, Run]]:
    return [(peers[number], ours[number]) for number in sorted(peers.keys() & ours.keys())]


def _row(engine: str, rounds: dict[int, Run], single: dict[int, Run], reference: float | None, tolerance: float) -> Row:
    runs = list(rounds.values())
    over_single = [run.seconds / plain.seconds for run, plain in _pairs(rounds, single)]
    sent = [run.sent_bytes for run in runs if run.sent_bytes is not None]
    loss = runs[0].loss
    compared = reference is not None and engine not in OF_ONE_BATCH
    off = max(abs(run.loss - reference) / abs(reference) for run in runs) if compared and reference else None
    return Row(
        engine=engine,
        rounds=len(runs),
        seconds=median(run.seconds for run in runs),
        fastest_seconds=min(run.seconds for run in runs),
        slowest_seconds=max(run.seconds for run in runs),
        cpu_seconds=median(run.cpu_seconds for run in runs),
        over_single=median(over_single) if over_single else None,
        peak_bytes=median(run.peak_bytes for run in runs),
        over_promised=max((run.over_promised for run in runs if run.over_promised), default=None),
        sent_bytes=median(sent) if sent else None,
        loss=loss,
        loss_off=off,
        agrees=off <= tolerance if off is not None else None,
    )
