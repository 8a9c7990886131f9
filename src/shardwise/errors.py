"""Every error that shardwise raises on purpose.

A message says in a few sentences what happened, to which parameter, axis or file by the user's own name, what was
expected, and what to do next. `ShardwiseError` is the base class of all of them.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Sequence

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of `OSError` that more space cures."""
_NAMES_ENGINE = re.compile(r"(?<![\w.])engine\.(?!shardwise\b)[a-z]")
_made_by: list[str] = []
"""Libraries that make engines, each with where a script finds its own."""


def engines_are_made_by(library: str, found_at: str) -> None:
    """Let errors tell scripts of `library` which object `engine` is: they have not made one themselves. For modules of
    `integrations`, when they are imported."""
    if (made := f"{library}: {found_at}") not in _made_by:
        _made_by.append(made)


def whose_engine(text: str) -> str:
    """A sentence about which object `engine` is in `text`; "" if it names none, or no library makes any here."""
    if not _made_by or not _NAMES_ENGINE.search(text):
        return ""
    return f"Where a library has made the engine, it is there ({', '.join(_made_by)})."


class ShardwiseError(Exception):
    """The base class of all errors of shardwise."""

    def __init__(self, *args: object) -> None:
        # As `super().__init__` does, which Dynamo does not know, nor str(self) in torch 2.11: it traces our hooks.
        self.args = args
        if where := whose_engine(str(args[0]) if args else ""):
            self.add_note(where)  # below the message, which tests and reports of ranks compare


class ConfigError(ShardwiseError, ValueError):
    """An invalid value in a plan, a file or an option."""


class PlacementError(ConfigError):
    """A table that contradicts itself, or that no rank could hold."""


class ProgramError(ShardwiseError):
    """A program that would read what is not there; a defect of the code that built it."""


class ModelError(ShardwiseError, ValueError):
    """A model or optimizer that cannot be sharded as it is."""


class CommError(ShardwiseError, RuntimeError):
    """Ranks that could not meet, or disagree about what to send."""


class FaultError(CommError):
    """A fault between ranks. Every rank raises it, with the same text, in its main thread.

    `kind` is `contradiction` (ranks entered different collectives), `deadlock` (ranks wait for each other), `raised`,
    `ended` (a rank left with or without an exception while others needed it), `lost` (a rank disappeared silently),
    `disconnected` (ranks that are alive could not reach each other) or `timeout` (a rank made others wait for longer
    than the world allows). `ranks` are the ranks at fault, as far as known, or those that could not reach each other.
    `corrupted` (a rank had wrong bits, and has left) and `disk` (so has one whose disk failed) are raised only inside
    of elastic jobs, which recover from them. `unit` and `action` are what was to be done when the fault was
    found (empty outside a program), `origin` is the rank that found it.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "",
        ranks: tuple[int, ...] = (),
        unit: str = "",
        action: str = "",
        origin: int = -1,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.ranks = ranks
        self.unit = unit
        self.action = action
        self.origin = origin

    @property
    def is_of_code(self) -> bool:
        """Whether any other ranks would come to it as well."""
        return self.kind in ("contradiction", "deadlock")


class CorruptionError(ShardwiseError, RuntimeError):
    """Bits of a parameter, state or gradient have changed that nothing has written (`verify` in the plan).

    `ranks` is the rank that has the wrong ones, or, with `is_certain` false, the ranks one of which has. `unit`,
    `tensor` (a parameter's name) and `row` (`param`, `master`, `due`, or the key of a state) say what was found first;
    `step` is the number of the step that was not taken.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: tuple[int, ...],
        unit: str = "",
        tensor: str = "",
        row: str = "",
        step: int = -1,
        is_certain: bool = True,
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.unit = unit
        self.tensor = tensor
        self.row = row
        self.step = step
        self.is_certain = is_certain


class TurnedAwayError(CommError):
    """The others continue without this rank: they considered it dead, or it asked to leave (`has_asked`)."""

    def __init__(self, message: str, *, has_asked: bool = False) -> None:
        super().__init__(message)
        self.has_asked = has_asked


class SpareError(CommError):
    """This rank's replica group has lost a rank. It waits until a group can be formed with it."""


class StateError(ShardwiseError, RuntimeError):
    """A call at an invalid moment, such as a step on a closed engine."""


class LostStateError(StateError):
    """A rank was lost, and the others have nothing to go on from: they start again from the last checkpoint."""


class DataError(ShardwiseError, RuntimeError):
    """A source that could not provide a sample, or samples that do not make a batch."""


class CheckpointError(ShardwiseError):
    """A checkpoint that is missing, incomplete, damaged, or of another model."""


class TierError(ShardwiseError, RuntimeError):
    """Host memory or a disk that cannot hold its content, or did not return it."""


class LaunchError(ShardwiseError, RuntimeError):
    """A job that could not be started, or whose ranks failed."""


def said_by(error: BaseException) -> str:
    """Our own errors as they are; others with their type, and a full disk with what to do."""
    if isinstance(error, ShardwiseError):
        return str(error)
    is_full = isinstance(error, OSError) and error.errno in NO_SPACE
    return f"{type(error).__name__}: {error}.{' Free some space there, or give another folder.' if is_full else ''}"


def wrong_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> ModelError:
    """For a state whose tensor `name` is not of the model's shape."""
    return ModelError(
        f"The state has {name} with shape {list(found)}, but the model has {list(expected)}. Give the whole state, on "
        f"every rank, of a model of the same size."
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown `word`: the nearest known name, in whichever case it was written, or all of them."""
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if not close:
        lowered = {name.lower(): name for name in names}
        close = [lowered[name] for name in difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.5)]
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}."


def some(names: Iterable[str], most: int = 5) -> str:
    """The first `most` of them, and how many more there are: `a, b and 3 more`."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def ranks_in_words(ranks: Sequence[int], most: int = 8) -> str:
    """`rank 3`, `ranks 1 and 3`; of more than `most` `ranks 8 to 15`, or `ranks 1, 3, 4 and 40 more`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > most and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    *names, last = map(str, ranks)
    return f"ranks {some([*names, last], most)}" if len(ranks) > most else f"ranks {', '.join(names)} and {last}"
