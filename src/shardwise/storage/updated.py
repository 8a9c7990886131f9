"""Memory of parameters that blocks readers while an update is still being gathered.

[Note: updates behind the step] If parameters are whole on every rank and their update is sharded (ZeRO-1 and 2), each
rank gathers what the others have updated. On devices and between hosts such a gather proceeds while ranks compute, so
the step starts it and returns, and the next forward waits for it, unit by unit. Any other code that reads the memory in
between waits here, so that it never sees a partial update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor


class Updated:
    """The whole buffer and the range stored on this rank, which share memory if parameters stay whole."""

    def __init__(self) -> None:
        self._full = torch.empty(0)
        self._param = torch.empty(0)
        self._await_update: Callable[[], None] | None = None
        self.failed_update: Exception | None = None
        """Why the last update will never be complete. Every reader gets it, and none gets a part of the update."""

    @property
    def is_updating(self) -> bool:
        """Whether these parameters are still being gathered from the ranks that updated them."""
        return self._await_update is not None

    @property
    def full(self) -> Tensor:
        """The whole buffer; blocks while it is being updated, because readers cannot tell old values from new ones."""
        if self._await_update is not None:
            self._await_update()
        return self._full

    @full.setter
    def full(self, tensor: Tensor) -> None:
        self._full = tensor

    @property
    def param(self) -> Tensor:
        """The range stored on this rank; blocks as `full` does."""
        if self._await_update is not None:
            self._await_update()
        return self._param

    @param.setter
    def param(self, tensor: Tensor) -> None:
        self._param = tensor

    def begin_update(self, wait: Callable[[], None]) -> None:
        """Note that the parameters are being gathered; `wait` blocks until they are, and calls `end_update`."""
        self._await_update = wait

    def fail_update(self, error: Exception) -> None:
        """The update will never be complete."""
        self.failed_update = error
        self._await_update = self.end_update

    def end_update(self) -> None:
        """The parameters are up to date. Raises the error of an update that has failed."""
        if self.failed_update is not None:
            raise self.failed_update
        self._await_update = None
