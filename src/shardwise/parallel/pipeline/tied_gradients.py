"""Sums the gradients of parameters that lie on several stages, such as an embedding tied to the head.

[Note: shared parameters] Each stage that uses such a parameter has a copy of it in a flat buffer with the same layout
on all of them. When gradients are ready for the update, before the norm is computed, these ranks exchange them. Each
adds them up in the order of the stages, so that the sums, and with them parameters and optimizer states, stay equal to
the bit on all of them. A parameter that a forward uses between modules is on every stage, and few use it (see [Note:
parameters between modules]): they also tell each other whether they have, so that all or none update it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm import Group, Work, World, link_between
from shardwise.memory import Flat
from shardwise.parallel.pipeline.stage_layout import AXIS
from shardwise.parallel.pipeline.staged_model import StagedModel
from shardwise.plan.mesh import Mesh

Tensor = torch.Tensor


class SharedGradients:
    """The flat buffers of this rank that other stages have too."""

    def __init__(self, staged: StagedModel, flats: Sequence[Flat], world: World, mesh: Mesh) -> None:
        self._line = world.group(mesh, AXIS).ranks
        self._rank = world.rank
        self._pp_rank = staged.pp_rank
        self._collectives = world.collectives(flats[0].device)
        self._flats = [
            (flat, staged.holders[flat.slots[0].name])
            for flat in flats
            if flat.spec.trainable and len(staged.holders[flat.slots[0].name]) > 1
        ]
        self._between = {flat.name for flat, _ in self._flats if any(one.name in staged.between for one in flat.slots)}

    def __bool__(self) -> bool:
        return bool(self._flats)

    def add_up(self) -> None:
        """Exchange and add gradients, once per step, when they are due. Called by all ranks that have these
        parameters."""
        coming: list[tuple[Flat, list[Tensor], list[Work]]] = []
        marks: list[tuple[Flat, list[Tensor], list[Work]]] = []
        for flat, pp_ranks in self._flats:
            if flat.grads.due is None:
                flat.grads.make_due()
            due = flat.grads.due
            assert due is not None
            coming.append((flat, *self._exchange(due.to(flat.device, copy=True), flat, pp_ranks)))
            if flat.name in self._between:
                own = torch.tensor(flat.grads.touched_here, dtype=torch.uint8, device=flat.device)
                marks.append((flat, *self._exchange(own, flat, pp_ranks)))
        for flat, parts, works in marks:
            for work in works:
                work.wait()
            flat.grads.touched_here = torch.stack(parts).any(0).tolist()
        for flat, parts, works in coming:
            for work in works:
                work.wait()
            due = flat.grads.due
            assert due is not None
            for part in parts[1:]:
                parts[0].add_(part)
            due.copy_(parts[0])

    def _exchange(self, own: Tensor, flat: Flat, pp_ranks: Sequence[int]) -> tuple[list[Tensor], list[Work]]:
        """What each of `pp_ranks` has of `flat`, once the messages have been waited for."""
        parts = [own if pp_rank == self._pp_rank else torch.empty_like(own) for pp_rank in pp_ranks]
        works = []
        for pp_rank, part in zip(pp_ranks, parts, strict=True):
            if part is not own:
                link = self._link(pp_rank, self._pp_rank, flat)
                works.append(self._collectives.receive(part, link, "gradients"))
        for pp_rank in pp_ranks:
            if pp_rank != self._pp_rank:
                link = self._link(self._pp_rank, pp_rank, flat)
                works.append(self._collectives.send(own, link, "gradients"))
        return parts, works

    def _link(self, source: int, target: int, flat: Flat) -> Group:
        name = flat.slots[0].name  # units of two ranks may have other names
        return link_between(AXIS, self._line[source], self._line[target], self._rank, f"{name} {source}>{target}")
