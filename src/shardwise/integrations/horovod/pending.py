"""Collectives that this rank has issued and that are not done: their handles and tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shardwise.integrations.horovod.errors import HorovodInternalError, InvalidCallError

Tensor = torch.Tensor


class Handle:
    """A collective in flight, for `poll` and `synchronize`."""

    def __init__(self, finish: Callable[[Any], Any] | None = None) -> None:
        self._done = threading.Event()
        self._finish = finish
        self._result: Any = None
        self._error: HorovodInternalError | InvalidCallError | None = None
        self.before_wait: Callable[[], None] | None = None
        """Sends the requests that are still queued."""

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def finish(self, result: Any) -> None:
        """Set the result and wake the threads in `wait`."""
        self._result = result
        self._done.set()

    def fail(self, error: HorovodInternalError | InvalidCallError) -> None:
        """Fail with `error`, unless it is done already."""
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def wait(self) -> Any:
        """Wait for the result; may be called again.

        Raises `HorovodInternalError` if the collective failed, and `InvalidCallError` if it could not have succeeded.
        """
        if self.before_wait is not None:
            self.before_wait()
            self.before_wait = None
        self._done.wait()
        if self._error is not None:
            kind = InvalidCallError if isinstance(self._error, InvalidCallError) else HorovodInternalError
            raise kind(str(self._error)) from self._error
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        return self._result

    __call__ = wait  # in Horovod, handles of sparse tensors are called


class _Event(Protocol):
    def wait(self) -> None: ...


@dataclass(slots=True)
class Entry:
    """One collective of this rank. Without `outs`, memory for the results is allocated when their size is known."""

    handle: Handle
    sources: list[Tensor]
    outs: list[Tensor] | None = None
    is_single: bool = True
    device: torch.device | None = None
    ready: _Event | None = None
    """On a device: an event after the kernels that compute `sources`."""
    is_neutral: bool = False
    """This rank has joined: `sources` are neutral values, which are not prescaled."""
    extra: Tensor | None = None
    """A second result: all-to-all returns the number of rows from each rank."""
    device_outs: list[Tensor] | None = field(default=None, repr=False)
    """`outs` on the device, while the executor uses copies on the host."""

    @classmethod
    def of(
        cls,
        sources: Sequence[Tensor],
        outs: Sequence[Tensor] | None = None,
        *,
        is_single: bool = True,
        finish: Callable[[Any], Any] | None = None,
    ) -> Entry:
        device = sources[0].device if sources else None
        ready = None
        if device is not None and device.type != "cpu":
            event = torch.Event(device.type)
            event.record(torch.accelerator.current_stream(device))
            ready = event
        return cls(Handle(finish), list(sources), None if outs is None else list(outs), is_single, device, ready)

    def result(self) -> Any:
        assert self.outs is not None
        result: Any = self.outs[0] if self.is_single else self.outs
        return result if self.extra is None else (result, self.extra)


class PendingCollectives:
    """The pending collectives by process set and name. Shared by the threads that issue and the one that executes."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, str], Entry] = {}
        self._lock = threading.Lock()
        self._error: HorovodInternalError | None = None

    @property
    def error(self) -> HorovodInternalError | None:
        """Why no collectives can be issued any more."""
        return self._error

    def add(self, key: tuple[int, str], entry: Entry) -> None:
        """Raises `ValueError` if the name is in flight already, and `HorovodInternalError` after `end`."""
        with self._lock:
            if self._error is not None:
                raise HorovodInternalError(str(self._error)) from self._error
            if key in self._entries:
                name = key[1].partition(".")[2] or key[1]
                raise ValueError(
                    f"Two tensors named '{name}' are in flight at the same time. Give them different names, or "
                    f"synchronize the first before issuing the second."
                )
            self._entries[key] = entry

    def take(self, key: tuple[int, str]) -> Entry | None:
        with self._lock:
            return self._entries.pop(key, None)

    def end(self, error: HorovodInternalError) -> None:
        """Fail all pending collectives with `error`, and all later ones."""
        with self._lock:
            self._error = self._error or error
            entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            entry.handle.fail(error)
