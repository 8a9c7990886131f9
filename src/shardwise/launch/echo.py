"""Copies the ranks' log files to the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import IO, Protocol

from shardwise.launch.ranks import RankFiles

_INTERVAL_SECONDS = 0.1


class Screen(Protocol):
    """A stream that shows output."""

    def write(self, block: bytes, /) -> object: ...

    def flush(self) -> object: ...


class Echo:
    """Copies new whole lines of every rank's log to this process's stdout and stderr, or elsewhere, until closed.

    Ranks write to the files themselves, so their output survives a launcher that dies.
    """

    def __init__(
        self,
        files: Iterable[RankFiles],
        screens: Callable[[int], tuple[Screen, Screen]] | None = None,
        *,
        from_end: bool = False,
    ) -> None:
        """`screens` maps the index of a rank in `files` to the streams used instead of stdout and stderr. `from_end`
        leaves out what is there already."""
        self._tails: list[_Tail] = []
        for index, rank in enumerate(files):
            out, err = (sys.stdout.buffer, sys.stderr.buffer) if screens is None else screens(index)
            for path, screen in ((rank.stdout, out), (rank.stderr, err)):
                if path is not None:
                    source = path.open("rb")
                    source.seek(0, os.SEEK_END if from_end else os.SEEK_SET)
                    self._tails.append(_Tail(source, screen))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="shardwise-echo", daemon=True)
        if self._tails:
            self._thread.start()

    def close(self) -> None:
        """Copy what is left and stop; may be called twice."""
        if self._closing.is_set() or not self._tails:
            return
        self._closing.set()
        self._thread.join()
        for tail in self._tails:
            tail.copy(all_of_it=True)
            tail.source.close()

    def _copy(self) -> None:
        while not self._closing.wait(_INTERVAL_SECONDS):
            for tail in self._tails:
                tail.copy()


class _Tail:
    """One log file, and the position up to which it has been copied."""

    def __init__(self, source: IO[bytes], screen: Screen) -> None:
        self.source = source
        self._screen = screen
        self._held = b""

    def copy(self, all_of_it: bool = False) -> None:
        """Copy what is new. An unfinished line is held back, so that lines of ranks do not mix."""
        new = self._held + self.source.read()
        end = len(new) if all_of_it else max(new.rfind(b"\n"), new.rfind(b"\r")) + 1
        self._held = new[end:]
        if end:
            with contextlib.suppress(OSError):  # the reader is gone; ranks must still be watched and ended
                self._screen.write(new[:end])
                self._screen.flush()
