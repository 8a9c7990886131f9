"""Shows and stores what ranks on other hosts print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

from shardwise.launch.hosts.host_messages import Message
from shardwise.launch.log_folder import Folder


class Logs:
    """Writes the output of ranks to stdout and stderr, and to a file per rank if logs are kept."""

    def __init__(self, folder: Folder, keeps: bool) -> None:
        self._folder, self._keeps = folder, keeps
        self._files: dict[Path, BinaryIO] = {}

    def write(self, attempt: int, message: Message) -> None:
        """Show a message of kind `output`."""
        block = message["text"].encode()
        screen = (sys.stderr if message["is_error"] else sys.stdout).buffer
        try:
            screen.write(block)
            screen.flush()
        except OSError:
            pass  # the reader is gone; ranks must still be watched and ended
        if self._keeps:
            files = self._folder.files(attempt, int(message["rank"]))
            path = files.stderr if message["is_error"] else files.stdout
            assert path is not None
            self._open(path).write(block)

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def _open(self, path: Path) -> BinaryIO:
        if path not in self._files:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[path] = path.open("wb")
        return self._files[path]
