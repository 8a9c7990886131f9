"""Signals, on both sides: a training script that ends at a good moment, a launcher that waits for it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

STOPS_BY_USR1 = "SHARDWISE_STOPS_BY_USR1"
"""Set to 1 where whoever starts ranks passes SIGUSR1 on to them, and kills them soon after any other signal."""
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

    So does SIGUSR1 under Open MPI's `mpirun`, if `shardwise launch` has started that; it counts as SIGTERM.
    In an elastic job a rank that alone gets SIGTERM leaves after its step, and the others go on: nothing is requested
    then. A second signal raises KeyboardInterrupt, as an impatient Ctrl-C should. Python allows handlers in
    the main thread only: elsewhere this object stays inert and `requested` stays False.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._replaced: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether somebody asked this process to end."""
        return self.signal is not None

    def install(self) -> StopRequest:
        """Start to listen; asking twice changes nothing."""
        if not self._replaced and threading.current_thread() is threading.main_thread():
            by_usr1 = [signal.SIGUSR1] if os.environ.get(STOPS_BY_USR1) == "1" else []
            self._replaced = _replace([*_STOP_SIGNALS, *by_usr1], self._receive)
        return self

    def close(self) -> None:
        """Put back the handlers that were there before; what was requested stays readable."""
        _restore(self._replaced)

    def __enter__(self) -> StopRequest:
        return self.install()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        members = sys.modules.get("shardwise.comm.members")  # only where a world was joined
        if number == signal.SIGTERM and members is not None and members.DEPARTURE.ask():
            return  # the others go on
        if self.requested:
            raise KeyboardInterrupt(f"second signal: {signal.Signals(number).name}")
        self.signal = signal.SIGTERM if number == signal.SIGUSR1 else signal.Signals(number)


class SignalLog:
    """The signals that a launcher received, in order; reading them is up to its loop.

    The handler only takes note. An exception out of a handler could come while ranks are being
    started or killed, and leave some of them behind.
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
    """Install `handler` and return what was there before."""
    return {number: signal.signal(number, handler) for number in numbers}


def _restore(replaced: dict[signal.Signals, Any]) -> None:
    """Put back what was there before, once."""
    while replaced:
        number, handler = replaced.popitem()
        # None: the handler was not set from Python and cannot be put back from Python
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
