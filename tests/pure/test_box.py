"""Boxes: parts of tensors, and what two of them have in common."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.memory import part_of, put_part
from shardwise.plan.placement import Box, Span, common_runs


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ranges = []
    for size in shape:
        chosen = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
        starts = [at for at in range(size) if chosen[at] and (at == 0 or not chosen[at - 1])]
        stops = [at + 1 for at in range(size) if chosen[at] and (at == size - 1 or not chosen[at + 1])]
        ranges.append(tuple(Span(*ends) for ends in zip(starts, stops, strict=True)))
    return Box(shape, tuple(ranges))


@given(st.data())
def test_runs_name_the_elements_of_the_part(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    box = data.draw(boxes(shape))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    part = part_of(whole, box)
    assert tuple(part.shape) == box.own_shape
    flat, found = whole.reshape(-1), part.reshape(-1)
    assert sum(numel for _, _, numel in box.runs) == box.numel
    for start, there, numel in box.runs:
        assert torch.equal(found[start : start + numel], flat[there : there + numel])
    back = torch.full_like(whole, -1)
    put_part(back, box, part)
    assert torch.equal(part_of(back, box), part)
    assert int((back >= 0).sum()) == box.numel
    assert Box.from_json(box.to_json()) == box
    assert box.has_first == (int(found[0]) == 0)


@given(st.data())
def test_common_runs_are_all_that_two_parts_share(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    spans = []
    for box in (one, other):
        ends = sorted(data.draw(st.tuples(st.integers(0, box.numel), st.integers(0, box.numel))))
        spans.append(Span(*ends))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    first, second = (part_of(whole, box).reshape(-1) for box in (one, other))
    shared: list[int] = []
    for here, there, numel in common_runs(one, spans[0], other, spans[1]):
        assert torch.equal(first[here : here + numel], second[there : there + numel])
        assert spans[0].start <= here
        assert here + numel <= spans[0].stop
        shared += first[here : here + numel].tolist()
    expected = set(first[spans[0].start : spans[0].stop].tolist()) & set(
        second[spans[1].start : spans[1].stop].tolist()
    )
    assert shared == sorted(expected)
