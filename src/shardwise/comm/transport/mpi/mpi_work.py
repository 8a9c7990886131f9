"""The work object that torch waits for, for collectives by MPI."""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from shardwise.comm.transport.mpi.progress_thread import Operation, Progress
from shardwise.errors import CommError

_NO_TIMEOUT = datetime.timedelta(0)


class MpiWork(dist.Work):
    """Methods are those of `torch.distributed.Work`."""

    def __init__(self, progress: Progress, operation: Operation, future: Future[Any], result: Any, source: int) -> None:
        super().__init__()
        self._progress = progress
        self._operation = operation
        self._future = future
        self._result = result
        self._source = source

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Return once it is done. Raises its error, or `CommError` after `timeout`."""
        seconds = timeout.total_seconds()
        deadline = time.monotonic() + seconds

        def look() -> None:
            if seconds > 0 and time.monotonic() > deadline:
                raise CommError(f"Timed out after {seconds:g} s.")

        self._progress.wait(self._operation, look)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._operation.is_over

    def is_success(self) -> bool:
        return self._operation.is_over and self._operation.error is None

    def exception(self) -> BaseException | None:
        return self._operation.error

    def get_future(self) -> Future[Any]:
        return self._future

    def result(self) -> Any:
        return self._result

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank
