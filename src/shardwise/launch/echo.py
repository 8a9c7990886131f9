"""Shows on the terminal what ranks write into their log files."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable
from typing import IO, Protocol

from shardwise.launch.ranks import RankFiles

_INTERVAL_SECONDS = 0.1


class Screen(Protocol):
    """What output can be shown on."""

    def write(self, block: bytes, /) -> object: ...

    def flush(self) -> object: ...


class Echo:
    """Copies new whole lines of every rank's log to our stdout and stderr, or elsewhere, until closed.

    Ranks write into the files themselves, so that a launcher that dies breaks no rank's output.
    """

    def __init__(
        self, files: Iterable[RankFiles], screens: Callable[[int], tuple[Screen, Screen]] | None = None
    ) -> None:
        """`screens` gives what takes the place of stdout and stderr for a rank, by its place in `files`."""
        self._tails: list[_Tail] = []
        for place, rank in enumerate(files):
            out, err = (sys.stdout.buffer, sys.stderr.buffer) if screens is None else screens(place)
            for path, screen in ((rank.stdout, out), (rank.stderr, err)):
                if path is not None:
                    self._tails.append(_Tail(path.open("rb"), screen))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="shardwise-echo", daemon=True)
        if self._tails:
            self._thread.start()

    def close(self) -> None:
        """Show what is left and stop; asking twice changes nothing."""
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
    """One log file, read as far as we have shown it."""

    def __init__(self, source: IO[bytes], screen: Screen) -> None:
        self.source = source
        self._screen = screen
        self._held = b""

    def copy(self, all_of_it: bool = False) -> None:
        """Show what is new; an unfinished line is held back, lest ranks cut into each other's."""
        new = self._held + self.source.read()
        end = len(new) if all_of_it else max(new.rfind(b"\n"), new.rfind(b"\r")) + 1
        self._held = new[end:]
        if end:
            with contextlib.suppress(OSError):  # nobody reads on; the ranks still have to be watched and ended
                self._screen.write(new[:end])
                self._screen.flush()
