"""Sums the gradients of parameters that lie on several stages, such as an embedding tied to the head.

[Note: shared parameters] Each stage that uses such a parameter has a copy of it in a flat buffer with the same layout
on all of them. When gradients are ready for the update, before the norm is computed, these ranks exchange them. Each
adds them up in the order of the stages, so that the sums, and with them parameters and optimizer states, stay equal to
the bit on all of them.
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

    def __bool__(self) -> bool:
        return bool(self._flats)

    def add_up(self) -> None:
        """Exchange and add gradients, once per step, when they are due. Called by all ranks that have these
        parameters."""
        coming: list[tuple[Flat, list[Tensor], list[Work]]] = []
        for flat, pp_ranks in self._flats:
            if flat.grads.due is None:
                flat.grads.make_due()
            due = flat.grads.due
            assert due is not None
            parts = [
                due.to(flat.device, copy=True)
                if pp_rank == self._pp_rank
                else torch.empty_like(due, device=flat.device)
                for pp_rank in pp_ranks
            ]
            others = [pp_rank for pp_rank in pp_ranks if pp_rank != self._pp_rank]
            own = parts[pp_ranks.index(self._pp_rank)]
            works = [
                self._collectives.receive(
                    parts[pp_ranks.index(pp_rank)],
                    self._link(pp_rank, self._pp_rank, flat),
                    "gradients",
                )
                for pp_rank in others
            ]
            works += [
                self._collectives.send(own, self._link(self._pp_rank, pp_rank, flat), "gradients") for pp_rank in others
            ]
            coming.append((flat, parts, works))
        for flat, parts, works in coming:
            for work in works:
                work.wait()
            due = flat.grads.due
            assert due is not None
            for part in parts[1:]:
                parts[0].add_(part)
            due.copy_(parts[0])

    def _link(self, source: int, target: int, flat: Flat) -> Group:
        name = flat.slots[0].name  # units of two ranks may have other names
        return link_between(AXIS, self._line[source], self._line[target], self._rank, f"{name} {source}>{target}")
