"""A layout whose ranks have images, and what can still be read of it when some of them are gone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import Held
from shardwise.checkpoint.codec import decode
from shardwise.checkpoint.content import kept_span
from shardwise.elastic.images import BLOCK, PARAM, TORN, Image
from shardwise.elastic.survival import NUMBERS, Survival
from shardwise.errors import StateError
from shardwise.placement import Slot
from shardwise.program import FlatSpec
from shardwise.sharded_model import ShardedModel
from shardwise.storage import Flat

Tensor = torch.Tensor


@dataclass
class Layout:
    """What its ranks were, and who of them is which rank now."""

    label: int
    """Layouts of one job are counted."""
    size: int
    specs: list[tuple[FlatSpec, tuple[Slot, ...]]]
    ranks: tuple[int | None, ...]
    """By rank of the present world: the rank in this layout, if it was there."""
    folder: Path | None
    survival: Survival | None = None
    """This rank's own images; `None` on one that has come since."""
    flats: list[Flat] = field(default_factory=list)
    """In live memory, until it is taken down."""
    still: dict[str, Tensor] = field(default_factory=dict)
    """What every rank has whole, and never changes."""

    @classmethod
    def of(cls, sharded: ShardedModel, label: int, folder: Path | None) -> Layout:
        """That of a model that is laid out, with images of it; nothing is in them before `survival.begin`."""
        flats, world = sharded.flats, sharded.world
        specs = [(flat.spec, flat.slots) for flat in flats]
        own = folder if any(_is_alone(spec) for spec, _ in specs) else None
        survival = Survival(flats, sharded.optimizer, own, _file_name(label, world.rank))
        still = {
            slot.name: flat.param_piece(index)
            for flat in flats
            if not flat.spec.trainable and not flat.spec.table.param.shard
            for index, slot in enumerate(flat.slots)
        }
        return cls(label, world.size, specs, tuple(range(world.size)), own, survival, flats, still)

    def regrouped(self, origins: Sequence[int | None]) -> Layout:
        """The same, as the ranks of another world see it."""
        ranks = tuple(None if origin is None else self.ranks[origin] for origin in origins)
        return replace(self, ranks=ranks)

    @property
    def gone(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.ranks]

    def images_of(self, rank: int) -> list[Image]:
        """Of one that is gone: its files, which it does not write to any more."""
        if self.folder is None:
            return []
        return [Image.open(path) for path in sorted(self.folder.glob(f"{_file_name(self.label, rank)}-*.image"))]

    def remove(self) -> None:
        """Nobody will go back to it."""
        if self.survival is not None:
            self.survival.close()
        if self.folder is not None:
            for rank in self.gone:
                for path in self.folder.glob(f"{_file_name(self.label, rank)}-*.image"):
                    path.unlink(missing_ok=True)

    # -- who has what -------------------------------------------------------------------------------------

    def newest(self, told: Sequence[set[int]], images: Mapping[int, list[Image]]) -> tuple[int, frozenset[int]]:
        """The newest state that is whole, and the ranks of this layout of which there is a part of it.

        `told` are the states that each rank of the present world has, `images` those of ranks that are gone. Raises
        `StateError` if there is no such state.
        """
        here = [steps for steps, rank in zip(told, self.ranks, strict=True) if rank is not None]
        common = set.intersection(*here) if here else set()
        for step in sorted(common, reverse=True):
            givers = {rank for rank in self.ranks if rank is not None}
            givers |= {rank for rank in images if self._can_give(rank, images[rank], step)}
            if self._is_whole(givers):
                return step, frozenset(givers)
        raise StateError(
            f"Rank {', '.join(map(str, self.gone))} is gone, and no whole state is left: the living have "
            f"{sorted(map(sorted, here))}, the images {[sorted(_steps(one)) for one in images.values()]}. "
            f"Start again from the last checkpoint."
        )

    def _is_whole(self, givers: set[int]) -> bool:
        for spec, _ in self.specs:
            shard = _kept_shard(spec)
            spans = {spec.layout.span(shard, spec.mesh.coordinate(rank)) for rank in givers}
            if any(spec.layout.span(shard, spec.mesh.coordinate(rank)) not in spans for rank in range(self.size)):
                return False
        return True

    def _can_give(self, rank: int, images: Sequence[Image], step: int) -> bool:
        if any(image.shadow_step == step for image in images):
            return True
        return any(image.live_step == step for image in images) and self.healer(rank) is not None

    def healer(self, rank: int) -> int | None:
        """The living rank, of the present world, that can see all that one which is gone had outside its live region;
        it reads for it, too."""
        wanted = {spec.table.param.shard for spec, _ in self.specs if spec.trainable and spec.master_is_param}
        mesh = self.specs[0][0].mesh
        for number, one in enumerate(self.ranks):
            if one is not None and all(not axes or one in mesh.among(rank, axes) for axes in wanted):
                return number
        return None

    def reader(self, rank: int) -> int:
        """Who of the present world reads the image of one that is gone."""
        healer = self.healer(rank)
        if healer is not None:
            return healer
        return next(number for number, one in enumerate(self.ranks) if one is not None)

    # -- reading ------------------------------------------------------------------------------------------

    def heal(self, rank: int, images: Sequence[Image], step: int) -> None:
        """Let the shadow of one that is gone have all of `step`, before the memory of the living goes."""
        if any(image.shadow_step == step for image in images):
            return
        image = next(image for image in images if image.live_step == step)
        homes = {slot.name: (flat, slot) for flat in self.flats for slot in flat.slots}
        image.shadow_step = TORN
        image.copy_live()
        for cell in image.directory.cells:
            if cell.is_live or cell.kind != PARAM:
                continue
            flat, slot = homes[cell.name]
            if not flat.spec.trainable:
                continue  # it is there since the image was made
            span = kept_span(flat.spec, slot, flat.spec.mesh.coordinate(rank))
            start = slot.span.start
            image.shadow(cell).copy_(flat.full[start + span.start : start + span.stop])
        image.shadow_step = step

    def stands_for(self, givers: frozenset[int]) -> list[list[int]]:
        """By rank of the present world, whose part it reads for all."""
        stands_for: list[list[int]] = [[] if rank is None else [rank] for rank in self.ranks]
        for rank in self.gone:
            if rank in givers:
                stands_for[self.reader(rank)].append(rank)
        return stands_for

    def held(self, me: int, givers: frozenset[int], images: Mapping[int, list[Image]], step: int) -> Held:
        """What this rank, `me` in the present world, can read of `step`."""
        stands_for = self.stands_for(givers)
        held = Held(list(self.specs), tuple(map(tuple, stands_for)))
        for rank in stands_for[me]:
            own = self.survival.images if rank == self.ranks[me] and self.survival is not None else images[rank]
            _read(held, rank, next(image for image in own if image.shadow_step == step))
            for name, tensor in self.still.items():
                held.tensors[rank, name, PARAM] = tensor
        return held


def _read(held: Held, rank: int, image: Image) -> None:
    for cell in image.directory.cells:
        tensor = image.shadow(cell)
        if cell.kind == NUMBERS:
            numbers: dict[str, dict[str, Any]] = json.loads(bytes(tensor.numpy().tobytes()).rstrip(b"\0"))
            for name, values in numbers.items():
                held.values.setdefault(name, {}).update({key: decode(value) for key, value in values.items()})
        elif cell.is_piece:
            held.tensors[rank, cell.name, cell.kind] = tensor.reshape(-1)
        elif cell.kind != BLOCK:
            held.values.setdefault(cell.name, {})[cell.kind] = tensor.clone()


def _steps(images: Sequence[Image]) -> set[int]:
    return {step for image in images for step in image.steps}


def _kept_shard(spec: FlatSpec) -> tuple[str, ...]:
    return (spec.table.optim if spec.trainable else spec.table.param).shard


def _is_alone(spec: FlatSpec) -> bool:
    """Whether a rank has something of it that no other has."""
    return bool(_kept_shard(spec))


def _file_name(label: int, rank: int) -> str:
    return f"layout{label}-rank{rank}"
