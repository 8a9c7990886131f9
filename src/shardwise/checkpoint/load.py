"""Resuming from a checkpoint: each rank fetches the elements it needs, whatever mesh, table and units wrote them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.checkpoint import rng
from shardwise.checkpoint.codec import decode
from shardwise.checkpoint.content import Content
from shardwise.checkpoint.document import read_document
from shardwise.checkpoint.folder import newest
from shardwise.checkpoint.read import Reader
from shardwise.checkpoint.recipe import Recipe, fill, read_and_check, work_out
from shardwise.checkpoint.same import check_same_groups, check_same_model, check_same_optimizer
from shardwise.checkpoint.schema import read_index
from shardwise.comm import World
from shardwise.errors import CheckpointError, CommError
from shardwise.machine import num_cores
from shardwise.optim import AdoptedOptimizer

MAX_THREADS = 8
"""That read for one rank."""


class Stateful(Protocol):
    """A scheduler, a loader: whatever says and takes back what it needs to go on."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...


@dataclass(frozen=True)
class Loaded:
    """What came back: the step it was saved at and the user's own state."""

    path: Path
    step: int
    state: dict[str, Any]
    num_bytes_read: int = 0
    """By this rank: what it needs, and what replaced values once more."""


def find(folder: Path, world: World) -> Path | None:
    """The checkpoint that all ranks will read: rank 0 looks, and tells the others. All ranks call.

    What it cannot look into, or what `newest` refuses, all ranks raise.
    """
    said = {}
    if world.rank == 0:
        try:
            found = newest(folder)
            said = {"path": None if found is None else str(found)}
        except (CheckpointError, OSError) as error:
            is_ours = isinstance(error, CheckpointError)
            said = {"error": str(error) if is_ours else f"{folder} cannot be looked into: {error}."}
    told = json.loads(world.exchange(json.dumps(said).encode(), "index")[0])
    if "error" in told:
        raise CheckpointError(told["error"])
    return None if told["path"] is None else Path(told["path"])


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
    if one rank refuses, all raise the same `CheckpointError`. `before_change` is called when all have agreed.
    """
    objects, before = objects or {}, dict[str, Any]()
    with _reader(path, world) as reader, _undone_on_refusal(objects, before):
        recipe = Recipe()
        with _agreed(world):
            check_same_model(path, reader, content, world)
            check_same_groups(path, reader.index, content, optimizer)
            check_same_optimizer(path, reader, content, optimizer)
            recipe = work_out(reader, content, optimizer)
            _check_files(reader, world)
            read_and_check(recipe, reader, optimizer)
            _recall(recipe, reader, world)
            before |= {name: copy.deepcopy(thing.state_dict()) for name, thing in objects.items()}
            _give_back(path, objects, recipe.memories)
        before_change()
        with _agreed(
            world, "The checkpoint changed while it was read, and the model now has parts of it. Resume again. "
        ):
            fill(recipe, reader, optimizer)
        if recipe.generators is not None:
            rng.restore(recipe.generators, world.rank_device)
        return Loaded(path, reader.index.step, decode(reader.index.state), reader.num_bytes_read)


def _num_threads(world: World) -> int:
    """As many cores as this rank has to itself, where more would leave a disk no faster."""
    return max(1, min(MAX_THREADS, num_cores() // max(1, world.local_size or world.size)))


# -- refusals ---------------------------------------------------------------------------------------------


@contextmanager
def _reader(path: Path, world: World) -> Iterator[Reader]:
    reader: list[Reader] = []
    with _agreed(world):
        reader.append(Reader(path, read_index(path), _num_threads(world)))
    with reader[0]:
        yield reader[0]


@contextmanager
def _agreed(world: World, prefix: str = "") -> Iterator[None]:
    """What one rank refuses inside, all refuse on leaving, in the words of the first."""
    refusal = ""
    cause: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the others must hear of it
        refusal = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        cause = error
    refusals = [message.decode() for message in world.exchange(refusal.encode(errors="backslashreplace"), "loaded")]
    if any(refusals):
        raise CheckpointError(prefix + next(said for said in refusals if said)) from cause


@contextmanager
def _undone_on_refusal(objects: Mapping[str, Stateful], before: Mapping[str, Any]) -> Iterator[None]:
    """Put the user's objects back to what they said `before` if this ends in a refusal."""
    try:
        yield
    except (CheckpointError, CommError):
        for name, state in before.items():
            objects[name].load_state_dict(state)
        raise


def _check_files(reader: Reader, world: World) -> None:
    """Of all files, also those that no rank needs, shared among ranks, that they are there."""
    for number, file in enumerate(reader.index.files):
        if number % world.size == world.rank:
            reader.check_file(file)


def _recall(recipe: Recipe, reader: Reader, world: World) -> None:
    """What this rank remembered: generators as far as there was such a rank; objects, in another world, as rank 0's."""
    own = read_document(reader, world.rank)
    if own is not None:
        recipe.generators = own.generators
    chosen = own if reader.index.world_size == world.size else read_document(reader, 0)
    if chosen is not None:
        recipe.memories = chosen.objects


def _give_back(path: Path, objects: Mapping[str, Stateful], memories: Mapping[str, Any]) -> None:
    for name, thing in objects.items():
        if name not in memories:
            raise CheckpointError(
                f"{path} has no state for {name}, which engine.remember() was given. If {name} is new, resume before "
                f"engine.remember({name}=...)."
            )
        try:
            thing.load_state_dict(memories[name])
        except Exception as error:  # it is the user's object, and may raise anything
            raise CheckpointError(
                f"{name}.load_state_dict() refused the state in {path} ({type(error).__name__}: {error})."
            ) from error
