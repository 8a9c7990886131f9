"""What a micro-batch of any size computes and holds, from what two of them do. Pure.

[Note: derived counts] A rehearsal takes a second or more, and a search would need hundreds. But what a model computes
and holds is affine in the samples of a micro-batch (what belongs to the batch, and what does not), so that two
rehearsals tell of all sizes; where they have different operations they do not, and another one is made. Many models
spare copies with a single sample, whose dim is no dim: then two and four tell of all others. And a stage
of a pipeline does what the whole model does between the same moments: its marks lie above what stages before it hold.
What a search proposes is rehearsed as it is before it is believed (`confirm`).
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.fit.foreseen import Counted
from shardwise.fit.operations import Operation, Worked
from shardwise.program import Awaited, Held, Mark


def between(few: Counted, more: Counted, share: float) -> Counted | None:
    """At `share` of the way from one count to another, or beyond; `None` if they are not alike."""
    marks, others = few.activations.marks, more.activations.marks
    if [mark.moment for mark in marks] != [mark.moment for mark in others]:
        return None
    worked = []
    known: dict[tuple[int, int], Operation] = {}
    alike: dict[tuple[int, int], tuple[Operation, ...]] = {}
    """Of equal blocks, which have the same operations, and so are priced once."""
    for first, second in zip(few.worked, more.worked, strict=True):
        parts = []
        for some, same in (
            (first.operations, second.operations),
            (first.recomputed, second.recomputed),
            (first.weights, second.weights),
        ):
            if (id(some), id(same)) in alike:
                parts.append(alike[id(some), id(same)])
                continue
            if len(some) != len(same) or any(
                (a.kind, len(a.shape), len(a.allocated_bytes)) != (b.kind, len(b.shape), len(b.allocated_bytes))
                for a, b in zip(some, same, strict=True)
            ):
                return None
            alike[id(some), id(same)] = tuple(_operation(a, b, share, known) for a, b in zip(some, same, strict=True))
            parts.append(alike[id(some), id(same)])
        every, again, weights = parts
        factors_bytes = _at(first.factors_bytes, second.factors_bytes, share)
        worked.append(Worked(first.moment, every, again, weights, factors_bytes))
    one, other = few.activations, more.activations
    held = replace(
        one,
        marks=tuple(
            Mark(
                a.moment,
                _at(a.peak_bytes, b.peak_bytes, share),
                _at(a.live_bytes, b.live_bytes, share),
                _at(a.heap_bytes, b.heap_bytes, share),
                *_peaks_at(a, b, share),
            )
            for a, b in zip(marks, others, strict=True)
        ),
        process_bytes=_at(one.process_bytes, other.process_bytes, share),
        host_bytes=_at(one.host_bytes, other.host_bytes, share),
        host_heap_bytes=_at(one.host_heap_bytes, other.host_heap_bytes, share),
        disk_bytes=_at(one.disk_bytes, other.disk_bytes, share),
        staging_bytes=_at(one.staging_bytes, other.staging_bytes, share),
        unit_bytes=_at(one.unit_bytes, other.unit_bytes, share),
        peak_heap_bytes=_at(one.peak_heap_bytes, other.peak_heap_bytes, share),
    )
    sent = {axis: _at(num, more.sent_bytes.get(axis, num), share) for axis, num in few.sent_bytes.items()}
    return Counted(held, sent, few.tied_bytes, tuple(worked))


def _at(few: float, more: float, share: float) -> int:
    return max(0, round(few + (more - few) * share))


def _peaks_at(few: Mark, more: Mark, share: float) -> tuple[tuple[Held, ...], Awaited, int]:
    """None where other peaks count with other rows: then all gradients are counted from the start."""
    if few.awaited != more.awaited or [one.awaited for one in few.peaks] != [one.awaited for one in more.peaks]:
        return (), (), 0
    pairs = zip(few.peaks, more.peaks, strict=True)
    peaks = tuple(Held(_at(a.num_bytes, b.num_bytes, share), a.awaited) for a, b in pairs)
    return peaks, few.awaited, _at(few.come_bytes, more.come_bytes, share)


def _operation(few: Operation, more: Operation, share: float, known: dict[tuple[int, int], Operation]) -> Operation:
    key = id(few), id(more)
    if key not in known:
        known[key] = replace(
            few,
            shape=tuple(_at(a, b, share) for a, b in zip(few.shape, more.shape, strict=True)),
            flops=max(0.0, few.flops + (more.flops - few.flops) * share),
            num_bytes=max(0.0, few.num_bytes + (more.num_bytes - few.num_bytes) * share),
            allocated_bytes=tuple(
                _at(a, b, share) for a, b in zip(few.allocated_bytes, more.allocated_bytes, strict=True)
            ),
        )
    return known[key]
