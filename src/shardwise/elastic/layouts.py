"""A layout whose ranks have images, and what can still be read of it after some ranks are lost.

[Note: sources] The state of a lost rank may be in its own image, in the memory of its host, if another rank of that
host survives; and in the copy that its keeper has on another host, which all ranks of that host can read. After
regrouping, all ranks exchange what they can read, and so agree on the step to return to and on who reads which state.
A reader had the same part of the model, and has itself what never changes. If no such rank is left, because there was
one replica group only or each has lost one, any other reads an image that has all that the lost rank had.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import Held
from shardwise.checkpoint.content import kept_span
from shardwise.checkpoint.json_codec import decode, dtype_of
from shardwise.comm import World
from shardwise.elastic.copies import Copies, CopyMeter
from shardwise.elastic.regroup_reports import IMAGES, Report
from shardwise.elastic.stage_buffers import BEGUN, BEGUN_AT, COMMITTED, RanksBuffers, StageBuffers
from shardwise.elastic.state_image import (
    AT,
    BLOCK,
    PARAM,
    SUMS,
    TORN,
    Cell,
    Image,
    ImagePlace,
    RestingCodes,
    first_changed,
)
from shardwise.elastic.survival import NUMBERS, Survival
from shardwise.errors import CommError, LostStateError, StateError
from shardwise.memory import CodedRows, DiskMemory, DiskRows, Flat, torch_dtype
from shardwise.optim.quantize import Coded
from shardwise.plan.mesh import place_along
from shardwise.plan.placement import Codes, Slot
from shardwise.plan.replica_groups import is_lone, parts_of_copies
from shardwise.program import FlatSpec
from shardwise.program.buddies import Keepers, Kept, KeptByRank, keepers, kept_alike
from shardwise.runtime.codec import codec_for
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.system.disk import Removals, remove_files_beside

Tensor = torch.Tensor
_log = logging.getLogger("shardwise")
_COPY = "copy-"
"""Prefix of the file names of copies kept for other hosts."""


@dataclass(frozen=True)
class Source:
    """A lost rank's image that a survivor can read."""

    live_version: int
    shadow_version: int
    is_live_whole: bool
    """See `Directory.is_live_whole`."""
    sees_update: bool
    """Whether the survivor has its own parameters as they were after the update that made the live version, with what
    others updated."""
    is_all: bool
    """See `Directory.is_all`."""

    @classmethod
    def of(cls, image: Image, sees_update: bool) -> Source:
        directory = image.directory
        return cls(image.live_version, image.shadow_version, directory.is_live_whole, sees_update, directory.is_all)

    @property
    def versions(self) -> set[int]:
        return {self.live_version, self.shadow_version} - {TORN}

    def has(self, version: int) -> bool:
        """Whether all that only the lost rank had is there, as it was in `version`."""
        return self.shadow_version == version or (self.live_version == version and self.is_live_whole)


Sources = Mapping[int, Sequence[Source]]
"""What one rank of the present world can read, by lost rank."""


@dataclass
class Layout:
    """How parameters and states are divided among the ranks of one world, and which rank each of them is now."""

    label: int
    """The number of this layout in its job."""
    size: int
    specs: list[tuple[FlatSpec, tuple[Slot, ...]]]
    ranks: tuple[int | None, ...]
    """By rank of the present world: its rank in this layout, or `None` if it was not part of it."""
    folder: Path | None
    removals: Removals
    """Of what ranks that are gone have on disks."""
    keepers: Keepers = ()
    """Which rank keeps the copy of whose state, on another host."""
    hosts: tuple[str, ...] = ()
    """By rank; empty if all are on one."""
    survival: Survival | None = None
    """This rank's own images, and its copies of others; `None` on a rank that joined later."""
    flats: list[Flat] = field(default_factory=list)
    """The flat buffers, until the model is taken down."""
    disk: DiskMemory | None = None
    """Through which rows on a disk are read."""
    kept: KeptByRank = ()
    """By rank, what it keeps; empty if all keep what `specs` say."""
    still: dict[str, tuple[Tensor, CodedRows | None]] = field(default_factory=dict)
    """Tensors that every rank has whole and that never change, by parameter; the rows, if they lie as codes."""

    @classmethod
    def of(
        cls,
        sharded: ShardedModel,
        label: int,
        folder: Path | None,
        meter: CopyMeter,
        removals: Removals,
        kept: KeptByRank = (),
        *,
        waiting_bytes: int = 0,
    ) -> Layout:
        """The layout of a sharded model, with images, which are empty before `survival.begin`. `waiting_bytes` is what
        an image may take of other memory while it finds no space in the `folder`."""
        flats, world = sharded.parts.flats, sharded.world
        specs = [(flat.spec, flat.slots) for flat in flats]
        lone = is_lone(sharded.mesh)
        kept = kept or kept_alike([flat.spec for flat in flats], world.size)
        shards = any(one.shard for of_rank in kept for one in of_rank)
        own = folder if lone or sharded.disk is not None or shards else None
        kept_by: Keepers = ()
        if sharded.plan.survive != "host":
            kept_by = keepers([spec for spec, _ in specs], world.hosts, kept)
        copies = None
        if any(keeper is not None for keeper in kept_by):
            names = [f"{_COPY}{_file_name(label, rank)}" for rank in range(world.size)]
            copies = Copies(world, kept_by, own, names, meter, sharded.disk, waiting_bytes=waiting_bytes)
        survival = Survival(
            flats,
            sharded.parts.optimizer,
            ImagePlace(own, _file_name(label, world.rank), waiting_bytes),
            copies,
            is_lone=lone,
            buffers=StageBuffers.of(sharded),
            is_verified=sharded.parts.verification is not None,
        )
        if sharded.disk is not None:
            sharded.disk.outlives_rank, sharded.disk.on_failure = True, survival.give_up
        still = {
            slot.name: (flat.param_piece(index), flat.coded)
            for flat in flats
            if not lone and not flat.spec.trainable and not flat.spec.table.param.shard
            for index, slot in enumerate(flat.slots)
        }
        ranks = tuple(range(world.size))
        disk = sharded.disk
        given = (label, world.size, specs, ranks, own, removals, kept_by, world.hosts)
        return cls(*given, survival, flats, disk, kept, still)

    def regrouped(self, origins: Sequence[int | None]) -> Layout:
        """The same layout for the ranks of another world."""
        ranks = tuple(None if origin is None else self.ranks[origin] for origin in origins)
        return replace(self, ranks=ranks)

    @property
    def gone(self) -> list[int]:
        """Ranks of this layout that are lost."""
        return [rank for rank in range(self.size) if rank not in self.ranks]

    def images_of(self, rank: int) -> list[Image]:
        """What this rank can read of a lost one: its files and copies, which no process writes to any more."""
        copies = self.survival.copies if self.survival is not None else None
        kept = copies.kept.get(rank) if copies is not None else None
        if self.folder is None:
            return list(kept.images) if kept is not None else []
        found = list(kept.waiting) if kept is not None else []
        for path in self._files_of(rank):
            # its writer died before it was complete, or was stopped, goes on, and has a newer one
            with contextlib.suppress(StateError, FileNotFoundError):
                found.append(Image.open(path))
        return found

    def sources(self, me: int, *, compares: bool) -> dict[int, list[Source]]:
        """What this rank, `me` in the present world, can read of the lost ones. `compares`: not what has other
        checksums than they have noted."""
        if self.survival is None:
            return {}
        sees_update, own = self._sees_update(), self.survival.image.live_version
        found = {rank: self.images_of(rank) for rank in self.gone}
        compared = found if compares else {}
        changed = {rank for rank in compared if self._has_changed(me, rank, found[rank], sees_update=sees_update)}
        return {
            rank: [
                Source.of(image, sees_update and rank not in changed and image.live_version == own) for image in images
            ]
            for rank, images in found.items()
        }

    def _has_changed(self, me: int, rank: int, images: Sequence[Image], *, sees_update: bool) -> bool:
        """Mark what has other checksums than the lost `rank` has noted. Returns whether that is so of what it had
        outside its live region, if this rank, `me` in the present world, has that."""
        sees_rest = sees_update and self._has_same_part(me, rank) and self._sees_rest(me, rank)
        has_changed = False
        for image in images:
            changed = image.tear_what_has_changed()
            parts = self._outside_live(rank, image) if sees_rest else ()
            outside = first_changed(image.noted_sums(is_live=True) or {}, parts)
            has_changed = has_changed or bool(outside)
            if changed or outside:
                _log.error("What rank %d has left is not used, as it has wrong bits: %s.", rank, changed or outside)
        return has_changed

    def _outside_live(self, rank: int, image: Image) -> Iterator[tuple[Cell, Tensor]]:
        """What a lost rank had outside its live region, of parameters that this rank has whole."""
        homes = {slot.name: (flat, slot) for flat in self.flats for slot in flat.slots}
        for cell in image.directory.cells:
            if cell.is_live or cell.is_still or cell.kind != PARAM:
                continue
            flat, slot = homes[cell.name]
            span, start = kept_span(flat.spec, slot, flat.spec.mesh.coordinate(rank)), slot.span.start
            yield cell, flat.full[start + span.start : start + span.stop]

    def _sees_update(self) -> bool:
        """Whether all gathers that were under way when a rank was lost have brought the whole update."""
        try:
            for flat in self.flats:
                _ = flat.full  # blocks until it is gathered, or is known to have failed
        except CommError:
            return False
        return bool(self.flats)

    def remove(self, *, is_last: bool = True) -> None:
        """Delete its images and copies: no rank will return to it. If it `is_last`, nor to any other that lost ranks
        were in, and nothing that they have on a disk stays. That is deleted in the background."""
        if self.survival is not None:
            self.survival.close()
        for rank in self.gone:
            for path in self._files_of(rank):
                self._remove(path, all_of_rank=is_last and not path.name.startswith(_COPY))
        lost = [rank for rank, keeper in enumerate(self.keepers) if keeper in self.gone]
        for rank in lost:  # copies that a lost rank of this host kept
            for path in self._files_of(rank, [_COPY]):
                self._remove(path)

    def clear(self) -> None:
        """Delete all images of this host, of any rank: no rank will return to it."""
        if self.survival is not None:
            self.survival.close()
        for rank in range(self.size):
            for path in self._files_of(rank):
                self._remove(path)

    def leave(self, world: World) -> None:
        """This rank has come to the end. The last one of its host deletes all images; until then others may need them,
        if a rank is lost."""
        if self.survival is None or self.folder is None:
            self.remove()
            return
        self.survival.close(removes=False)
        self._mark_of(world.rank).touch()
        if all(self._mark_of(rank).exists() for rank in world.ranks_of_host):
            for rank in range(self.size):
                for path in self._files_of(rank):
                    self._remove(path)
                self._mark_of(rank).unlink(missing_ok=True)

    def _remove(self, path: Path, *, all_of_rank: bool = False) -> None:
        """Delete an image and its files on a disk; with `all_of_rank`, all that the rank that made them has there."""
        files: list[Path] = []
        with contextlib.suppress(StateError, FileNotFoundError):  # it is not complete, or another rank has deleted it
            files += [Path(one) for rows in Image.open(path).directory.rows for one in rows.paths]

        def delete() -> None:
            for file in files:
                if all_of_rank:
                    remove_files_beside(file)
                else:
                    file.unlink(missing_ok=True)
            path.unlink(missing_ok=True)  # the last: if this rank is killed first, others know by it what is to be done

        if files:
            self.removals.start(files[0], delete)
        else:
            delete()

    def _mark_of(self, rank: int) -> Path:
        """A file that is there when a rank has left."""
        assert self.folder is not None
        return self.folder / f"left-{_file_name(self.label, rank)}"

    def _files_of(self, rank: int, prefixes: Sequence[str] = ("", _COPY)) -> list[Path]:
        """A rank's files in this host's memory: its images, and copies of them."""
        if self.folder is None:
            return []
        name = _file_name(self.label, rank)
        return [path for prefix in prefixes for path in sorted(self.folder.glob(f"{prefix}{name}-*.image"))]

    # -- who has what -------------------------------------------------------------------------------------

    def newest(self, versions: Sequence[set[int]], seen: Sequence[Sources]) -> tuple[int, dict[int, int]]:
        """The newest version of the state that is whole, and which rank of the present world reads the part of each
        lost rank, by its rank in this layout.

        `versions` are those that each rank of the present world has, `seen` what each can read of lost ranks. Raises
        `LostStateError` if no version is whole.
        """
        here = [steps for steps, rank in zip(versions, self.ranks, strict=True) if rank is not None]
        common = set.intersection(*here) if here else set()
        for version in sorted(common, reverse=True):
            readers = self._readers(version, seen)
            if self._is_whole({*(rank for rank in self.ranks if rank is not None), *readers}):
                return version, readers
        raise LostStateError(self._why_lost(here, seen))

    def _why_lost(self, here: Sequence[set[int]], seen: Sequence[Sources]) -> str:
        found = {
            rank: set().union(*(source.versions for one in seen for source in one.get(rank, ()))) for rank in self.gone
        }
        kept_by = dict(enumerate(self.keepers))
        both = [
            f"{rank} and {kept_by[rank]}" for rank in self.gone if kept_by.get(rank) in self.gone and not found[rank]
        ]
        who = f"Rank {', '.join(map(str, self.gone))} is gone"
        if both:
            who = f"Ranks {', '.join(both)} are gone, of which one kept the copy of the other's state"
        several = len(set(self.hosts)) > 1
        cure = " With survive: buddy a whole host may be lost." if several and not self.keepers else ""
        return (
            f"{who}, and no whole state is left: the survivors have versions {sorted(map(sorted, here))}, and of the "
            f"lost ranks {list(map(sorted, found.values()))} can be read.{cure} Start again from the last checkpoint."
        )

    def _readers(self, version: int, seen: Sequence[Sources]) -> dict[int, int]:
        """By lost rank whose state of `version` can be read, the rank that reads it. Several lost ranks are divided
        among the ranks that could read them."""
        readers = {}
        for rank in self.gone:
            sources = [(reader, one) for reader, sees in enumerate(seen) for one in sees.get(rank, ())]
            able = sorted(set(self._able_to_read(rank, version, sources)))
            if able:
                readers[rank] = able[rank % len(able)]
        return readers

    def _able_to_read(self, rank: int, version: int, sources: Sequence[tuple[int, Source]]) -> list[int]:
        """Who can read the state of the lost `rank` in `version`, from the first of these that anybody can: a copy that
        was made; the live region, if the update and all outside of it are to be seen; an image of the whole model."""
        alike = [(reader, one) for reader, one in sources if self._has_same_part(reader, rank)]
        return (
            [reader for reader, one in alike if one.has(version)]
            or [
                reader
                for reader, one in alike
                if one.live_version == version and one.sees_update and self._sees_rest(reader, rank)
            ]
            or [reader for reader, one in sources if one.has(version) and one.is_all]
        )

    def _is_whole(self, available: set[int]) -> bool:
        """Whether the parts of the `available` ranks make up the whole state."""
        mesh = self.specs[0][0].mesh
        places = {rank: place_along(mesh, mesh.parted_axes, rank) for rank in range(self.size)}
        every = [places]  # a stage that has no experts itself says the same as one that has
        for one in {one for of_rank in self._kept for one in of_rank}:
            axes = (*mesh.model_axes, *one.split, *one.shard)
            having = [rank for rank, of_rank in enumerate(self._kept) if one in of_rank]
            every.append({rank: place_along(mesh, axes, rank) for rank in having})
        return all({*parts.values()} <= {parts[rank] for rank in available if rank in parts} for parts in every)

    @property
    def _kept(self) -> KeptByRank:
        return self.kept or kept_alike([spec for spec, _ in self.specs], self.size)

    def _has_same_part(self, reader: int, rank: int) -> bool:
        """Whether `reader`, a rank of the present world, had the same parts as the lost `rank` of all parameters that
        more than one rank has. Images are read by such ranks, whose flat buffers of these have the same form."""
        one, mesh = self.ranks[reader], self.specs[0][0].mesh
        if one is None:
            return False
        axes = parts_of_copies(mesh)
        return place_along(mesh, axes, one) == place_along(mesh, axes, rank)

    def _sees_rest(self, reader: int, rank: int) -> bool:
        """Whether `reader`, a rank of the present world on the same host, can read all that the lost `rank` had outside
        its live region: parameters in memory that they shared, or that the reader has whole."""
        wanted = {kept.at_rest for kept in self._kept[rank] if kept.at_rest}
        mesh, one = self.specs[0][0].mesh, self.ranks[reader]
        return one is not None and all(one in mesh.among(rank, axes) for axes in wanted)

    def is_first_of_list(self, rank: int) -> bool:
        """Whether `rank` of the present world is the first that was part of this layout with its list of parameters, on
        any island."""
        mesh, own = self.specs[0][0].mesh, self.ranks[rank]
        same = () if own is None else mesh.among(own, (*mesh.island_axes, *mesh.params_axes))
        return rank == next((one for one, former in enumerate(self.ranks) if former in same), None)

    # -- reading ------------------------------------------------------------------------------------------

    def complete(self, rank: int, images: Sequence[Image], version: int) -> None:
        """Fill the shadow of a lost rank with the state of `version`, before the survivors' memory is released."""
        if any(image.shadow_version == version for image in images):
            return
        able = [image for image in images if image.live_version == version]
        image = max(able, key=lambda image: image.directory.is_live_whole)
        image.shadow_version = TORN
        image.copy_live()
        for cell, part in self._outside_live(rank, image):
            image.shadow(cell).copy_(part)
        image.shadow_version = version

    def stands_for(self, readers: Mapping[int, int]) -> list[list[int]]:
        """By rank of the present world: the ranks of this layout whose parts it provides."""
        stands_for: list[list[int]] = [[] if rank is None else [rank] for rank in self.ranks]
        for rank, reader in sorted(readers.items()):
            stands_for[reader].append(rank)
        return stands_for

    def held(self, me: int, readers: Mapping[int, int], images: Mapping[int, list[Image]], version: int) -> Held:
        """What this rank, `me` in the present world, provides of `version`; `images` are of the lost ranks it reads."""
        stands_for = self.stands_for(readers)
        held = Held(list(self.specs), tuple(map(tuple, stands_for)))
        for rank in stands_for[me]:
            is_own = rank == self.ranks[me] and self.survival is not None
            every = self.survival.images if is_own and self.survival is not None else images[rank]
            image = next(image for image in every if image.shadow_version == version)
            _read(held, rank, image, self._rows_of(image, is_own=is_own))
            for name, (tensor, rows) in self.still.items():
                held.tensors[rank, name, PARAM] = tensor
                if rows is not None:
                    held.rows[rank, name] = rows
        return held

    def buffers(
        self, me: int, readers: Mapping[int, int], images: Mapping[int, list[Image]], version: int
    ) -> list[RanksBuffers]:
        """Those of stages, likewise; of this rank itself the present ones."""
        own = self.survival.buffers if self.survival is not None else None
        if own is None:
            return []
        found = []
        for rank in self.stands_for(readers)[me]:
            if rank == self.ranks[me]:
                found.append(RanksBuffers.living(rank, own))
            else:
                image = next(image for image in images[rank] if image.shadow_version == version)
                found.append(RanksBuffers.read(rank, image, version))
        return found

    def give_up_silent(self, images: Mapping[int, list[Image]]) -> None:
        """Nobody else of this host is to wait for disks of lost ranks that have answered nothing."""
        for image in (one for of_rank in images.values() for one in of_rank):
            paths = [Path(path) for rows in image.directory.rows for path in rows.paths]
            if self.disk is not None and any(map(self.disk.is_silent, paths)):
                image.tear()

    def _rows_of(self, image: Image, *, is_own: bool) -> list[DiskRows]:
        """What an image has on a disk. Raises `TierError` if the files of another rank cannot be opened."""
        if is_own and self.survival is not None:
            return self.survival.rows
        disk, every = self.disk, image.directory.rows
        if disk is None:
            return []
        return [disk.rows_of_other(rows.name, [Path(path) for path in rows.paths], rows.num_bytes) for rows in every]


def kept_by_rank(sharded: ShardedModel) -> KeptByRank:
    """What each rank keeps. All ranks call: those of other pipeline stages have other parameters."""
    own = {Kept.of(flat.spec) for flat in sharded.parts.flats}
    if sharded.parts.pipeline is None:
        return [own] * sharded.world.size
    told = json.dumps([one.as_json() for one in own]).encode()
    return [frozenset(map(Kept.from_json, json.loads(one))) for one in sharded.world.exchange(told, "what is kept")]


def choose(
    layouts: Sequence[Layout], reports: Sequence[Report | None], world: World, *, compares: bool
) -> tuple[Layout, int, dict[int, int]]:
    """The newest layout that is complete on all ranks, its newest whole state, and the reader of each lost rank.

    `reports` has one entry per rank of `world`, `None` for a rank that has joined. `compares`: see `Layout.sources`.
    All ranks call.
    """
    label = min(one.label for one in reports if one is not None)
    complete = [layout for layout in layouts if layout.label <= label]
    seen = _all_sources(complete, world, compares=compares)
    for layout in complete:
        try:
            versions = [set() if one is None else set(one.versions.get(layout.label, [])) for one in reports]
            version, readers = layout.newest(versions, [one.get(layout.label, {}) for one in seen])
        except LostStateError:
            if layout is complete[-1]:
                raise
            continue
        return layout, version, readers
    raise LostStateError("The surviving ranks have no layout in common. Start again from the last checkpoint.")


def _all_sources(
    layouts: Sequence[Layout], world: World, *, compares: bool
) -> list[dict[int, dict[int, list[Source]]]]:
    """By rank of `world`, layout and lost rank: see [Note: sources]."""
    mine = {
        layout.label: {
            rank: list(map(astuple, found)) for rank, found in layout.sources(world.rank, compares=compares).items()
        }
        for layout in layouts
    }
    received = [json.loads(one) for one in world.exchange(json.dumps(mine).encode(), IMAGES)]
    return [
        {
            int(label): {int(rank): [Source(*one) for one in found] for rank, found in sources.items()}
            for label, sources in one.items()
        }
        for one in received
    ]


def _read(held: Held, rank: int, image: Image, rows: Sequence[DiskRows]) -> None:
    files = image.files(is_live=False).tolist() if rows else []
    scales = image.directory.scales()
    for cell in image.directory.cells:
        if (cell.name, cell.kind) in scales:
            continue
        if isinstance(cell.codes, Coded):
            tensor = cell.codes.read(image.shadow(cell), image.shadow(scales[cell.name, cell.codes.scales]))
        elif cell.rows is None:
            tensor = image.shadow(cell)
        else:
            tensor = rows[cell.rows].part(files[cell.rows], cell.offset, cell.shape, dtype_of(cell.dtype))
            held.rows[rank, cell.name] = rows[cell.rows]
        if cell.kind == NUMBERS:
            numbers: dict[str, dict[str, Any]] = json.loads(bytes(tensor.numpy().tobytes()).rstrip(b"\0"))
            for name, values in numbers.items():
                held.values.setdefault(name, {}).update({key: decode(value) for key, value in values.items()})
        elif isinstance(cell.codes, RestingCodes):
            held.rows[rank, cell.name] = resting = _resting(cell.codes, cell.name, tensor)
            held.tensors[rank, cell.name, PARAM] = resting.param
        elif cell.is_piece:
            held.tensors[rank, cell.name, cell.kind] = tensor.reshape(-1)
            if not cell.is_still:
                held.trained.add(cell.name)
        elif cell.kind not in (BLOCK, AT, SUMS, COMMITTED, BEGUN, BEGUN_AT):
            held.values.setdefault(cell.name, {})[cell.kind] = tensor.clone()


def _resting(rest: RestingCodes, name: str, made: Tensor) -> CodedRows:
    """The rows of a parameter that lies as the codes `made`."""
    codes = Codes(rest.dtype, rest.block, rests=True)
    return CodedRows.of(made, name, codec_for(codes), codes, torch_dtype(rest.elements))


def _file_name(label: int, rank: int) -> str:
    return f"layout{label}-rank{rank}"
