"""What this rank has issued and is not done: handles, and the tensors behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shardwise.integrations.horovod.errors import HorovodInternalError

Tensor = torch.Tensor


class Handle:
    """A collective under way: for `poll` and `synchronize`."""

    def __init__(self, finish: Callable[[Any], Any] | None = None) -> None:
        self._done = threading.Event()
        self._finish = finish
        self._result: Any = None
        self._error: HorovodInternalError | None = None
        self.before_wait: Callable[[], None] | None = None
        """Sends what has been issued."""

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def finish(self, result: Any) -> None:
        self._result = result
        self._done.set()

    def fail(self, error: HorovodInternalError) -> None:
        """Unless it is done already."""
        if not self._done.is_set():
            self._error = error
            self._done.set()

    def wait(self) -> Any:
        """What the collective gives; may be asked again. Raises `HorovodInternalError`."""
        if self.before_wait is not None:
            self.before_wait()
            self.before_wait = None
        self._done.wait()
        if self._error is not None:
            raise HorovodInternalError(str(self._error)) from self._error
        if self._finish is not None:
            self._result, self._finish = self._finish(self._result), None
        return self._result

    __call__ = wait  # handles of sparse tensors are called, in Horovod


class Marker(Protocol):
    def wait(self) -> None: ...


@dataclass(slots=True)
class Entry:
    """One collective of this rank. Without `outs`, memory for what it gives is made when its size is known."""

    handle: Handle
    sources: list[Tensor]
    outs: list[Tensor] | None = None
    is_single: bool = True
    device: torch.device | None = None
    ready: Marker | None = None
    """Set on a device when what was asked for before is done."""
    extra: Tensor | None = None
    at_home: list[Tensor] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, sources: Sequence[Tensor], outs: Sequence[Tensor] | None = None, *, is_single: bool = True) -> Entry:
        device = sources[0].device if sources else None
        ready = None
        if device is not None and device.type != "cpu":
            event = torch.Event(device.type)
            event.record(torch.accelerator.current_stream(device))
            ready = event
        return cls(Handle(), list(sources), None if outs is None else list(outs), is_single, device, ready)

    def result(self) -> Any:
        assert self.outs is not None
        given: Any = self.outs[0] if self.is_single else self.outs
        return given if self.extra is None else (given, self.extra)


class Pending:
    """By process set and name. Used by the threads that issue and by the one that carries out."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, str], Entry] = {}
        self._lock = threading.Lock()
        self._over: HorovodInternalError | None = None

    @property
    def over(self) -> HorovodInternalError | None:
        """Why nothing can be issued any more."""
        return self._over

    def add(self, key: tuple[int, str], entry: Entry) -> None:
        """Raises `ValueError` for a name that is under way, `HorovodInternalError` when all is over."""
        with self._lock:
            if self._over is not None:
                raise HorovodInternalError(str(self._over)) from self._over
            if key in self._entries:
                name = key[1].partition(".")[2] or key[1]
                raise ValueError(
                    f"Two tensors named '{name}' are under way at the same time. Give each a name of its own, or "
                    f"synchronize the first before the second."
                )
            self._entries[key] = entry

    def take(self, key: tuple[int, str]) -> Entry | None:
        with self._lock:
            return self._entries.pop(key, None)

    def end(self, error: HorovodInternalError) -> None:
        """All that is pending, and all that comes, raises `error`."""
        with self._lock:
            self._over = self._over or error
            entries, self._entries = list(self._entries.values()), {}
        for entry in entries:
            entry.handle.fail(error)
