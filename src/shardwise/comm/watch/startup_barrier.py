"""How ranks find out that all of them are there, before anything connects them.

[Note: startup barrier] torch's own rendezvous waits silently for missing ranks, and always ends in a timeout, whatever
the reason. So ranks wait for each other in the store first: each registers, and checks who else has. A process that
finds that this cannot succeed (two processes have the same rank, two ranks disagree about the world size, the launcher
sees one end) posts a fault there, which all others raise at once. A rank may wait for the others several times, for one
world after the other, and counts how often.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterable
from typing import NoReturn

import psutil

from shardwise.comm.compat import Store
from shardwise.comm.watch.fault import Fault
from shardwise.comm.watch.sealed_store import SealedStore
from shardwise.errors import FaultError, ranks_in_words
from shardwise.system.job_token import Seal

_PAUSES = 0.005, 0.1
"""Seconds between two checks, at first and after a while."""
_log = logging.getLogger("shardwise")


class StartupBarrier:
    """The barrier of one attempt of a job, in its store. Store errors are raised as they come, `RuntimeError`."""

    def __init__(self, store: Store, attempt: str, me: str = "", seal: Seal | None = None) -> None:
        """Keys carry the attempt, so that after a restart no rank reads what a dead attempt wrote. `me` identifies this
        process; the default is unique. Values that no member of the job has written raise `CommError`."""
        self._me = me or f"process {os.getpid()} on {socket.gethostname()}, begun at {_began():.2f}"
        self._store = SealedStore(f"shardwise/attempt-{attempt}/startup", store, seal or Seal())

    def wait(
        self,
        rank: int,
        size: int,
        where: str,
        *,
        timeout_seconds: float,
        patience_seconds: float,
        is_host: bool,
        hint: str = "",
    ) -> int:
        """Return once all `size` ranks are here; log which are missing after `patience_seconds`. All ranks call.

        The result counts how often they have been here together, the same on all. `where` names the store. With
        `is_host` the store ends with this process. `hint` is said beside the ranks that are missing. Raises
        `FaultError`.
        """
        try:
            self._introduce(rank, size)
            return self._gather(rank, size, where, timeout_seconds, patience_seconds, hint)
        except FaultError:
            if is_host:
                time.sleep(3 * _PAUSES[1])  # let the others read it too
            raise

    def cancel(self, fault: Fault) -> Fault:
        """Make all who wait here, now or later, raise `fault`, or the one that was posted before. Returns that one."""
        return Fault.from_json(self._store.set_once("fault", fault.to_json()))

    def cancel_without(self, ended: Iterable[int], living: Iterable[int]) -> None:
        """Cancel it if one of the `living` ranks waits for one that has `ended`. For the launcher."""
        begun = {rank: self._store.count(f"begun/{rank}") for rank in living}
        waiting = [number for rank, number in begun.items() if number > self._met(rank)]
        for rank in ended:
            if waiting and self._store.count(f"begun/{rank}") < max(waiting):
                text = f"Rank {rank} has ended, and well, before it met the others in World.join()."
                self.cancel(Fault("ended", (rank,), text))

    def _introduce(self, rank: int, size: int) -> None:
        me = self._me
        there = self._store.set_once(f"who/{rank}", me).decode()
        if there != me:
            self._refuse(
                rank,
                f"Two processes are rank {rank}: {there}, and {me}. Give each a RANK of its own, from 0 to WORLD_SIZE "
                f"- 1, and each job an address (MASTER_ADDR, MASTER_PORT) of its own. A program that a rank starts "
                f"has its variables, too: start it without RANK and WORLD_SIZE.",
            )
        first = self._store.set_once("size", f"{size} {rank}").decode()
        their_size, other = map(int, first.split())
        if their_size != size:
            self._refuse(
                rank,
                f"Rank {rank} was started with WORLD_SIZE={size}, but rank {other} with WORLD_SIZE={their_size}. "
                f"Start all ranks with the same.",
            )

    def _gather(
        self, rank: int, size: int, where: str, timeout_seconds: float, patience_seconds: float, hint: str
    ) -> int:
        number = self._store.add(f"begun/{rank}", 1)
        here = [f"here/{number}/{other}" for other in range(size)]
        self._store.set(here[rank], "here")
        started, pause, warn_after = time.monotonic(), _PAUSES[0], patience_seconds
        while not self._store.check(here):
            if self._store.check(["fault"]):
                raise Fault.from_json(self._store.get("fault")).error()
            waited = time.monotonic() - started
            if waited > min(warn_after, timeout_seconds):
                missing = [other for other in range(size) if not self._store.check([here[other]])]
                if not missing:  # a process that was stopped meanwhile finds all here, however late it is
                    continue
                if waited > timeout_seconds:
                    raise _overdue(missing, size, where, timeout_seconds, hint).error()
                warn_after *= 2
                if rank == min(set(range(size)).difference(missing)):
                    who = ranks_in_words(missing).capitalize()
                    _log.warning("%s of %d did not come to %s yet, for %.0f s.%s", who, size, where, waited, hint)
            time.sleep(pause)
            pause = min(1.5 * pause, _PAUSES[1])
        self._store.set(f"met/{rank}", str(number))
        if number > 1:  # all have left the previous one
            self._store.delete_key(f"here/{number - 1}/{rank}")
        return number

    def _refuse(self, rank: int, text: str) -> NoReturn:
        """Raise the fault, after posting it for the others unless there is one."""
        mine = Fault("contradiction", (rank,), text, origin=rank)
        self.cancel(mine)
        raise mine.error()

    def _met(self, rank: int) -> int:
        key = f"met/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else 0


def _began() -> float:
    return psutil.Process().create_time()


def _overdue(missing: list[int], size: int, where: str, timeout_seconds: float, hint: str) -> Fault:
    return Fault(
        "timeout",
        tuple(missing),
        f"{ranks_in_words(missing).capitalize()} of {size} never came to {where}, where the others have waited for "
        f"{timeout_seconds:g} s. Have all ranks been started, with the same MASTER_ADDR and MASTER_PORT?{hint}",
    )
