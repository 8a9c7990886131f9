"""Where the store of an elastic job's launcher is: a file in the folder of a host that outlives ranks.

A launcher that takes over has a new store, at another address, and the file is replaced; see "When the launcher dies"
in docs/elastic-protocol.md. Imports no torch, since the agents on hosts write it too.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.system import plain_data
from shardwise.system.job_folder import LAUNCHER
from shardwise.system.safe_files import replaced


@dataclass(frozen=True)
class LauncherAddress:
    """The address of a launcher's store. `number` is the number of launchers that the job has had before."""

    number: int
    host: str
    port: int

    def write(self, folder: Path) -> None:
        """Tell the ranks that use `folder`. Call it once the store has what they may ask it for."""
        with replaced(folder / LAUNCHER) as draft:
            draft.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> LauncherAddress | None:
        """The present launcher's, or the last one's; `None` where launchers are not replaced."""
        with contextlib.suppress(OSError, ValueError):
            shape = {"number": int, "host": str, "port": int}
            return cls(**plain_data.read((folder / LAUNCHER).read_bytes(), shape, max_bytes=10_000))
        return None
