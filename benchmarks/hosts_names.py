"""What is raced between hosts, and how its figures are read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

OURS = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hpz")
COUNTERPARTS = {
    "shardwise-ddp": ("ddp",),
    "shardwise-zero1": ("deepspeed-1",),
    "shardwise-zero2": ("deepspeed-2",),
    "shardwise-zero3": ("fsdp2", "deepspeed-3"),
    "shardwise-hsdp": ("fsdp2-hsdp",),
    "shardwise-hpz": ("deepspeed-3",),
}
_TWO_AXES = ("shardwise-hsdp", "shardwise-hpz", "fsdp2-hsdp")
HEADERS, BESIDE_BYTES = 1.06, 100_000
"""What crosses a link beside messages: headers and acknowledgements, and a step's barriers and reports."""
FREE = 0.0
"""As a rate: links are not shaped."""


def engines_for(num_local: int, *, has_deepspeed: bool) -> list[str]:
    """Peers and ours, each beside its own; two axes need several ranks on a host."""
    names = list(dict.fromkeys(name for ours, peers in COUNTERPARTS.items() for name in (*peers, ours)))
    names = [name for name in names if has_deepspeed or not name.startswith("deepspeed")]
    return [name for name in names if num_local > 1 or name not in _TWO_AXES]


class Turn(NamedTuple):
    """One engine's turn at one rate, as one rank had it: seconds of a step, and of its processor for one; bytes that
    its host's interface sent and received per step, and bytes that this rank says it has put on the way."""

    engine: str
    rate: float
    round: int
    step_seconds: float
    cpu_seconds: float
    sent_bytes: float
    received_bytes: float
    told_bytes: float | None
    loss: float


class Row(NamedTuple):
    """One engine at one rate, over all rounds: medians. Bytes are those of the host that sent most, per step."""

    engine: str
    rate: float
    step_seconds: float
    cpu_seconds: float
    link_bytes: float
    told_bytes: float | None
    promised_bytes: float | None
    hidden: float | None
    loss: float


def rows_of(
    ranks: Sequence[Sequence[Turn]], num_local: int, promised: dict[str, Sequence[int]] | None = None
) -> list[Row]:
    """`ranks` are the turns of each rank, in one order; `promised` is what leaves each host, by engine.

    The share of communication that is hidden: of the least time that a link takes for the bytes that crossed it, the
    part by which a step is not longer than the same step between links that are not shaped.
    """
    promised = promised or {}
    by_turn = [_of_all(own, num_local) for own in zip(*ranks, strict=True)]
    free = {name: _step([turn for turn, _ in by_turn if (turn.engine, turn.rate) == (name, FREE)]) for name in
            dict.fromkeys(turn.engine for turn, _ in by_turn)}  # fmt: skip
    rows = []
    for engine, rate in dict.fromkeys((turn.engine, turn.rate) for turn, _ in by_turn):
        turns = [turn for turn, _ in by_turn if (turn.engine, turn.rate) == (engine, rate)]
        told = [told for turn, told in by_turn if (turn.engine, turn.rate) == (engine, rate) and told is not None]
        link_bytes = median(max(turn.sent_bytes, turn.received_bytes) for turn in turns)
        step, alone = _step(turns), free[engine]
        hidden = None
        if rate != FREE and alone is not None:
            hidden = 1 - max(0.0, step - alone) / (link_bytes * 8 / rate)
        most = max(promised[engine]) if engine in promised else None
        told_bytes = median(told) if told else None
        cpu = median(turn.cpu_seconds for turn in turns)
        rows.append(Row(engine, rate, step, cpu, link_bytes, told_bytes, most, hidden, turns[-1].loss))
    return rows


def _step(turns: Sequence[Turn]) -> float:
    return median(turn.step_seconds for turn in turns) if turns else float("nan")


def _of_all(turns: Sequence[Turn], num_local: int) -> tuple[Turn, float | None]:
    """One turn of all ranks, the slowest of whom counts; and the most that a host's ranks say that they have sent."""
    first = turns[::num_local]
    merged = turns[-1]._replace(
        step_seconds=max(turn.step_seconds for turn in turns),
        cpu_seconds=max(turn.cpu_seconds for turn in turns),
        sent_bytes=max(turn.sent_bytes for turn in first),
        received_bytes=max(turn.received_bytes for turn in first),
    )
    if any(turn.told_bytes is None for turn in turns):
        return merged, None
    told = [sum(turn.told_bytes or 0 for turn in turns[at : at + num_local]) for at in range(0, len(turns), num_local)]
    return merged, max(told)


def faults_of(rows: Sequence[Row], tolerance: float) -> list[str]:
    """A sentence for each engine whose loss is not that of most, and for each of ours that sent what it did not say."""
    losses = sorted(row.loss for row in rows)
    expected = losses[len(losses) // 2]
    wrong = [
        f"{row.engine}: the loss is {row.loss:.6f}, most have {expected:.6f}."
        for row in rows
        if abs(row.loss - expected) > tolerance * abs(expected)
    ]
    wrong += [
        f"{row.engine}: {row.link_bytes:.0f} bytes crossed a link, ranks say {row.told_bytes:.0f}."
        for row in rows
        if row.told_bytes is not None and row.link_bytes > HEADERS * row.told_bytes + BESIDE_BYTES
    ]
    return wrong


def beside(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each of ours over its best peer at one rate: of bytes, steps and what is hidden."""
    found = []
    by_name = {(row.engine, row.rate): row for row in rows}
    for row in rows:
        peers = [by_name[peer, row.rate] for peer in COUNTERPARTS.get(row.engine, ()) if (peer, row.rate) in by_name]
        if peers:
            best = min(peers, key=lambda peer: peer.step_seconds)
            found.append(
                {
                    "engine": row.engine,
                    "rate": row.rate,
                    "best peer": best.engine,
                    "step over": row.step_seconds / best.step_seconds,
                    "bytes over": row.link_bytes / min(peer.link_bytes for peer in peers),
                    "hidden": row.hidden,
                    "hidden by peers": max((peer.hidden for peer in peers if peer.hidden is not None), default=None),
                }
            )
    return found
