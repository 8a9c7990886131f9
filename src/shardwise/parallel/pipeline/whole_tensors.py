"""Reads and writes of whole tensors by name on every rank, whichever stage has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Protocol

import torch

from shardwise.comm import World
from shardwise.errors import ModelError, nearest, wrong_shape
from shardwise.parallel.pipeline.stage_layout import AXIS
from shardwise.parallel.pipeline.staged_model import StagedModel
from shardwise.plan.mesh import Mesh

Tensor = torch.Tensor


class Own(Protocol):
    """Whole tensors of this rank's own stages."""

    def read(self, name: str, what: str = "param") -> Tensor | None: ...


class AcrossStages:
    """Shares tensors of one pipeline rank with the others. All ranks along the axis call every method."""

    def __init__(self, staged: StagedModel, world: World, mesh: Mesh, device: torch.device) -> None:
        self._staged = staged
        self._line = world.group(mesh, AXIS)
        self._collectives = world.collectives(device)
        self._device = device

    def first_name(self, name: str) -> str:
        """That of a parameter which may have several, because weights are tied."""
        return self._staged.whole.ties.get(name, name)

    def holds(self, name: str) -> bool:
        """Whether this rank has a parameter of the whole model, given by its first name."""
        holders = self._staged.holders
        if name not in holders:
            raise ModelError(f"The model has no parameter {name!r}. {nearest(name, holders)}")
        return self._staged.pp_rank in holders[name]

    def read(self, name: str, what: str, own: Own) -> Tensor | None:
        """The whole tensor, on every rank; `None` if no rank has one. For a parameter on several stages, the first
        one's."""
        name = self.first_name(name)
        self.holds(name)
        pp_rank = self._staged.holders[name][0]
        mine = own.read(name, what) if self._staged.pp_rank == pp_rank else None
        own_layouts = {} if mine is None else {name: _layout_of(mine)}
        layouts = self._exchanged(own_layouts)[pp_rank]
        if not layouts:
            return None
        return self._broadcast(pp_rank, mine, layouts[name])

    def zeros(self, name: str) -> Tensor:
        """As many as the parameter has elements, on a rank that does not have it."""
        return torch.zeros(self._staged.whole.shapes[name], device=self._device)

    def takes(self, name: str, value: Tensor, what: str) -> bool:
        """Whether this rank has to write `value`. Raises on all ranks if its shape does not fit."""
        name = self.first_name(name)
        shape = self._staged.whole.shapes.get(name)
        if self.holds(name) or shape is None:
            return True
        if tuple(value.shape) != shape:
            raise ModelError(
                f"{name} has shape {list(shape)}, but the new {what} has {list(value.shape)}. Give the whole {what} on "
                f"every rank, also where each has a part of it."
            )
        return False

    def own_part(self, state: Mapping[str, Tensor], *, strict: bool = True) -> dict[str, Tensor]:
        """This rank's part of a whole `state_dict`. Raises on all ranks for a state of another model; without `strict`
        only if shapes differ."""
        names = self._staged.whole.state_names
        if not strict:
            names = tuple(name for name in names if name in state)
            state = {name: state[name] for name in names}
        odd = set(names) ^ set(state)
        if odd:
            name = min(odd)
            where = "state has no" if name in names else "model has no"
            raise ModelError(f"The {where} {name}; give load_state_dict() what a model like this one returns.")
        for name in names:
            shape = self._staged.whole.shapes[self._staged.whole.ties.get(name, name)]
            if tuple(state[name].shape) != shape:
                raise wrong_shape(name, state[name].shape, shape)
        return {name: state[name] for name in self._staged.model.state_dict(keep_vars=True) if name in state}

    def merged(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One `state_dict` merged from those of all ranks, on the CPU, in the order of the whole model."""
        layouts = self._exchanged({name: _layout_of(tensor) for name, tensor in state.items()})
        found: dict[str, Tensor] = {}
        for pp_rank, of_rank in enumerate(layouts):
            for name, layout in of_rank.items():
                if name not in found:
                    mine = state[name] if self._staged.pp_rank == pp_rank else None
                    found[name] = self._broadcast(pp_rank, mine, layout).cpu()
        first = self._staged.whole.ties
        return {
            name: found[name] if name in found else found[first[name]]
            for name in self._staged.whole.state_names
            if name in found or first.get(name) in found
        }

    @property
    def pp_rank(self) -> int:
        return self._staged.pp_rank

    def described(self, likes: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The `likes` of all ranks along the axis, by pipeline rank, as tensors without memory."""
        layouts = self._exchanged({name: _layout_of(like) for name, like in likes.items()})
        return [{name: _like(layout) for name, layout in of_rank.items()} for of_rank in layouts]

    def broadcast(self, pp_rank: int, tensor: Tensor | None, like: Tensor) -> Tensor:
        """The tensor of `pp_rank`, which has the form of `like`, on all ranks along the axis."""
        return self._broadcast(pp_rank, tensor, _layout_of(like))

    def _exchanged(self, own_layouts: Mapping[str, object]) -> list[dict[str, object]]:
        """The messages of all ranks along the axis, by pipeline rank."""
        messages = self._collectives.exchange(json.dumps(own_layouts).encode(), self._line, "stages")
        return [json.loads(message) for message in messages]

    def _broadcast(self, pp_rank: int, tensor: Tensor | None, layout: object) -> Tensor:
        """The tensor of `pp_rank`, broadcast to all ranks along the axis."""
        assert isinstance(layout, list)
        shape, dtype = layout
        if tensor is None:
            sent = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
        else:
            sent = tensor.detach().to(self._device).contiguous()
        if sent.numel():
            self._collectives.broadcast(sent.view(-1), self._line.ranks[pp_rank], self._line, "stages").wait()
        return sent


def _layout_of(tensor: Tensor) -> list[object]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _like(layout: object) -> Tensor:
    assert isinstance(layout, list)
    return torch.empty(layout[0], dtype=getattr(torch, layout[1]), device="meta")
