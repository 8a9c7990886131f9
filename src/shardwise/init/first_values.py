"""Initial values: where each rank gets the ones that it keeps, and how they are placed according to the table.

Sources, by name: weights in files; a recorded history (of a deferred model, or of a meta model whose initialisers were
recorded); or the model's own tensors. If all ranks would compute the same values, each computes its own and nothing is
sent. Otherwise the first rank's values (the first of those with the same parameters) are broadcast, one unit at a time.
Values are always those of the unsplit model: if a model axis cuts a parameter, each rank keeps its part.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shardwise.comm import DataGroup, World
from shardwise.comm.agreed import agreed
from shardwise.errors import CheckpointError, ModelError
from shardwise.init.deferred import Deferred, undefer
from shardwise.init.files import WeightFiles
from shardwise.init.loading import read_part
from shardwise.init.match import Match, match
from shardwise.init.meta import Init, await_values, record_init
from shardwise.init.model_check import buffer_refused
from shardwise.init.tape import Origin, Ref, digest_of, origin_of, replay, tensor_bytes
from shardwise.memory import Flat, Unit, copy_into, is_dense, part_of
from shardwise.plan.placement import Span

Tensor = torch.Tensor
_OWN = b""


@dataclass(frozen=True)
class Wishes:
    """The arguments of `shard` about initial values."""

    device: torch.device | None = None
    weights: Path | None = None
    strict: bool = True
    init: Init | None = None

    def settings(self, device: torch.device) -> dict[str, object]:
        """What has to be the same on all ranks, which will have the model on `device`. Each may name other files."""
        given = {"weights given": self.weights is not None, "init given": self.init is not None}
        return {**given, "strict": self.strict, "device": device.type}


def device_for(model: nn.Module, own: torch.device, wishes: Wishes, world: World) -> torch.device:
    """The device on which the model will be: as asked for, its `own`, or this rank's for a model without values."""
    if wishes.device is not None:
        return world.rank_device.resolve(wishes.device)
    has_none = own.type == "meta" or any(isinstance(param, Deferred) for param in model.parameters())
    return world.device if has_none else own


class FirstValues:
    """The initial values of one model on this rank: found by the constructor, put in place by `apply`."""

    def __init__(
        self, model: nn.Module, wishes: Wishes, world: World, data_group: DataGroup, device: torch.device
    ) -> None:
        """The model will be on `device`. All ranks must call. Raises on all of them, before anything is changed, if the
        files are of another model."""
        self._model = model
        self._data_group = data_group
        self._wishes = wishes
        self._is_meta = next(iter(model.parameters())).is_meta
        self._is_deferred = any(isinstance(param, Deferred) for param in model.parameters())
        self._match = _matched(model, wishes, world)
        if wishes.init is not None and not self._is_meta:
            raise ModelError("init= is for models on the meta device, and this one has values already; leave it out.")
        self._device = device
        self._has_begun = self._takes_firsts = False
        self._replayed: tuple[Origin, torch.UntypedStorage] | None = None

    def give_to_stages(self, world: World) -> None:
        """Send rank 0's values to all ranks, before they drop the pipeline stages of others.

        Raises `ModelError` if ranks would compute different values for a model without values. All ranks must call.
        """
        self._begin(world.exchange)  # while the model is whole, because its initialisers draw in sequence
        digests = set(world.exchange(self._digest(), "first values"))
        if digests != {_OWN}:
            if len(digests) > 1:
                raise ModelError(
                    "The ranks would make different first values, and with pipeline stages none of them makes all. "
                    "Build the model in the same way on all ranks, and seed torch alike before."
                )
            return
        collectives = world.collectives(self._device)
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if self._takes_firsts:
                tensor.data = torch.empty_like(tensor, device=self._device)
            if tensor.numel() and is_dense(tensor):
                values = tensor.detach()
                sent = values.contiguous().view(-1)
                collectives.broadcast(sent, 0, world.everybody, "first values").wait()
                if world.rank and sent.data_ptr() != values.data_ptr():
                    copy_into(values, sent.view(values.shape))
        # A rank whose parameters stay keeps the largest blocks that it has sent from. Rank 0 kept two of these, 21 MiB,
        # as long as it trained the `wide` model of `benchmarks planner`, whose stages send each other 0.8 MiB.
        world.exchange(b"", "first values")  # all have read theirs
        collectives.rest(keeps_some=False)

    def apply(self, units: Sequence[Unit]) -> None:
        """Put initial values in place, and make parameters views of flat memory. All ranks must call.

        Flat buffers are filled one at a time: beside what it keeps, a rank has at most one parameter that is being
        computed or read, or one unit if rank 0's values are broadcast.
        """
        self._begin(self._data_group.exchange)
        alone = self._can_apply_alone()
        for unit in units:
            for flat in unit.flats:
                if alone:
                    self._apply_alone(flat)
                else:
                    self._apply_together(flat)
        self._apply_others({param for unit in units for flat in unit.flats for param in flat.params})
        self._apply_buffers()
        self._replayed = None
        if self._match is not None:
            self._match.let_go()

    def _begin(self, exchange: Callable[[bytes, str], Sequence[bytes]]) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        has_own = not (self._is_meta or self._is_deferred or self._match is not None)
        first_has_own = exchange(b"own" if has_own else b"none", "first values")[0] == b"own"
        self._takes_firsts = first_has_own and self._is_meta and self._match is None
        if self._takes_firsts:  # whatever the modules' own initialisers would do, and where they have none
            await_values(self._model, self._device)
        elif self._is_meta:
            filled = set(self._match) if self._match is not None else set()
            record_init(self._model, self._wishes.init, filled)
        for param in self._model.parameters():
            if isinstance(param, Deferred):
                undefer(param)

    def _can_apply_alone(self) -> bool:
        """Whether every rank of the group would compute the same values by itself. All ranks must call."""
        if self._data_group.size == 1:
            return True
        digests = set(self._data_group.exchange(self._digest(), "first values"))
        return len(digests) == 1 and _OWN not in digests

    def _digest(self) -> bytes:
        """Equal on ranks that would compute the same values. `_OWN` from a rank whose model has them, or takes those of
        the first: comparing whole models would cost more than sending one.

        Ranks may differ in this: one has sent all parameters to others inside `deferred_init`, and so has their values,
        or rank 0 alone has read them, and the other models are on the meta device.
        """
        if self._takes_firsts or (not self._is_meta and not self._is_deferred and self._match is None):
            return _OWN
        left = [param for name, param in self._model.named_parameters() if not self._is_stored(name)]
        digest = hashlib.sha256(digest_of(origin for param in left if (origin := origin_of(param)) is not None))
        for param in left:
            if origin_of(param) is None:
                digest.update(tensor_bytes(param))
        return digest.digest()

    # -- flat buffers -----------------------------------------------------------------------------------

    def _apply_alone(self, flat: Flat) -> None:
        def piece(index: int, span: Span) -> Tensor:
            slot, param = flat.slots[index], flat.params[index]
            if not slot.is_split:
                return self._values(slot.name, param, span)
            whole = self._values(slot.name, param, Span(0, param.numel())).view(slot.whole_shape)
            return part_of(whole, slot.box).reshape(-1)[span.as_slice]

        flat.fill_rows_by(piece)

    def _apply_together(self, flat: Flat) -> None:
        if any(slot.is_split for slot in flat.slots):
            flat.fill_rows(_collected(flat, lambda index: self._part_of_first(flat, index)))
            return

        def piece(index: int) -> Tensor:
            slot = flat.slots[index]
            return self._values(slot.name, flat.params[index], Span(0, slot.numel))

        whole = _collected(flat, piece if self._data_group.is_first else None)
        self._from_first(whole)
        flat.fill_rows(whole)

    def _part_of_first(self, flat: Flat, index: int) -> Tensor:
        """This rank's part of the first rank's values. All ranks must call."""
        slot, param = flat.slots[index], flat.params[index]
        if self._data_group.is_first:
            whole = self._values(slot.name, param, Span(0, param.numel())).to(flat.device, flat.kept_dtype, copy=True)
        else:
            whole = torch.empty(param.numel(), dtype=flat.kept_dtype, device=flat.device)
        self._from_first(whole)
        return part_of(whole.view(slot.whole_shape), slot.box).reshape(-1)

    # -- the rest ---------------------------------------------------------------------------------------

    def _apply_others(self, applied: set[nn.Parameter]) -> None:
        """Place parameters outside of flat buffers, which are not floating-point: whole on every rank."""
        for name, param in self._model.named_parameters():
            if param not in applied:
                param.data = self._whole(name, param)
                self._from_first(param.detach())

    def _apply_buffers(self) -> None:
        moved: dict[Tensor, Tensor] = {}
        names = {buffer: name for name, buffer in self._model.named_buffers()}
        for module in self._model.modules():
            for short, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if buffer not in moved:
                    moved[buffer] = self._agreed_buffer(names[buffer], buffer)
                module._buffers[short] = moved[buffer]

    def _agreed_buffer(self, name: str, buffer: Tensor) -> Tensor:
        """The buffer with its values, on the device of the model."""
        if not is_dense(buffer):
            raise buffer_refused(name, buffer)
        if self._is_stored(name) or origin_of(buffer) is not None:
            buffer.data = self._whole(name, buffer)
        elif buffer.device != self._device:
            buffer = buffer.to(self._device)
        self._from_first(buffer.detach())
        return buffer

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        values = self._values(name, tensor, Span(0, tensor.numel()))
        return values.view(tensor.shape).to(self._device, tensor.dtype, copy=True)

    # -- sources ----------------------------------------------------------------------------------------

    def _is_stored(self, name: str) -> bool:
        return self._match is not None and name in self._match

    def _values(self, name: str, tensor: Tensor, span: Span) -> Tensor:
        """Elements `span` of a tensor of the model, flat, in the dtype and on the device of their source."""
        if self._match is not None and name in self._match:
            return self._match.read(name, span)
        origin = origin_of(tensor)
        if origin is None:
            return tensor.detach().reshape(-1)[span.as_slice]
        if (part := read_part(tensor, origin, span)) is not None:
            return part
        if self._replayed is None or self._replayed[0] is not origin:
            self._replayed = None  # free the previous one first
            self._replayed = origin, replay([origin])[origin]
        return Ref.to(tensor, origin).on(self._replayed[1]).reshape(-1)[span.as_slice]

    def _from_first(self, tensor: Tensor) -> None:
        if self._data_group.size == 1 or tensor.numel() == 0:
            return
        sent = tensor.contiguous()
        self._data_group.broadcast(sent.view(-1), "first values")
        if sent.data_ptr() != tensor.data_ptr():
            copy_into(tensor, sent)


def _matched(model: nn.Module, wishes: Wishes, world: World) -> Match | None:
    """Match the model with the files of `weights`; if any rank fails, all raise the first error."""
    if wishes.weights is None:
        return None
    with agreed(world, "birth", CheckpointError, ModelError):
        found = match(model, WeightFiles(wishes.weights), strict=wishes.strict)
    if found.note and world.rank == 0:
        warnings.warn(found.note, stacklevel=2)
    return found


def _collected(flat: Flat, values: Callable[[int], Tensor] | None) -> Tensor:
    """Initial values of the parameters in one buffer, in the dtype in which the optimizer keeps them.

    `values(index)` is one parameter, flat; without it the buffer is zero, ready to be received into.
    """
    whole = torch.zeros(flat.spec.numel, dtype=flat.kept_dtype, device=flat.device)
    if values is not None:
        for index, slot in enumerate(flat.slots):
            whole[slot.span.as_slice].copy_(values(index))
    return whole
