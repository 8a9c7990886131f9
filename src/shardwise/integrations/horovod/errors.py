"""What Horovod's calls raise."""

from __future__ import annotations

from shardwise.errors import CommError


class HorovodInternalError(CommError):
    """A collective that could not be carried out: ranks contradict each other, or one of them is gone.

    Every rank that has issued it raises it, with the same text. A `RuntimeError`, as Horovod's.
    """


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (Horovod's name)
    """Ranks come or leave. `State.commit` and `check_host_updates` raise it in an elastic job, on all ranks alike."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("The ranks of this job were changed.")
        self.skip_sync = skip_sync
