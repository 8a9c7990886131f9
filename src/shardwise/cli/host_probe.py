"""The facts of one host as JSON; started there by `shardwise doctor --hosts`. Needs no torch."""

from __future__ import annotations

import json
import os
import socket
import sys

from shardwise.launch.hosts.facts import kind_by_files, versions


def facts(folders: list[str]) -> dict[str, object]:
    """Versions that must be equal everywhere, which of `folders` can be written, and whether GPUs that NCCL serves have
    a driver."""
    writable = {folder: os.path.isdir(folder) and os.access(folder, os.W_OK) for folder in folders}
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "folders": writable,
        "cores": os.cpu_count() or 1,
        "gpus": kind_by_files() == "cuda",
    }


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[1:])))
