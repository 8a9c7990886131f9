"""A broken link of this rank, until it is known whether the rank at the other end is alive.

Asking the launcher instead would need a launcher, and a report comes twice a second anyway.
"""

from __future__ import annotations

import time

from shardwise.comm.watch.status import Status
from shardwise.comm.work import LinkError


class BrokenLink:
    """See [Note: alive behind a broken connection] in `diagnosis.py`."""

    def __init__(self, error: LinkError) -> None:
        self.rank, self.why = error.rank, str(error)
        self._since = time.monotonic()
        self._beat: int | None = None

    @property
    def seconds(self) -> float:
        """For how long the link has been known to be broken."""
        return time.monotonic() - self._since

    def outlived_by(self, last: Status | None) -> bool:
        """Whether the other rank has reported since. `last` is its last report: the first one that is read may be from
        before, so the next one shows it."""
        if last is None:
            return False
        if self._beat is None:
            self._beat = last.beat
        return last.beat > self._beat
