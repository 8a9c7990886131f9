"""Signals: a training script that ends between two steps, and a launcher that waits for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

STOPS_BY_USR1 = "SHARDWISE_STOPS_BY_USR1"
"""Set to 1 if the program that starts ranks passes SIGUSR1 on, and kills ranks soon after any other signal."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_Handler = Callable[[int, FrameType | None], Any]


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a flag that a training loop reads between two steps.

        with StopRequest() as stop:
            for batch in data:
                train(batch)
                if stop.requested:
                    save()
                    break

    Under Open MPI's `mpirun`, started by `shardwise launch`, SIGUSR1 counts as SIGTERM. In an elastic job a single rank
    that gets SIGTERM leaves after its step and the others continue; `requested` stays False then. A second signal
    raises KeyboardInterrupt. Python allows handlers in the main thread only: in other threads this object does nothing,
    and `requested` stays False.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._replaced: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether this process was asked to end."""
        return self.signal is not None

    def install(self) -> StopRequest:
        """Install the handlers; may be called twice."""
        if not self._replaced and threading.current_thread() is threading.main_thread():
            by_usr1 = [signal.SIGUSR1] if os.environ.get(STOPS_BY_USR1) == "1" else []
            self._replaced = _replace([*_STOP_SIGNALS, *by_usr1], self._receive)
        return self

    def close(self) -> None:
        """Restore the former handlers; `requested` and `signal` stay readable."""
        _restore(self._replaced)

    def __enter__(self) -> StopRequest:
        return self.install()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        members = sys.modules.get("shardwise.comm.members")  # only where a world was joined
        if number == signal.SIGTERM and members is not None and members.DEPARTURE.ask():
            return  # the others continue
        if self.requested:
            raise KeyboardInterrupt(f"second signal: {signal.Signals(number).name}")
        self.signal = signal.SIGTERM if number == signal.SIGUSR1 else signal.Signals(number)


class SignalLog:
    """The signals that a launcher received, in order, for its loop to read.

    The handler only records them. If it raised, this could happen while ranks are being started or killed, and leave
    some of them behind.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._replaced: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalLog:
        under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = _STOP_SIGNALS if under_nohup else (*_STOP_SIGNALS, signal.SIGHUP)
        self._replaced = _replace(numbers, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._replaced)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))


def _replace(numbers: Iterable[signal.Signals], handler: _Handler) -> dict[signal.Signals, Any]:
    """Install `handler` and return the former handlers."""
    return {number: signal.signal(number, handler) for number in numbers}


def _restore(replaced: dict[signal.Signals, Any]) -> None:
    """Restore the former handlers, once."""
    while replaced:
        number, handler = replaced.popitem()
        # None: the handler was not set from Python and cannot be put back from Python
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
