"""Memory for images: all ranks have it, or all raise the same error.

[Note: twice the images] Recovery makes the images of the new layout before it deletes those of the old one, to which
the ranks return if another one is lost meanwhile. So it needs twice the memory of the images. A file system in memory
is often a small part of a host's memory (64 MiB in a container of Docker). So an image that finds no space there waits
in memory of its process, and moves when a rank begins an iteration and the old ones are gone. Until then, its state is
lost with its process.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shardwise.comm import World
from shardwise.comm.agreed import raise_first
from shardwise.comm.world import num_ranks_per_host
from shardwise.errors import CommError, StateError, TierError
from shardwise.system.machine import memory_here
from shardwise.system.units import format_bytes

_NUMBER = re.compile(r"-(\d+)\.image$")
HOW_TO_ENLARGE = "(in Docker with --shm-size, otherwise with `mount -o remount,size=... /dev/shm`)"
_CURE = f"Enlarge it {HOW_TO_ENLARGE}, or choose survive: checkpoint, which needs none."
_log = logging.getLogger("shardwise")


class NoSpaceError(StateError):
    """A host's memory does not have the space for an image."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        super().__init__(
            f"/dev/shm has no space for the state that must outlive a rank: {format_bytes(num_bytes)} are needed by "
            f"one rank, and {format_bytes(_free_bytes(folder))} are free there. While ranks recover, new images are "
            f"made before the old ones are deleted, in other memory of the host if there is enough. {_CURE}"
        )


def memory_to_wait_in(world: World) -> int:
    """Bytes that an image of each rank, and a copy of another one's, may take of the host's other memory: see [Note:
    twice the images]."""
    return memory_here().available_bytes // (2 * num_ranks_per_host(world))


def make_images(world: World, make: Callable[[], object], *, lets_in: bool) -> None:
    """Call `make`, which makes images. All ranks call, and all raise `StateError` if one has no space: otherwise the
    others would continue without it, as if it had died.

    `lets_in`, on a rank that was there when others join: it raises `CommError` then, and goes on without them, as they
    end.
    """
    refusals = world.exchange(why_no_space(make).encode(), "space for images")
    try:
        raise_first(refusals, StateError)
    except StateError as error:
        if lets_in:
            raise CommError(f"Nobody could join: {error}") from error
        raise


def why_no_space(make: Callable[[], object]) -> str:
    """Why there is no space for the images that `make()` makes; empty if there is."""
    try:
        make()
    except (NoSpaceError, TierError) as error:
        return str(error)
    return ""


def share_wishes(world: World, subject: str, refusal: str, *, wants: bool) -> bool:
    """Whether any rank `wants` something. All ranks call, and all raise the first `refusal` there is."""
    received = world.exchange(f"{'1' if wants else ''}{refusal}".encode(), subject)
    raise_first((one.removeprefix(b"1") for one in received), StateError)
    return any(one.startswith(b"1") for one in received)


def warn_if_scarce(folder: Path | None, world: World) -> None:
    """On one rank of each host, warn if its present images fit in its memory once, but not twice: see [Note: twice the
    images]."""
    if folder is None or world.rank != min(world.ranks_of_host):
        return
    sizes = _sizes_of_images(folder)
    free = _free_bytes(folder)
    while (now := _sizes_of_images(folder)) != sizes:  # other ranks delete their old ones
        sizes, free = now, _free_bytes(folder)
    newest: dict[str, tuple[int, int]] = {}
    for (owner, number), size in sizes.items():
        newest[owner] = max(newest.get(owner, (-1, 0)), (number, size))
    needed = sum(size for _, size in newest.values())
    free += sum(sizes.values()) - needed
    if free < needed:
        _log.warning(
            "/dev/shm has too little space for old and new images while ranks recover: images take %s on this host, "
            "and %s are free. New ones wait in other memory of the host until the old ones are deleted. If another "
            "rank is lost meanwhile, or there is not enough of that either, all ranks start again from the last "
            "checkpoint. %s",
            format_bytes(needed),
            format_bytes(free),
            _CURE,
        )


def _sizes_of_images(folder: Path) -> dict[tuple[str, int], int]:
    """Bytes of each image that is there, by its owner and number."""
    sizes = {}
    for path in folder.glob("*.image"):
        if (found := _NUMBER.search(path.name)) is not None:
            with suppress(FileNotFoundError):  # deleted by its rank, which has a newer one
                sizes[path.name[: found.start()], int(found.group(1))] = path.stat().st_size
    return sizes


def _free_bytes(folder: Path) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
