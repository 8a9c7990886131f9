"""Resuming from a checkpoint: each rank reads the elements it needs, whatever mesh, table and units wrote them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.checkpoint import rng
from shardwise.checkpoint.content import Content
from shardwise.checkpoint.document import read_document
from shardwise.checkpoint.folder import newest
from shardwise.checkpoint.index_schema import read_index
from shardwise.checkpoint.json_codec import decode
from shardwise.checkpoint.read import Reader
from shardwise.checkpoint.read_plan import Recipe, fill, plan, read_and_check
from shardwise.checkpoint.same import check_same_groups, check_same_model, check_same_optimizer, check_same_settings
from shardwise.checkpoint.wrappers import named_as
from shardwise.comm import World
from shardwise.comm.agreed import Failure, agreed
from shardwise.errors import CheckpointError, CommError
from shardwise.optim import AdoptedOptimizer
from shardwise.system.machine import num_cores

MAX_THREADS = 8
"""The most threads that read for one rank."""


class Stateful(Protocol):
    """An object with a state to save and load, such as a scheduler or a loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...


@dataclass(frozen=True)
class Loaded:
    """What was restored: the step of the checkpoint and the user's own state."""

    path: Path
    step: int
    state: dict[str, Any]
    num_bytes_read: int = 0
    """Read by this rank: what it needs, with replaced values counted twice."""


def find(folder: Path, world: World, if_none: Callable[[Path], object] = lambda _: None) -> Path | None:
    """The checkpoint that all ranks will read: rank 0 looks for it and tells the others. All ranks call.

    All ranks raise `CheckpointError` if it cannot look into the folder, or `newest` raises, or, where there is none in
    a folder that exists, `if_none(folder)`.
    """
    with agreed(world, "index", CheckpointError) as told:
        if world.rank == 0:
            try:
                found = newest(folder)
                if found is None and folder.is_dir():
                    if_none(folder)
            except OSError as error:
                raise CheckpointError(f"{folder} cannot be looked into: {error}.") from error
            told.mine = None if found is None else str(found)
    path = told.by_rank[0]
    return None if path is None else Path(path)


def load(
    path: Path,
    content: Content,
    optimizer: AdoptedOptimizer | None,
    world: World,
    objects: Mapping[str, Stateful] | None = None,
    before_change: Callable[[], None] = lambda: None,
) -> Loaded:
    """Fill `content`, the optimizer, the `objects` and this rank's generators from the checkpoint at `path`.

    All ranks call. Nothing is changed before the index and every byte that is needed have been checked on every rank;
    if one rank raises, all raise the same `CheckpointError`. `before_change` is called when all have agreed.
    """
    objects, before = objects or {}, dict[str, Any]()
    with _reader(path, content, world) as reader, _undone_on_refusal(objects, before):
        with agreed(world, "loaded", CheckpointError):
            check_same_model(path, reader, content, world)
            check_same_groups(path, reader.index, content, optimizer)
            check_same_optimizer(path, reader, content, optimizer)
            check_same_settings(path, reader.index, optimizer)
            recipe = plan(reader, content, optimizer)
            _check_files(reader, world)
            read_and_check(recipe, reader, optimizer)
            _load_document(recipe, reader, world)
            before |= {name: copy.deepcopy(thing.state_dict()) for name, thing in objects.items()}
            _load_objects(path, objects, recipe.memories)
        before_change()
        with agreed(world, "loaded", CheckpointError, worded=_half_read):
            fill(recipe, reader, optimizer)
        if recipe.generators is not None:
            rng.restore(recipe.generators, world.rank_device)
        return Loaded(path, reader.index.step, decode(reader.index.state), reader.num_bytes_read)


def _num_threads(world: World) -> int:
    """One thread per core that this rank has to itself, limited because more would not speed up a disk."""
    return max(1, min(MAX_THREADS, num_cores() // max(1, world.local_size or world.size)))


# -- refusals ---------------------------------------------------------------------------------------------


@contextmanager
def _reader(path: Path, content: Content, world: World) -> Iterator[Reader]:
    with agreed(world, "loaded", CheckpointError):
        index = named_as(read_index(path), [*content.shapes, *content.ties])
        reader = Reader(path, index, _num_threads(world))
    with reader:
        yield reader


def _half_read(failure: Failure) -> str:
    return f"The checkpoint changed while it was read, and the model now has parts of it. Resume again. {failure.text}"


@contextmanager
def _undone_on_refusal(objects: Mapping[str, Stateful], before: Mapping[str, Any]) -> Iterator[None]:
    """Restore the user's objects to the states in `before` if this ends in an error."""
    try:
        yield
    except (CheckpointError, CommError):
        for name, state in before.items():
            with suppress(Exception):  # the user's object may refuse that too; what it refused first is the error
                objects[name].load_state_dict(state)
        raise


def _check_files(reader: Reader, world: World) -> None:
    """Check that all files exist, even those that no rank needs; the ranks share the work."""
    for number, file in enumerate(reader.index.files):
        if number % world.size == world.rank:
            reader.check_file(file)


def _load_document(recipe: Recipe, reader: Reader, world: World) -> None:
    """Load this rank's document: generators if there was such a rank; objects of rank 0 if the world size differs."""
    own = read_document(reader, world.rank)
    if own is not None:
        recipe.generators = own.generators
    chosen = own if reader.index.world_size == world.size else read_document(reader, 0)
    if chosen is not None:
        recipe.memories = chosen.objects


def _load_objects(path: Path, objects: Mapping[str, Stateful], memories: Mapping[str, Any]) -> None:
    for name, thing in objects.items():
        if name not in memories:
            raise CheckpointError(
                f"{path} has no state for {name}, which engine.remember() was given. If {name} is new, resume before "
                f"engine.remember({name}=...)."
            )
        try:
            thing.load_state_dict(memories[name])
        except Exception as error:  # the user's object may raise anything
            raise CheckpointError(
                f"{name}.load_state_dict() refused the state in {path} ({type(error).__name__}: {error}). Give "
                f"engine.remember({name}=...) an object like the one that was saved under this name."
            ) from error
