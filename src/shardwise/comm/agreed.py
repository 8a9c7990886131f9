"""What each rank does by itself, and what becomes of all of them when it fails on one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from shardwise.comm.world import World
from shardwise.errors import CommError, ShardwiseError, said_by


class Failure(NamedTuple):
    """What the first rank that failed has met."""

    rank: int
    kind: type[ShardwiseError]
    text: str


class Told:
    """What the ranks tell each other of their work."""

    def __init__(self) -> None:
        self.mine: Any = None
        """For this rank to set: anything JSON can hold."""
        self.by_rank: list[Any] = []
        """What each has set, when all are done."""


@contextmanager
def agreed(
    world: World,
    subject: str,
    *kinds: type[ShardwiseError],
    worded: Callable[[Failure], str] = lambda failure: failure.text,
) -> Iterator[Told]:
    """Inside `with`, each rank works by itself. If one fails, all raise on leaving, because they would wait for it for
    ever. Whoever sends inside takes part to the end, also after an error; a `CommError` is raised as it is, since all
    have it and none can tell.

    They raise what the first of these ranks has met, in the words of `worded`: as the first of `kinds` that it is one
    of, else as the last. What a rank has met itself is the cause there. `subject` is as for `World.exchange`. All ranks
    call.
    """
    told, cause = Told(), None
    message: dict[str, Any] = {}
    try:
        yield told
        message["told"] = told.mine
    except CommError:
        raise
    except Exception as error:  # the others must learn of it, whatever it is
        cause = error
        kind = next((number for number, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds) - 1)
        message["failed"] = kind, said_by(error)
    messages = [json.loads(one) for one in world.exchange(json.dumps(message).encode(), subject)]
    for rank, one in enumerate(messages):
        if "failed" in one:
            kind, text = one["failed"]
            failure = Failure(rank, kinds[kind], text)
            raise failure.kind(worded(failure)) from cause
    told.by_rank = [one["told"] for one in messages]


def raise_first(problems: Iterable[bytes], kind: type[ShardwiseError]) -> None:
    """Raise, as `kind`, the first of the `problems` that ranks have sent each other; those that have none send nothing.
    For ranks that have problems in words, and on lines; what raises by itself is for `agreed`."""
    if problem := next(filter(None, problems), b""):
        raise kind(problem.decode())
