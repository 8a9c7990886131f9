"""Deleting files of processes that are gone, on disks that may answer nothing: see `pending.py`."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path


class Removals:
    """Deletes files in the background, those of each folder in turn. A folder may be on a disk that answers nothing, so
    nobody waits for one, except in `settle`, and no other folder is kept waiting by it."""

    def __init__(self) -> None:
        self._waiting: dict[Path, deque[tuple[Path, Callable[[], None]]]] = {}
        """By folder, the deletions to be made; the first is under way, on a thread that ends after the last."""
        self._left: list[Path] = []
        self._given_up: set[Path] = set()
        self._changed = threading.Condition()

    def start(self, path: Path, delete: Callable[[], None]) -> None:
        """Call `delete`, which removes `path`, and maybe others of its folder, once those before it are done."""
        with self._changed:
            if path.parent in self._given_up:
                self._left.append(path)
                return
            waiting = self._waiting.setdefault(path.parent, deque())
            waiting.append((path, delete))
            if len(waiting) > 1:
                return
        threading.Thread(target=self._run, args=(waiting,), name="shardwise removal", daemon=True).start()

    def settle(self, seconds: float) -> list[Path]:
        """Wait until all is deleted, for at most so many seconds. Returns what was not: it is given up, since somebody
        may want the same names again, and so is whatever is asked for in its folder from now on."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._waiting.values()), seconds)
            for folder, waiting in self._waiting.items():
                if waiting:
                    self._given_up.add(folder)
                    self._left += [path for path, _ in waiting]
                    waiting.clear()
            return list(self._left)

    def _run(self, waiting: deque[tuple[Path, Callable[[], None]]]) -> None:
        path, delete = waiting[0]
        while True:
            has_failed = True
            with contextlib.suppress(OSError):
                delete()
                has_failed = False
            with self._changed:
                if not waiting:  # given up meanwhile
                    return
                waiting.popleft()
                if has_failed:
                    self._left.append(path)
                self._changed.notify_all()
                if not waiting:
                    return
                path, delete = waiting[0]
