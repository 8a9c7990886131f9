"""The watchdog: one thread per rank that reports to the others how this rank fares, and ends waits that would never
end.

It wakes a few times a second, reads the journal, and posts a report on the board. While its rank waits it reads the
reports of the ranks it waits for (`diagnosis.py` interprets them). The first watchdog to find a fault posts it on the
board; every watchdog finds it there and cuts its rank's links, so that the blocked thread wakes and raises the fault.

Heartbeats decide nothing: a process that is stopped for a minute looks like a dead one.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from shardwise.comm.host_layout import Hosts
from shardwise.comm.watch.broken_link import BrokenLink
from shardwise.comm.watch.diagnosis import (
    SILENT_SECONDS,
    Circle,
    GoneHost,
    Lateness,
    contradiction,
    departure,
    disappearance,
    disconnection,
    judge,
    overdue,
    unexplained,
)
from shardwise.comm.watch.fault import Fault
from shardwise.comm.watch.journal import Journal, in_words
from shardwise.comm.watch.status import Status
from shardwise.comm.watch.status_board import Board, BoardError
from shardwise.comm.work import LinkError
from shardwise.errors import CommError

LONGEST_PERIOD_SECONDS = 0.5
# A rank that raises reports it before its connections close, but the report may still be on its way.
_LOST_AFTER_SECONDS = 0.4
_HURRIED_PERIOD_SECONDS = 0.1
_CLOSING_SECONDS = 10
_MOST_HURRIED_PERIODS = 20
"""For which a rank waits to be told why its link broke. They are counted, so that a machine that stands still in one of
them, for however long, leaves the watch the others."""
_log = logging.getLogger("shardwise")


class Watchdog:
    """Watches the rank whose thread creates it. `close()` it."""

    def __init__(
        self,
        journal: Journal,
        size: int,
        board: Board,
        abort: Callable[[], None],
        *,
        patience_seconds: float,
        timeout_seconds: float,
        lost_ranks: Callable[[], Collection[int]] = tuple,
        end_lost_waits: Callable[[], None] = lambda: None,
    ) -> None:
        """`abort` breaks this rank's links, `lost_ranks` returns the ranks whose links are closed already, and
        `end_lost_waits` ends waits for them that would go on; from any thread."""
        self.patience_seconds = patience_seconds
        self._journal = journal
        self._size = size
        self._board = board
        self._abort = abort
        self._lost_ranks = lost_ranks
        self._end_lost_waits = end_lost_waits
        self._hosts: Hosts | None = None
        self._closed_ranks = lost_ranks
        self._timeout_seconds = timeout_seconds
        self._owner = threading.current_thread()
        self._pid = os.getpid()
        self._beat = 0
        self._progress: tuple[object, ...] = ()
        self._since = time.monotonic()
        self._heard: dict[int, tuple[int, float]] = {}
        self._circle: Circle | None = None
        self._lost: BrokenLink | None = None
        self._warn_after_seconds = patience_seconds
        self._closing = False
        self._wake = threading.Event()
        self._is_delivered = threading.Event()
        self._publish()
        journal.explain = self._explain
        self._thread = threading.Thread(target=self._run, name=f"shardwise-watch-{journal.rank}", daemon=True)
        self._thread.start()
        if self._owner is threading.main_thread():
            atexit.register(self._at_exit)

    def set_hosts(self, hosts: Hosts, closed_ranks: Callable[[], Collection[int]]) -> None:
        """Set the hosts of the ranks, if there are several, and which ranks' links are closed at either end."""
        self._hosts, self._closed_ranks = hosts, closed_ranks

    @property
    def _period_seconds(self) -> float:
        return max(0.01, min(LONGEST_PERIOD_SECONDS, self.patience_seconds / 8))

    def close(self, error: BaseException | None = None, *, parts: bool = True) -> None:
        """Report that this rank has ended, or what it raised, and stop. May be called twice.

        With `parts=False` the rank goes on in another world, and nothing is reported.
        """
        if self._closing or os.getpid() != self._pid:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSING_SECONDS)
        self._journal.explain = None
        atexit.unregister(self._at_exit)
        if not parts or self._thread.is_alive():  # it waits for a store that is cut off: nobody can be reached
            return
        try:
            self._publish_end(error)
            self._board.leave(self._size)
        except BoardError:
            return  # nobody is left to read it

    def _publish_end(self, error: BaseException | None) -> None:
        reason = in_words(error) if error is not None else ""
        status = self._journal.status(self._beat + 1, self._seconds()).left(reason)
        self._board.publish(status)
        if error is not None and self._journal.fault is None:
            self._claim(departure(status, ()))

    def _at_exit(self) -> None:
        """The script is over, and this rank's world was not closed."""
        if os.getpid() != self._pid:
            return  # a forked child; its parent reports for the rank
        error = getattr(sys, "last_value", None)
        self.close(error)
        if error is not None and not self._board.outlives_ranks:
            time.sleep(2 * self._period_seconds)  # this process may keep the board: let the others read it

    # -- the watch's own thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while self._journal.fault is None:
            self._wake.wait(self._period_seconds if self._lost is None else _HURRIED_PERIOD_SECONDS)
            self._wake.clear()
            if self._closing:
                return
            try:
                self._end_lost_waits()
                self._check()
            except BoardError as error:
                self._check_without_board(error)
            except Exception as error:  # without a watchdog this rank might wait for ever, so it raises this instead
                _log.exception("The watch over rank %d broke down.", self._journal.rank)
                self._give_up(error)

    def _check(self) -> None:
        moved = self._journal.progress()  # noted first: it counts where the board is gone for a while, too
        is_still = moved == self._progress
        if not is_still:
            self._progress, self._since = moved, time.monotonic()
            self._warn_after_seconds, self._circle = self.patience_seconds, None
        fault = self._board.fault()
        if fault is not None:
            self._deliver(fault)
            return
        if not self._owner.is_alive():
            is_script = self._owner is threading.main_thread()
            self._publish_end(getattr(sys, "last_value", None) if is_script else None)
            self._closing = True
            return
        mine = self._publish()
        if self._lost is not None:
            fault = self._trace(mine, self._lost)
        elif mine.awaited is not None and is_still:
            fault = self._inquire(mine)
        elif self._journal.device_wait is not None:
            fault = self._compare(mine)
        if fault is not None:
            self._deliver(self._claim(fault))

    def _claim(self, fault: Fault) -> Fault:
        return self._board.claim(replace(fault, origin=self._journal.rank, goes_on=self._journal.is_elastic))

    def _give_up(self, error: Exception) -> None:
        """The watchdog itself failed: report that to the others, and to this rank."""
        rank = self._journal.rank
        text = f"The watch over rank {rank} broke down, which is a defect of shardwise: {in_words(error)}."
        fault = Fault("raised", (rank,), text, origin=rank)
        try:
            fault = self._board.claim(fault)
        except BoardError:
            pass  # then only this rank learns of it
        self._deliver(fault)

    def _publish(self) -> Status:
        self._beat += 1
        status = self._journal.status(self._beat, self._seconds())
        self._board.publish(status)
        return status

    def _inquire(self, mine: Status) -> Fault | None:
        """This rank waits: find out for which rank, and whether that is a fault."""
        finding = judge(mine, self._read, self._silent_seconds)
        if isinstance(finding, Fault):
            # reports of two ranks do not show which of them is odd; those of others may
            is_settled = len(finding.ranks) == 1 or self._size == 2 or finding.kind != "contradiction"
            return finding if is_settled or mine.seconds > 4 * self._period_seconds else None
        if isinstance(finding, Circle):
            return self._confirmed(finding)
        if isinstance(finding, Lateness) and self._is_lost(finding.rank):
            why = f"its connection to rank {mine.rank} is closed."
            return disappearance(finding.rank, finding.status, why, mine, self._lost_host(finding.rank))
        silent_host = self._host_where(finding.rank, self._is_silent) if finding is not None else None
        silent = self._silent_seconds(finding.rank) if finding is not None else 0.0
        is_served = finding is not None and finding.is_served(self._timeout_seconds, silent)
        if mine.seconds > self._timeout_seconds and not is_served:
            return overdue(finding, mine, silent, self._timeout_seconds, host=silent_host)
        if isinstance(finding, Lateness) and mine.seconds > self._warn_after_seconds:
            self._warn(finding, silent_host)
        return None

    def _lost_host(self, rank: int) -> GoneHost | None:
        """The host of a lost rank, if all its ranks are lost."""
        lost = {rank, *self._closed_ranks()}
        return self._host_where(rank, lambda other: other in lost)

    def _host_where(self, rank: int, is_so: Callable[[int], bool]) -> GoneHost | None:
        """The host of `rank`, if it is not this rank's and `is_so` holds for all its ranks."""
        if self._hosts is None:
            return None
        there = self._hosts.ranks_beside(rank)
        for other in there:
            self._read(other)  # so that the time of its silence is known
        if self._journal.rank in there or not all(map(is_so, there)):
            return None
        return GoneHost(self._hosts.names[rank], there)

    def _is_silent(self, rank: int) -> bool:
        return self._silent_seconds(rank) > SILENT_SECONDS

    def _is_lost(self, rank: int) -> bool:
        """Whether a rank that keeps this one waiting is gone.

        [Note: a death that nobody touches] A rank that waits for a device blocks on no socket, so none breaks under it,
        and kernels wait for ever. But the system closes the connections of a process that ends, which can be seen from
        here. A process that ends in order reports that first, so its last report has to be older than such a report
        would take.
        """
        return self._silent_seconds(rank) > 2 * _LOST_AFTER_SECONDS and rank in self._lost_ranks()

    def _confirmed(self, circle: Circle) -> Fault | None:
        """Reports are not simultaneous. A circle counts once it is found twice and all its ranks have reported in
        between."""
        before, self._circle = self._circle, circle
        if before is None or before.places != circle.places:
            return None
        if any(circle.beats[rank] == beat for rank, beat in before.beats.items()):
            self._circle = before
            return None
        return circle.fault([status for rank in circle.concerned if (status := self._read(rank)) is not None])

    def _warn(self, late: Lateness, host: GoneHost | None) -> None:
        """Log one line, from the lowest of the waiting ranks, less often the longer it lasts."""
        self._warn_after_seconds *= 2
        if self._journal.rank == min(status.rank for status in late.waiting):
            where = f"; {host.silence}" if host is not None else ""
            _log.warning("%s%s", late.text(self._silent_seconds(late.rank)), where)

    def _compare(self, mine: Status) -> Fault | None:
        """Where messages carry no tag, two different ones may be matched unnoticed: compare histories with a
        neighbour."""
        for line, track in mine.tracks.items():
            ranks = self._journal.ranks_of(line)
            neighbour = ranks[(ranks.index(mine.rank) + 1) % len(ranks)]
            status = self._read(neighbour) if track.count and neighbour != mine.rank else None
            fault = contradiction([mine, status], line) if status is not None else None
            if fault is not None:
                return fault
        return None

    def _trace(self, mine: Status, lost: BrokenLink) -> Fault | None:
        """The link to a rank broke. Its last report may say why; if none comes any more, the rank is gone.

        Where ranks go on after a fault, their launcher tells of a death at once, so that there is time for a report.
        """
        last = self._read(lost.rank)
        if last is not None and last.has_left:
            return departure(last, [mine])
        if lost.outlived_by(last):
            return disconnection(lost.rank, lost.why, mine)
        longest = self._period_seconds + 2 * _HURRIED_PERIOD_SECONDS if self._journal.is_elastic else 0.0
        if lost.seconds < max(_LOST_AFTER_SECONDS, longest):
            return None
        return disappearance(lost.rank, last, lost.why, mine, self._lost_host(lost.rank))

    def _check_without_board(self, error: BoardError) -> None:
        """The board is gone. All that can still be known is that a link broke, or that the timeout has passed."""
        mine, lost = self._journal.status(self._beat, self._seconds()), self._lost
        if lost is not None:
            why, host = f"{lost.why} The store is gone too: {error}", self._lost_host(lost.rank)
            keeper = 0 if error.is_closed and not self._board.outlives_ranks else None
            if host is not None or lost.rank == keeper:
                fault = disappearance(lost.rank, None, why, mine, host)
            else:
                fault = unexplained(lost.rank, why, mine, keeper=keeper)
        elif mine.awaited is not None and mine.seconds > self._timeout_seconds:
            fault = overdue(None, mine, 0.0, self._timeout_seconds, why=f"the store is gone ({error})")
        else:
            return
        self._deliver(replace(fault, origin=mine.rank))

    def deliver(self, fault: Fault) -> None:
        """Set a fault that other code has found. From any thread; the first fault counts."""
        if self._journal.fault is None:
            self._deliver(fault)
            self._wake.set()

    def _deliver(self, fault: Fault) -> None:
        self._journal.fault = fault
        self._abort()
        self._is_delivered.set()

    def _read(self, rank: int) -> Status | None:
        status = self._board.read(rank)
        if status is not None and self._heard.get(rank, (0, 0.0))[0] != status.beat:
            self._heard[rank] = (status.beat, time.monotonic())
        return status

    def _silent_seconds(self, rank: int) -> float:
        return time.monotonic() - self._heard[rank][1] if rank in self._heard else 0.0

    def _seconds(self) -> float:
        return time.monotonic() - self._since

    # -- the rank's own thread --------------------------------------------------------------------------

    def _explain(self, error: LinkError) -> CommError:
        """Why a link broke. Blocks until the watchdog knows, for two seconds at most."""
        self._lost = BrokenLink(error)
        self._wake.set()
        for _ in range(_MOST_HURRIED_PERIODS):
            if self._is_delivered.wait(_HURRIED_PERIOD_SECONDS):
                break
        fault = self._journal.fault
        return fault.error() if fault is not None else CommError(str(error))
