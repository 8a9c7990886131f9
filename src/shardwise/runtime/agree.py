"""Small messages between the ranks that share a flat buffer, apart from its program. Collective and blocking."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from shardwise.comm import Collectives, Group, sum_small
from shardwise.memory import Flat, put_part
from shardwise.plan.placement import ALIGN, Axes, Box, Slot
from shardwise.system.even_parts import round_up

Tensor = torch.Tensor


class Agreement:
    """Agreement among all ranks of a flat buffer's table, one axis after the other."""

    def __init__(self, collectives: Collectives, groups: Mapping[str, Group]) -> None:
        self._collectives = collectives
        self._groups = groups
        self._coordinate = {axis: group.index for axis, group in groups.items()}
        self._boxes: dict[str, list[Box]] = {}
        """Per parameter: the boxes of the ranks along the axis that splits it."""

    def any_rank(self, flat: Flat, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        for axis in flat.spec.table.axes:
            flag = b"1" in self._collectives.exchange(b"1" if flag else b"0", self._groups[axis], flat.name)
        return flag

    def merged(self, flat: Flat, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The union of all ranks' `facts` (anything JSON can hold); for a key that several ranks have, the first rank's
        value."""
        known = dict(facts)
        for axis in flat.spec.table.axes:
            messages = self._collectives.exchange(json.dumps(known).encode(), self._groups[axis], flat.name)
            known = {key: value for message in reversed(messages) for key, value in json.loads(message).items()}
        return known

    def mean(self, flat: Flat, values: Tensor, slot: Slot | None = None) -> Tensor:
        """The mean of `values` over all ranks of the table, and over the ranks with copies of `slot`. `values` is
        one-dimensional, of one length and dtype on all ranks."""
        for axis in self._copying(flat, slot):
            values = sum_small(values, self._collectives, self._groups[axis], flat.name) / len(self._groups[axis].ranks)
        for axis in flat.spec.table.axes:
            values = sum_small(values, self._collectives, self._groups[axis], flat.name) / len(self._groups[axis].ranks)
        return values

    def broadcast(self, flat: Flat, values: Tensor, slot: Slot | None = None, *, writer: int = 0) -> None:
        """Overwrite `values` (one-dimensional, contiguous) on all ranks with those of rank `writer`, including
        the ranks with copies of `slot`."""
        place = flat.spec.mesh.coordinate(writer)
        for axis in (*flat.spec.table.axes, *self._copying(flat, slot)) if values.numel() else ():
            group = self._groups[axis]
            self._collectives.broadcast(values, group.ranks[place[axis]], group, flat.name).wait()

    def gather(self, flat: Flat, whole: Tensor, shard: Axes) -> None:
        """Fill `whole`, as long as `flat`, on all ranks. Each rank has filled the part that `shard` gives it."""
        for axis in reversed(flat.spec.table.order):
            if axis in shard:
                shard = tuple(other for other in shard if other != axis)
                span = flat.spec.layout.span(shard, self._coordinate)
                self._collectives.all_gather(whole[span.as_slice], self._groups[axis], flat.name).wait()
        self._collectives.synchronize()

    def assembled(self, flat: Flat, slot: Slot, part: Tensor) -> Tensor:
        """The unsplit tensor, in its own shape, from `part`: this rank's part of the slot that model axes split."""
        if slot.box is None:
            return part.view(slot.shape)
        group = self._splitting(flat)
        boxes = self._boxes_of(slot, group) if group is not None else []
        if group is None or not any(box.is_split for box in boxes):
            return part.view(slot.shape)
        whole = part.new_empty(slot.whole_shape)
        for box, theirs in self._once(slot, group, part, max(box.numel for box in boxes)):
            put_part(whole, box, theirs[: box.numel])
        return whole

    def added_up(self, flat: Flat, slot: Slot, of_part: Tensor) -> Tensor:
        """The sum over the unsplit tensor, from `of_part`, which is that over this rank's part of the slot."""
        group = self._splitting(flat)
        if group is None:
            return of_part
        once = self._once(slot, group, of_part, of_part.numel())
        return torch.stack([theirs for _, theirs in once]).sum(0)[: of_part.numel()].view(of_part.shape)

    def _splitting(self, flat: Flat) -> Group | None:
        """The ranks along the axis that splits parameters of `flat`, if one does."""
        axes = flat.spec.split_axes or flat.spec.mesh.same_params_axes
        return self._groups[axes[0]] if axes else None

    def _once(self, slot: Slot, group: Group, mine: Tensor, longest: int) -> list[tuple[Box, Tensor]]:
        """What each rank of `group` gives as `mine`, `longest` elements or fewer and zeros behind them, with its box of
        the slot; of copies one."""
        boxes = self._boxes_of(slot, group)
        every = mine.new_zeros(len(boxes), round_up(longest, ALIGN))
        every[group.index, : mine.numel()] = mine.reshape(-1)
        self._collectives.all_gather(every.view(-1), group, slot.name).wait()
        return [(box, theirs) for box, theirs in zip(boxes, every, strict=True) if box.place == boxes[0].place]

    def _boxes_of(self, slot: Slot, group: Group) -> list[Box]:
        """The boxes along `group`; exchanged once per parameter."""
        if slot.name not in self._boxes:
            assert slot.box is not None
            messages = self._collectives.exchange(json.dumps(slot.box.to_json()).encode(), group, slot.name)
            self._boxes[slot.name] = [Box.from_json(json.loads(message)) for message in messages]
        return self._boxes[slot.name]

    def _copying(self, flat: Flat, slot: Slot | None) -> tuple[str, ...]:
        """The model axes along which ranks have copies of `slot`."""
        return flat.spec.mesh.same_params_axes if slot is not None and slot.is_copied and not slot.is_split else ()
