"""Horovod's exceptions."""

from __future__ import annotations

from shardwise.errors import CommError, ConfigError


class HorovodInternalError(CommError):
    """A collective failed, because the ranks' requests do not match or a rank is lost.

    Every rank that has issued the collective raises it, with the same text. A `RuntimeError`, as in Horovod.
    """


class InvalidCallError(ConfigError, RuntimeError):
    """A collective that no ranks could carry out, such as `alltoall` with wrong splits, or an op that a dtype lacks.

    Every rank that has issued it raises this, with the same text. Elastic loops do not retry: it would fail again. As
    in Horovod a `ValueError` for splits and a `RuntimeError` for ops, and so both.
    """


class ProcessSetError(ConfigError):
    """`init` was given invalid process sets, or different ones on other ranks. All ranks raise it."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 (Horovod's name)
    """Ranks join or leave an elastic job. `State.commit` and `check_host_updates` raise it on all ranks."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("Ranks join or leave this job.")
        self.skip_sync = skip_sync
