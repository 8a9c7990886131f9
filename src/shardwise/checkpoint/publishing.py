"""Publishes versions of an engine's weights, one after the other. What readers find is in `published.py`.

[Note: published beside the steps] Weights change in the next update. Where files have the model's own tensors, each
rank writes its rows of them (`own_rows.py`): nothing is gathered, and training waits for nothing but the copy of these
rows, before the next update. Ranks agree through notes in the draft, as in [Note: agreement without messages] in
`saver.py`; rank 0's thread announces the version when all are there. If any rank cannot do so (files have tensors that
are made of others, or are in a folder that it does not see), weights are gathered, unit by unit, and have left the
ranks when `publish` returns: rank 0 has them in its memory then, in the dtype of the files, and its thread writes them,
and drops what it has written. With `wait` that thread is never more than one tensor behind.

No message is sent between two calls, so a rank that has joined the others meanwhile takes part in the next as they do.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from shardwise.checkpoint.draft_notes import Notes, Writer, file_name
from shardwise.checkpoint.formats.drafts import remove_draft, swap_in
from shardwise.checkpoint.own_rows import BYTES, LostRankError, OwnRows, Row
from shardwise.checkpoint.published import Published, Version
from shardwise.checkpoint.write import leave_refusal, note_path
from shardwise.comm import World
from shardwise.comm.agreed import agreed
from shardwise.errors import CheckpointError, said_by

Tensor = torch.Tensor
Named = tuple[str, Tensor]
Told = Callable[[Published], None]
"""Told of a version when it is announced, such as a server that is to load it."""
_STILL_SECONDS = 300
"""After so long without another byte in the draft, rank 0 waits for no rank any more."""
_log = logging.getLogger("shardwise")


class Folder(Protocol):
    """The files of a version, of which all is known but values: see `formats.WeightFolder`."""

    @property
    def num_bytes(self) -> int: ...
    def begin(self, draft: Path) -> None: ...
    def write(self, folder: Path, arriving: Iterator[Named]) -> None: ...


@dataclass(frozen=True)
class Weights:
    """What a version is made of, on one rank."""

    folder: Folder
    whole: Iterable[Named]
    """All tensors, whole, in the order of the files. To iterate is collective."""
    own: Callable[[], list[Row]] | str
    """This rank's rows; or why there are none, as the end of a sentence."""


class Publisher:
    """See [Note: published beside the steps]. `close()` it."""

    def __init__(self) -> None:
        self._under_way: _Writing | None = None
        self._has_said_why = False

    def publish(
        self, world: World, version: Version, weights: Weights, *, tell: Sequence[Told] = (), wait: bool = True
    ) -> None:
        """Make a folder of `weights`, and announce it; see `Engine.publish`. All ranks call."""
        draft: Path | None = None
        try:
            name = self._on_rank_0(world, lambda: self._begin(version, weights, may_lose=world.membership is not None))
            version.has_begun = True
            if not name:
                return  # it was announced, and then a rank was lost
            draft = version.folder / name
            writers = self._writers(world, draft, weights.own)
            if writers:
                making = _rows_of(world, version, weights, draft, writers)
                self._start(_Writing(version, making, () if world.rank else tell, is_awaited=wait))
            else:
                self._gather(world, version, weights, tell, wait=wait)
            if wait:
                self.wait(world)
        except BaseException as error:  # Ctrl-C, or a lost rank, too
            if draft is not None:
                self._abandon()
                leave_refusal(draft / file_name(world.rank), error)  # rank 0 may wait for a note
            version.abandon()
            raise

    def wait(self, world: World) -> None:
        """Return once what was published last is announced; raise if it could not be. All ranks call."""
        under_way = self._under_way

        def settle() -> str:
            self._settle()
            if under_way is not None and not under_way.version.is_out:
                raise CheckpointError(
                    f"Version {under_way.version.number} of the weights was lost with rank 0. Publish it again; "
                    f"readers stay with the version before."
                )
            return ""

        self._on_rank_0(world, settle)

    def wait_for_copy(self) -> None:
        """Return once nothing of the model's memory is read for a version. One rank may call alone."""
        if self._under_way is not None:
            self._under_way.making.wait_for_copy()

    def close(self) -> None:
        """Wait for what is being written. Raises what this rank knows of it."""
        self._settle()

    # -- before anything is written -----------------------------------------------------------------------

    def _begin(self, version: Version, weights: Weights, *, may_lose: bool) -> str:
        """The name of the draft, in which files have everything but their values if ranks are to write these; empty
        if the version is announced already."""
        self._settle(may_lose=may_lose)
        if version.is_announced():
            return ""
        draft = version.begin()
        if not isinstance(weights.own, str):
            try:
                weights.folder.begin(draft)
            except Exception as error:  # transformers may refuse a configuration
                raise CheckpointError(version.failure(error)) from error
        return draft.name

    def _writers(self, world: World, draft: Path, own: object) -> list[Writer]:
        """The processes of the ranks, if each of them can write its rows into `draft`; otherwise none."""
        why = own if isinstance(own, str) else ""
        if not why and not draft.is_dir():
            why = f"rank {world.rank} does not see {draft.parent}"
        mine = {"why": why, "writer": asdict(Writer.me())}
        every = [json.loads(message) for message in world.exchange(json.dumps(mine).encode(), "publish")]
        reasons = [one["why"] for one in every if one["why"]]
        if not reasons:
            return [Writer(**one["writer"]) for one in every]
        if world.rank == 0:
            remove_draft(draft)
            if not self._has_said_why:
                _log.info("Weights are gathered to be published, because %s.", reasons[0])
        self._has_said_why = True
        return []

    # -- writing ------------------------------------------------------------------------------------------

    def _gather(self, world: World, version: Version, weights: Weights, tell: Sequence[Told], *, wait: bool) -> None:
        gathered: _Gathered | None = None
        if world.rank == 0:
            gathered = _Gathered(version, weights.folder, 1 if wait else 0)
            self._start(_Writing(version, gathered, tell, is_awaited=wait))
        for name, tensor in weights.whole:
            if gathered is not None:
                gathered.give(name, tensor)
            del tensor
        if gathered is not None:
            gathered.end()

    def _start(self, writing: _Writing) -> None:
        self._under_way = writing
        writing.start()

    def _abandon(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.making.abandon()
            under_way.finish()

    def _settle(self, *, may_lose: bool = False) -> None:
        """Wait for what is being written, and raise its error; with `may_lose` none that is a lost rank's, because the
        others go on, and this version is replaced."""
        under_way = self._under_way
        if under_way is None:
            return
        under_way.finish()
        self._under_way = None
        if under_way.error is not None and not (may_lose and under_way.has_lost_rank):
            raise under_way.error

    def _on_rank_0(self, world: World, work: Callable[[], str]) -> str:
        """What `work` returns on rank 0; all ranks raise what it meets. The others wait for their own rows."""
        try:
            with agreed(world, "publish", CheckpointError) as told:
                if world.rank == 0:
                    told.mine = work()
                elif self._under_way is not None:
                    self._under_way.finish()
        except CheckpointError:
            self._under_way = None
            raise
        self._under_way = None
        answer: str = told.by_rank[0]
        return answer


def _rows_of(world: World, version: Version, weights: Weights, draft: Path, writers: Sequence[Writer]) -> _Making:
    assert not isinstance(weights.own, str)
    own = OwnRows(weights.own(), draft / file_name(world.rank), world.rank_device)
    if world.rank:
        return own
    notes = Notes(draft, writers, world.journal, _STILL_SECONDS)
    return _OfAllRanks(version, own, weights.folder, notes, draft)


# -- in a thread ------------------------------------------------------------------------------------------


class _Making(Protocol):
    """Makes a version, or this rank's part of it."""

    def make(self) -> None: ...
    def abandon(self) -> None:
        """It will not be announced any more, if it is not yet."""
        ...

    def wait_for_copy(self) -> None: ...


class _Writing(threading.Thread):
    """Has a version made, and tells of it. The interpreter does not exit before."""

    def __init__(self, version: Version, making: _Making, tell: Sequence[Told], *, is_awaited: bool) -> None:
        super().__init__(name="shardwise publish")
        self.version, self.making = version, making
        self.error: CheckpointError | None = None
        self.has_lost_rank = False
        self._tell, self._is_awaited = tell, is_awaited

    def run(self) -> None:
        try:
            self.making.make()
        except Exception as error:
            self.has_lost_rank = isinstance(error, LostRankError)
            self._fail(self.version.failure(error))
        else:
            self._tell_all()

    def finish(self) -> None:
        """Return when it has ended; at once if it could not be started."""
        if self.ident is not None:
            self.join()

    def _tell_all(self) -> None:
        """At the same time, because each may load for a while; and all of them, whether others fail or not."""
        if not self._tell:
            return
        found = Published(self.version.number, self.version.path)
        with ThreadPoolExecutor(len(self._tell), "shardwise tell") as threads:
            calls = [threads.submit(told, found) for told in self._tell]
        refusals = [said_by(error) for call in calls if (error := call.exception()) is not None]
        if refusals:
            self._fail(
                f"Version {found.version} of the weights is published in {self.version.folder}, but {len(refusals)} "
                f"of {len(calls)} that were told of it have not taken it: {' '.join(refusals)}"
            )

    def _fail(self, why: str) -> None:
        """Raised by the next call that publishes or waits, which may be long after."""
        self.error = CheckpointError(why)
        if not self._is_awaited:
            _log.error("%s", why)


class _OfAllRanks:
    """A version of the rows that all ranks write, on rank 0."""

    def __init__(self, version: Version, own: OwnRows, folder: Folder, notes: Notes, draft: Path) -> None:
        self._version, self._own, self._folder = version, own, folder
        self._notes, self._draft = notes, draft
        self._ending = threading.Lock()
        self._is_abandoned = False

    def wait_for_copy(self) -> None:
        self._own.wait_for_copy()

    def make(self) -> None:
        try:
            self._own.make()
            self._check_all()
            with self._ending:
                if self._is_abandoned:
                    raise CheckpointError("a rank failed meanwhile.")
                swap_in(self._draft, self._version.path)
                self._version.announce()
        finally:
            remove_draft(self._draft)

    def abandon(self) -> None:
        with self._ending:
            self._is_abandoned = True
            remove_draft(self._draft)  # which ends the wait for notes

    def _check_all(self) -> None:
        """Wait for the notes of all ranks, and remove them."""
        try:
            notes = self._notes.wait()
        except CheckpointError as error:
            raise LostRankError(str(error)) from error
        for rank, note in enumerate(notes):
            if "error" in note:
                raise CheckpointError(f"rank {rank} reports: {note['error']}")
            note_path(self._draft / file_name(rank)).unlink()
        written = sum(note[BYTES] for note in notes)
        if written != self._folder.num_bytes:
            raise CheckpointError(f"the ranks have written {written} of {self._folder.num_bytes} bytes.")


class _Gathered:
    """A version of tensors that are given to it, on rank 0."""

    def __init__(self, version: Version, folder: Folder, most_waiting: int) -> None:
        """`most_waiting`: how many tensors may wait to be written; 0 for any number."""
        self._version, self._folder = version, folder
        self._given: queue.Queue[Named | None] = queue.Queue(most_waiting)
        self._is_abandoned = self._has_ended = False

    def wait_for_copy(self) -> None:
        """They have been copied when they are given."""

    def give(self, name: str, tensor: Tensor) -> None:
        """Takes a copy: a part of a unit would keep all of it in memory, and the model's own tensors will change."""
        self._given.put((name, tensor.detach().to("cpu", copy=True)))

    def end(self) -> None:
        """All have been given."""
        self._given.put(None)

    def abandon(self) -> None:
        """There will not be more, and some are missing."""
        self._is_abandoned = True
        self.end()

    def make(self) -> None:
        try:
            self._folder.write(self._version.path, self._arriving())
            self._version.announce()
        finally:
            while not self._has_ended:  # whoever gives must not wait for ever
                self._has_ended = self._given.get() is None

    def _arriving(self) -> Iterator[Named]:
        while (item := self._given.get()) is not None:
            yield item
            del item
        self._has_ended = True
        if self._is_abandoned:
            raise CheckpointError("a rank failed meanwhile, and the weights did not all arrive.")
